"""Gated activations on the GPU: silu, gelu (tanh form), alone or times ``up``; forward and
backward.

Contracts ``silu_mul.exp2.<dtype>.sm90.v1`` and ``gelu_mul.exp2.<dtype>.sm90.v1``; formulas in
:mod:`.gpu_kernels`. The activation is rounded to the dtype, then the product, so that fused and
unfused calls have the same bits. Elementwise: every schedule has the same bits. Legend: M rows, F
columns.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import Contract, Implementation, register_contract, register_implementation
from ..errors import ContractError
from ..gpu.device import NAMES, missing, require

_BLOCK = 1024
_MAX_ROWS = 65535


def _rows(x: Tensor) -> Tensor:
    return (
        x
        if x.stride(-1) == 1 and x.data_ptr() % 16 == 0
        else x.clone(memory_format=torch.contiguous_format)
    )


@torch.library.custom_op("zeromismatch::gated", mutates_args=())
def gated_op(gate: Tensor, up: Tensor | None, gelu: bool) -> Tensor:
    """act(gate) * up of [M, F]; gate and up may be halves of one tensor."""
    from . import gpu_kernels

    gate, up = _rows(gate), None if up is None else _rows(up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    width = gate.shape[1]
    for start in range(0, gate.shape[0] if y.numel() else 0, _MAX_ROWS):
        part = slice(start, start + _MAX_ROWS)
        x, u, out = gate[part], gate[part] if up is None else up[part], y[part]
        gpu_kernels.gated_fwd_kernel[(-(-width // _BLOCK), x.shape[0])](
            x,
            u,
            out,
            x.shape[0],
            width,
            x.stride(0),
            u.stride(0),
            BLOCK=_BLOCK,
            GELU=gelu,
            HAS_UP=up is not None,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return y


@gated_op.register_fake
def _(gate: Tensor, up: Tensor | None, gelu: bool) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def backward(
    gate: Tensor, up: Tensor | None, dy: Tensor, gelu: bool
) -> tuple[Tensor, Tensor | None]:
    """(dgate, dup)."""
    from . import gpu_kernels

    gate, up, dy = _rows(gate), None if up is None else _rows(up), dy.contiguous()
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = None if up is None else torch.empty_like(dgate)
    width = gate.shape[1]
    for start in range(0, gate.shape[0] if dgate.numel() else 0, _MAX_ROWS):
        part = slice(start, start + _MAX_ROWS)
        x, u = gate[part], gate[part] if up is None else up[part]
        gpu_kernels.gated_bwd_kernel[(-(-width // _BLOCK), x.shape[0])](
            x,
            u,
            dy[part],
            dgate[part],
            dgate[part] if dup is None else dup[part],
            x.shape[0],
            width,
            x.stride(0),
            u.stride(0),
            BLOCK=_BLOCK,
            GELU=gelu,
            HAS_UP=up is not None,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return dgate, dup


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, gelu: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return gated_op(gate, up, gelu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(*ctx.saved_tensors, dy, ctx.gelu), None


def _apply(name: str, gate: Tensor, up: Tensor | None, gelu: bool) -> Tensor:
    require(name, gate, up)
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype):
        raise ContractError(
            f"{name} needs gate and up alike, not {tuple(gate.shape)} {gate.dtype} and "
            f"{tuple(up.shape)} "
            f"{up.dtype}; split the projection in two halves"
        )
    width = gate.shape[-1]
    y = _Gated.apply(gate.reshape(-1, width), None if up is None else up.reshape(-1, width), gelu)
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


def reference_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Unfused: the activation alone, then torch's product."""
    return (gated_op(gate, None, False).float() * up.float()).to(gate.dtype)


def reference_gelu(gate: Tensor, up: Tensor) -> Tensor:
    """Unfused: the activation alone, then torch's product."""
    return (gated_op(gate, None, True).float() * up.float()).to(gate.dtype)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return gated_op(gate, up, False)


def _gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return gated_op(gate, up, True)


for _name in NAMES.values():
    for _op, _call in (("silu_mul", _silu_mul), ("gelu_mul", _gelu_mul)):
        register_contract(
            Contract(
                id=f"{_op}.exp2.{_name}.sm90.v1",
                op=_op,
                dtype=_name,
                device="sm90",
                formula="y = round(round(act(gate)) up)",
                order="elementwise",
                rounding="fp32 without FMA; activation rounded, then the product",
                functions="ex2.approx.ftz, IEEE division",
                reference=f"zeromismatch.kernels.gated.gpu:reference_{_op[:4]}",
                gradient_rtol=1e-4 if _name == "float32" else 2e-2,
            )
        )
        register_implementation(
            Implementation(
                contract=f"{_op}.exp2.{_name}.sm90.v1", name="triton", run=_call, missing=missing
            )
        )
