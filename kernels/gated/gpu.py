"""Gated activations on the GPU: silu, gelu (tanh form), alone or times ``up``; softcap of logits.

Formulas in :mod:`.gpu_kernels`. The activation is rounded to the dtype, then the product, so that
fused and unfused calls have the same bits. Elementwise: every schedule has the same bits.
Legend: M rows, F columns.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import choose
from ..errors import ContractError
from ..gpu.device import programs, require
from ..gpu.operator import gpu_operator
from ..gpu.register import register_gpu, serving
from ..taps import tapped

_BLOCK = 1024
_MAX_ROWS = 65535


def _rows(x: Tensor) -> Tensor:
    return (
        x
        if x.stride(-1) == 1 and x.data_ptr() % 16 == 0
        else x.clone(memory_format=torch.contiguous_format)
    )


def forward(
    gelu: bool, gate: Tensor, up: Tensor | None = None, *, block: int = _BLOCK, warps: int = 4
) -> Tensor:
    """act(gate) * up of [M, F]; gate and up may be halves of one tensor."""
    gpu_kernels = programs(__package__, "gpu_kernels")

    gate, up = _rows(gate), None if up is None else _rows(up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    width = gate.shape[1]
    for start in range(0, gate.shape[0] if y.numel() else 0, _MAX_ROWS):
        part = slice(start, start + _MAX_ROWS)
        x, u, out = gate[part], gate[part] if up is None else up[part], y[part]
        gpu_kernels.gated_fwd_kernel[(-(-width // block), x.shape[0])](
            x,
            u,
            out,
            x.shape[0],
            width,
            x.stride(0),
            u.stride(0),
            BLOCK=block,
            GELU=gelu,
            HAS_UP=up is not None,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return y


def backward(
    gelu: bool,
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None = None,
    *,
    block: int = _BLOCK,
    warps: int = 4,
) -> Any:
    """dgate, or with ``up`` (dgate, dup)."""
    gpu_kernels = programs(__package__, "gpu_kernels")

    gate, up, dy = _rows(gate), None if up is None else _rows(up), dy.contiguous()
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = dgate if up is None else torch.empty_like(dgate)
    width = gate.shape[1]
    for start in range(0, gate.shape[0] if dgate.numel() else 0, _MAX_ROWS):
        part = slice(start, start + _MAX_ROWS)
        x, u = gate[part], gate[part] if up is None else up[part]
        gpu_kernels.gated_bwd_kernel[(-(-width // block), x.shape[0])](
            x,
            u,
            dy[part],
            dgate[part],
            dup[part],
            x.shape[0],
            width,
            x.stride(0),
            u.stride(0),
            BLOCK=block,
            GELU=gelu,
            HAS_UP=up is not None,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return dgate if up is None else (dgate, dup)


def cap_forward(x: Tensor, cap: float, *, block: int = _BLOCK, warps: int = 4) -> Tensor:
    """cap tanh(x / cap) of fp32 x."""
    return _cap(None, x, cap, block, warps)


def cap_backward(
    dy: Tensor, x: Tensor, cap: float, *, block: int = _BLOCK, warps: int = 4
) -> Tensor:
    """dy (1 - tanh(x / cap)^2)."""
    return _cap(dy.contiguous(), x, cap, block, warps)


def _cap(dy: Tensor | None, x: Tensor, cap: float, block: int, warps: int) -> Tensor:
    gpu_kernels = programs(__package__, "gpu_kernels")

    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        gpu_kernels.softcap_kernel[(-(-x.numel() // block),)](
            x,
            x if dy is None else dy,
            out,
            x.numel(),
            cap,
            BLOCK=block,
            BACKWARD=dy is not None,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out


_ACT = ("activation", "activation_gelu")
_MUL = ("gated", "gated_gelu")


@gpu_operator("zeromismatch::gated")
def gated_op(gate: Tensor, up: Tensor | None, gelu: bool) -> Tensor:
    """act(gate) * up of [M, F]; gate and up may be halves of one tensor."""
    op = (_ACT if up is None else _MUL)[gelu]
    run = choose(serving(CONTRACTS[op], op, gate.dtype)).run
    return tapped(op, run(gate) if up is None else run(gate, up))


@gated_op.register_fake
def _(gate: Tensor, up: Tensor | None, gelu: bool) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@gpu_operator("zeromismatch::gated_grad")
def gated_grad_op(dy: Tensor, gate: Tensor, up: Tensor | None, gelu: bool) -> tuple[Tensor, Tensor]:
    """(dgate, dup); dup is empty without ``up``."""
    op = f"{(_ACT if up is None else _MUL)[gelu]}_grad"
    run = choose(serving(CONTRACTS[op], op, gate.dtype)).run
    return (run(dy, gate), gate.new_empty(0)) if up is None else run(dy, gate, up)


@gated_grad_op.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor | None, gelu: bool) -> tuple[Tensor, Tensor]:
    like = partial(torch.empty, dtype=gate.dtype, device=gate.device)
    return like(gate.shape), like((0,) if up is None else gate.shape)


@gpu_operator("zeromismatch::softcap")
def softcap_op(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap)."""
    return tapped("softcap", choose(serving(CONTRACTS["softcap"], "softcap", x.dtype)).run(x, cap))


