"""Rotary embedding on the GPU, forward and backward: ``rotary.halves.<dtype>.sm90.v1``.

    y = round(x * cos + rotate_half(x) * sin)      fp32, no FMA; in fp32 the bits of torch's own
        chain

cos and sin are the shared fp32 table of :mod:`.` (made from fp64 once). Elementwise, so every
schedule has the same bits. Legend: T tokens, N heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import Contract, Implementation, register_contract, register_implementation
from ..errors import ContractError
from ..gpu.device import NAMES, aligned, missing, require

_ITEMS = 16


@torch.library.custom_op("zeromismatch::rotary", mutates_args=())
def rotary_op(x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    """[T, N, D]; ``transposed`` applies the inverse rotation's derivative."""
    from . import gpu_kernels

    cos, sin = aligned(cos), aligned(sin)
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, size = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        half = size // 2
        gpu_kernels.rotary_kernel[(-(-tokens * heads // _ITEMS),)](
            x,
            cos,
            sin,
            y,
            tokens,
            heads,
            x.stride(0),
            x.stride(1),
            D=size,
            HALF=half,
            BD=max(2, 1 << (half - 1).bit_length()),
            BT=_ITEMS,
            BACKWARD=transposed,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return y


@rotary_op.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotary_op(x, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotary_op(dy, cos, sin, True), None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated ``x[T, N, D]`` by fp32 ``cos[T, D]`` and ``sin[T, D]``; differentiable in x."""
    require("rotary", x, dtypes=tuple(NAMES))
    fits = (
        x.dim() == 3 and cos.shape == sin.shape == (x.shape[0], x.shape[2]) and x.shape[2] % 2 == 0
    )
    if not fits or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ContractError(
            f"rotary needs x [T, heads, D] with even D and fp32 cos, sin [T, D], not "
            f"{tuple(x.shape)}, "
            f"{tuple(cos.shape)} {cos.dtype}; build the table with rotary_table"
        )
    return _Rotary.apply(x, cos, sin)


def _run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotary_op(x, cos, sin, False)


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The definition, as torch's separate pointwise operations."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos[:, None] + turned * sin[:, None]).to(x.dtype)


for _name in NAMES.values():
    register_contract(
        Contract(
            id=f"rotary.halves.{_name}.sm90.v1",
            op="rotary",
            dtype=_name,
            device="sm90",
            formula="y = round(x cos + rotate_half(x) sin)",
            order="elementwise",
            rounding="products and sum in fp32 without FMA, one rounding",
            functions="none",
            reference="zeromismatch.kernels.rotary.gpu:reference",
            gradient_rtol=1e-5 if _name == "float32" else 2e-2,
        )
    )
    register_implementation(
        Implementation(
            contract=f"rotary.halves.{_name}.sm90.v1", name="triton", run=_run, missing=missing
        )
    )
