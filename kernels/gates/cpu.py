"""Gates of recurrent layers on the CPU: contracts and implementations, forward and gradient."""

from typing import Any

from ..cpu.register import register_core
from ..reference import gates as reference
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


def _plain(function: Any) -> Any:
    def run(variant: str, *arguments: Any) -> Any:
        return function(*arguments)

    return run


SIGMOID = _pair(
    "sigmoid", _plain(reference.sigmoid), _plain(reference.sigmoid_grad),
    formula="y = 1 / (1 + exp(-x))", gradient_formula="dx = dy sig (1 - sig)",
    rounding="fp32 inside, once to storage", functions=_EXP, tensors=1,
)  # fmt: skip
SIGMOID_MUL = _pair(
    "sigmoid_mul", _plain(reference.sigmoid_mul), _plain(reference.sigmoid_mul_grad),
    formula="y = x sigmoid(gate)",
    gradient_formula="dx = dy sigmoid(gate); dgate = sigmoid_grad(round(dy x), gate)",
    rounding="sigmoid rounded to storage, then the product", functions=_EXP, tensors=2,
)  # fmt: skip
RELU_SQUARED = _pair(
    "relu_squared", _plain(reference.relu_squared), _plain(reference.relu_squared_grad),
    formula="y = max(x, 0)^2", gradient_formula="dx = dy (r + r), r = max(x, 0)",
    rounding="fp32 inside, once to storage", functions="none", tensors=1,
)  # fmt: skip
DECAY = _pair(
    "decay", _plain(reference.decay), _plain(reference.decay_grad),
    formula="g = -exp(A_log) softplus(a + dt_bias), fp32",
    gradient_formula="da = dg (-exp(A_log)) softplus'; dA_log = sum dg g; ddt_bias = sum da",
    rounding="fp32 throughout", functions=_SOFTPLUS, tensors=3, parameters=(1, 2),
)  # fmt: skip
TIME_STEP = _pair(
    "time_step", _plain(reference.time_step), _plain(reference.time_step_grad),
    formula="y = clamp(softplus(dt + dt_bias), low, high)",
    gradient_formula="d_dt = dy softplus' within the limits, else 0; ddt_bias = sum d_dt",
    rounding="the bias, the sum and its softplus to storage", functions=_SOFTPLUS, tensors=2,
    parameters=(1,),
)  # fmt: skip
DISCRETISED = _pair(
    "discretised", _plain(reference.discretised), _plain(reference.discretised_grad),
    formula="v = x dt, g = -exp(A_log) dt, fp32",
    gradient_formula="dx = dv dt; d_dt = dv . x + dg (-exp(A_log)); dA_log = sum dg g",
    rounding="fp32 throughout", functions=_EXP, tensors=3, parameters=(2,),
)  # fmt: skip
SKIP = _pair(
    "skip", _plain(reference.skip), _plain(reference.skip_grad),
    formula="y = o + D x, fp32", gradient_formula="do = dy; dx = dy D; dD = sum dy . x",
    rounding="fp32, product and sum each rounded", functions="none", tensors=3, parameters=(2,),
    by=1,
)  # fmt: skip