@softcap_op.register_fake
def _(x: Tensor, cap: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@gpu_operator("zeromismatch::softcap_grad")
def softcap_grad_op(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    """dy (1 - tanh(x / cap)^2)."""
    return choose(serving(CONTRACTS["softcap_grad"], "softcap_grad", x.dtype)).run(dy, x, cap)


@softcap_grad_op.register_fake
def _(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _keep_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.gelu = inputs
    ctx.save_for_backward(gate, up)


def _grad_gated(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    dgate, dup = gated_grad_op(dy, gate, up, ctx.gelu)
    return dgate, None if up is None else dup, None


def _keep_cap(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.cap = inputs
    ctx.save_for_backward(x)


def _grad_cap(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return softcap_grad_op(dy, *ctx.saved_tensors, ctx.cap), None


gated_op.register_autograd(_grad_gated, setup_context=_keep_gated)
softcap_op.register_autograd(_grad_cap, setup_context=_keep_cap)


def _apply(name: str, gate: Tensor, up: Tensor | None, gelu: bool) -> Tensor:
    require(name, gate, up)
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype):
        raise ContractError(
            f"{name} needs gate and up alike, not {tuple(gate.shape)} {gate.dtype} and "
            f"{tuple(up.shape)} {up.dtype}; split the projection in two halves"
        )
    width = gate.shape[-1] if gate.dim() else 1
    y = gated_op(gate.reshape(-1, width), None if up is None else up.reshape(-1, width), gelu)
    return y.view(gate.shape)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """round(round(silu(gate)) * up)."""
    return _apply("silu_mul", gate, up, False)


def silu(x: Tensor) -> Tensor:
    """round(silu(x))."""
    return _apply("silu", x, None, False)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """round(round(gelu_tanh(gate)) * up)."""
    return _apply("gelu_mul", gate, up, True)


def gelu(x: Tensor) -> Tensor:
    """round(gelu_tanh(x))."""
    return _apply("gelu", x, None, True)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap) of fp32 logits."""
    require("softcap", x, dtypes=(torch.float32,))
    return softcap_op(x, float(cap))


# One element a thread: the formula, and nothing of the schedule.
_ONE: dict[str, Any] = {"block": 32, "warps": 1}


def _reference_act(gelu: bool, x: Tensor) -> Tensor:
    return forward(gelu, x.reshape(-1, 1), **_ONE).view(x.shape)


def _reference_mul(gelu: bool, gate: Tensor, up: Tensor) -> Tensor:
    """Unfused: the activation alone, then torch's product."""
    return (_reference_act(gelu, gate).float() * up.float()).to(gate.dtype)


def _reference_grad(gelu: bool, dy: Tensor, gate: Tensor, up: Tensor | None = None) -> Any:
    columns = (None if each is None else each.reshape(-1, 1) for each in (dy, gate, up))
    got = backward(gelu, *columns, **_ONE)  # pyright: ignore[reportArgumentType]
    parts = [each.view(gate.shape) for each in (got if isinstance(got, tuple) else (got,))]
    return parts[0] if up is None else (parts[0], parts[1])


reference_silu = partial(_reference_act, False)
reference_gelu = partial(_reference_act, True)
reference_silu_mul = partial(_reference_mul, False)
reference_gelu_mul = partial(_reference_mul, True)
reference_silu_grad = reference_silu_mul_grad = partial(_reference_grad, False)
reference_gelu_grad = reference_gelu_mul_grad = partial(_reference_grad, True)
reference_softcap = partial(cap_forward, **_ONE)
reference_softcap_grad = partial(cap_backward, **_ONE)

_FORMULAS = {
    "silu": "x / (1 + exp2(-x log2 e))",
    "gelu": "x h, h = 1 - 1 / (1 + exp2(2 u log2 e)), u = sqrt(2 / pi) (x + 0.044715 x^3)",
}
_ELEMENTWISE: dict[str, Any] = {
    "order": "elementwise",
    "functions": "ex2.approx.ftz, IEEE division",
}
_NO_FMA = "fp32 without FMA; "
_REFERENCE = "zeromismatch.kernels.gated.gpu:reference_"
CONTRACTS = {
    op: register_gpu(
        {"triton": partial(backward if grad else forward, act == "gelu")},
        name=f"{op}.exp2",
        op=op,
        formula=(f"gradient of {_FORMULAS[act]}" if grad else _FORMULAS[act])
        + (", times up" if mul else ""),
        rounding=_NO_FMA
        + ("each gradient rounded once" if grad else "activation rounded, then the product"),
        reference=f"{_REFERENCE}{act}{'_mul' if mul else ''}{'_grad' if grad else ''}",
        **_ELEMENTWISE,
    )
    for act in ("silu", "gelu")
    for mul in (False, True)
    for grad in (False, True)
    for op in (f"{(_MUL if mul else _ACT)[act == 'gelu']}{'_grad' if grad else ''}",)
}
for _op, _run in (("softcap", cap_forward), ("softcap_grad", cap_backward)):
    CONTRACTS[_op] = register_gpu(
        {"triton": _run},
        name=f"{_op}.exp2",
        storages=("float32",),
        op=_op,
        formula="y = cap t" if _op == "softcap" else "dx = dy (1 - t t)",
        order="elementwise; t = tanh(x / cap): a polynomial below 1/4, else (1 - e) / (1 + e) "
        "with e = exp2(-2 |x / cap| log2 e)",
        rounding=_NO_FMA + "every step rounded",
        functions="ex2.approx.ftz, IEEE division",
        reference=f"{_REFERENCE}{_op}",
    )
