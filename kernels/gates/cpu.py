"""Gates of recurrent layers on the CPU: contracts and implementations, forward and gradient."""

from typing import Any

import torch
from torch import Tensor

from ..cpu.load import core
from ..cpu.register import is_bf16, register_core
from ..row_operator import RowOperator

_REFERENCE = "zeromismatch.kernels.reference.gates:"
_EXP = "exp.cpu.v1, IEEE division"
_SOFTPLUS = f"{_EXP}, log1p.series.v1"


def _pair(
    op: str,
    forward: Any,
    gradient: Any,
    *,
    formula: str,
    gradient_formula: str,
    rounding: str,
    functions: str,
    tensors: int,
    parameters: tuple[int, ...] = (),
    by: int = 0,
) -> RowOperator:
    """An operator with its two contracts, per storage type."""
    fields: dict[str, Any] = {"functions": functions, "gradient_rtol": 1e-5}
    sums = "columns of a head in 16 lanes, then lanes16.tree.v1; parameters: rows ascending"
    return RowOperator(
        name=op,
        tensors=tensors,
        parameters=parameters,
        by=by,
        forward=register_core(
            forward, name=op, op=op, formula=formula, order="none: elementwise",
            rounding=rounding, reference=f"{_REFERENCE}{op}", **fields,
        ),
        gradient=register_core(
            gradient, name=f"{op}_grad", op=f"{op}_grad", formula=gradient_formula,
            order=sums if parameters else "none: elementwise",
            rounding="fp32 inside, rows rounded once, parameters stay fp32",
            reference=f"{_REFERENCE}{op}_grad", **fields,
        ),
    )  # fmt: skip


def _wide(parameter: Tensor) -> bool:
    return parameter.dtype == torch.float32


def _start(initial: Tensor | None, like: Tensor) -> Tensor:
    """Where a parameter's chain over rows begins."""
    return torch.zeros(like.shape) if initial is None else initial.clone()


def _elementwise(kind: int) -> tuple[Any, Any]:
    def run(variant: str, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = torch.empty_like(x)
        core(variant).call("gate", x, gate, y, kind, x.numel(), is_bf16(x), torch.get_num_threads())
        return y

    def gradient(
        variant: str, dy: Tensor, x: Tensor, gate: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        dx, dgate = torch.empty_like(x), None if gate is None else torch.empty_like(gate)
        core(variant).call(
            "gate_grad", dy, x, gate, dx, dgate, kind, x.numel(), is_bf16(x),
            torch.get_num_threads(),
        )  # fmt: skip
        return (dx,) if dgate is None else (dx, dgate)

    return run, gradient


def _same(parameters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Parameters of one dtype: bf16 ones are widened exactly where another is fp32."""
    wide = any(_wide(each) for each in parameters)
    return tuple(each.float() for each in parameters) if wide else parameters


def _decay(variant: str, a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    a_log, dt_bias = _same((a_log, dt_bias))
    g, heads = torch.empty(a.shape), len(a_log)
    core(variant).call(
        "decay", a, a_log, dt_bias, g, len(a), heads, a.shape[1] // heads, is_bf16(a),
        _wide(a_log), torch.get_num_threads(),
    )  # fmt: skip
    return g


def _decay_grad(
    variant: str,
    dg: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    initial_log: Tensor | None = None,
    initial_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    a_log, dt_bias = _same((a_log, dt_bias))
    da, heads = torch.empty_like(a), len(a_log)
    d_log, d_bias = _start(initial_log, a_log), _start(initial_bias, dt_bias)
    core(variant).call(
        "decay_grad", dg, a, a_log, dt_bias, da, d_log, d_bias, len(a), heads,
        a.shape[1] // heads, is_bf16(a), _wide(a_log), torch.get_num_threads(),
    )  # fmt: skip
    return da, d_log, d_bias


def _time_step(variant: str, dt: Tensor, dt_bias: Tensor, low: float, high: float) -> Tensor:
    y = torch.empty_like(dt)
    core(variant).call(
        "time_step", dt, dt_bias, y, *dt.shape, low, high, is_bf16(dt), _wide(dt_bias),
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def _time_step_grad(
    variant: str,
    dy: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    low: float,
    high: float,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    d_dt, d_bias = torch.empty_like(dt), _start(initial, dt_bias)
    core(variant).call(
        "time_step_grad", dy, dt, dt_bias, d_dt, d_bias, *dt.shape, low, high, is_bf16(dt),
        _wide(dt_bias),
    )  # fmt: skip
    return d_dt, d_bias


def _discretised(variant: str, x: Tensor, dt: Tensor, a_log: Tensor) -> tuple[Tensor, Tensor]:
    v, g = torch.empty(x.shape), torch.empty(dt.shape)
    core(variant).call(
        "discretised", x, dt, a_log, v, g, *x.shape, is_bf16(x), _wide(a_log),
        torch.get_num_threads(),
    )  # fmt: skip
    return v, g


def _discretised_grad(
    variant: str,
    dv: Tensor,
    dg: Tensor,
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, d_dt, d_log = torch.empty_like(x), torch.empty_like(dt), _start(initial, a_log)
    core(variant).call(
        "discretised_grad", dv, dg, x, dt, a_log, dx, d_dt, d_log, *x.shape, is_bf16(x),
        _wide(a_log), torch.get_num_threads(),
    )  # fmt: skip
    return dx, d_dt, d_log


def _skip(variant: str, o: Tensor, x: Tensor, d: Tensor) -> Tensor:
    y = torch.empty_like(o)
    core(variant).call("skip", o, x, d, y, *x.shape, is_bf16(x), _wide(d), torch.get_num_threads())
    return y


def _skip_grad(
    variant: str, dy: Tensor, o: Tensor, x: Tensor, d: Tensor, initial: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    dx, d_d = torch.empty_like(x), _start(initial, d)
    core(variant).call(
        "skip_grad", dy, x, d, dx, d_d, *x.shape, is_bf16(x), _wide(d), torch.get_num_threads()
    )
    return dy.clone(), dx, d_d


SIGMOID = _pair(
    "sigmoid", *_elementwise(0),
    formula="y = 1 / (1 + exp(-x))", gradient_formula="dx = dy sig (1 - sig)",
    rounding="fp32 inside, once to storage", functions=_EXP, tensors=1,
)  # fmt: skip
SIGMOID_MUL = _pair(
    "sigmoid_mul", *_elementwise(1),
    formula="y = x sigmoid(gate)",
    gradient_formula="dx = dy sigmoid(gate); dgate = sigmoid_grad(round(dy x), gate)",
    rounding="sigmoid rounded to storage, then the product", functions=_EXP, tensors=2,
)  # fmt: skip
RELU_SQUARED = _pair(
    "relu_squared", *_elementwise(2),
    formula="y = max(x, 0)^2", gradient_formula="dx = dy (r + r), r = max(x, 0)",
    rounding="fp32 inside, once to storage", functions="none", tensors=1,
)  # fmt: skip
DECAY = _pair(
    "decay", _decay, _decay_grad,
    formula="g = -exp(A_log) softplus(a + dt_bias), fp32",
    gradient_formula="da = dg (-exp(A_log)) softplus'; dA_log = sum dg g; ddt_bias = sum da",
    rounding="fp32 throughout", functions=_SOFTPLUS, tensors=3, parameters=(1, 2),
)  # fmt: skip
TIME_STEP = _pair(
    "time_step", _time_step, _time_step_grad,
    formula="y = clamp(softplus(dt + dt_bias), low, high)",
    gradient_formula="d_dt = dy softplus' within the limits, else 0; ddt_bias = sum d_dt",
    rounding="the bias, the sum and its softplus to storage", functions=_SOFTPLUS, tensors=2,
    parameters=(1,),
)  # fmt: skip
DISCRETISED = _pair(
    "discretised", _discretised, _discretised_grad,
    formula="v = x dt, g = -exp(A_log) dt, fp32",
    gradient_formula="dx = dv dt; d_dt = dv . x + dg (-exp(A_log)); dA_log = sum dg g",
    rounding="fp32 throughout", functions=_EXP, tensors=3, parameters=(2,),
)  # fmt: skip
SKIP = _pair(
    "skip", _skip, _skip_grad,
    formula="y = o + D x, fp32", gradient_formula="do = dy; dx = dy D; dD = sum dy . x",
    rounding="fp32, product and sum each rounded", functions="none", tensors=3, parameters=(2,),
    by=1,
)  # fmt: skip
