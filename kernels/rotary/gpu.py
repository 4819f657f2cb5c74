"""Rotary embedding on the GPU, forward and backward; the table comes from the CPU's fp64 contract.

Contract ``rotary.halves.<dtype>.sm90.v1``: y = round(x cos + rotate_half(x) sin), two products and
one sum in fp32 without FMA. Elementwise, so every schedule has the same bits. Columns past the
table's width pass through. Legend: T tokens, N heads, D head size, R rotated columns.
"""

from typing import Any

import torch
from torch import Tensor

from ..dispatch import choose
from ..errors import ContractError
from ..gpu.device import NAMES, aligned, programs, require
from ..gpu.operator import gpu_operator
from ..gpu.register import register_gpu, serving
from ..taps import tapped
from .cpu import TABLE as HOST_TABLE

_ITEMS = 16


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, transposed: bool = False) -> Tensor:
    """[T, N, D]; ``transposed`` applies the inverse rotation's derivative."""
    gpu_kernels = programs(__package__, "gpu_kernels")

    cos, sin = aligned(cos), aligned(sin)
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, size = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = cos.shape[1]
    if width < size:
        y[..., width:] = x[..., width:]
    if tokens * heads * width:
        half = width // 2
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


@gpu_operator("zeromismatch::rotary")
def rotary_op(x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    """See :func:`rotate`."""
    if transposed:
        return rotate(x, cos, sin, transposed=True)
    return tapped("rotary", choose(serving(CONTRACTS, "rotary", x.dtype)).run(x, cos, sin))


@rotary_op.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _grad(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return rotary_op(dy, *ctx.saved_tensors, True), None, None, None


rotary_op.register_autograd(_grad, setup_context=_keep)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated ``x[T, N, D]`` by fp32 ``cos[T, R]`` and ``sin[T, R]``; differentiable in x."""
    require("rotary", x, cos, sin, dtypes=tuple(NAMES))
    fits = x.dim() == 3 and cos.dim() == 2 and cos.shape == sin.shape and cos.shape[0] == x.shape[0]
    if not fits or cos.shape[1] % 2 or cos.shape[1] > x.shape[2]:
        raise ContractError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit x {tuple(x.shape)}; "
            "pass x [T, heads, D] and tables [T, R] with R even and at most D"
        )
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ContractError(
            f"tables are {cos.dtype} and {sin.dtype}; keep them in fp32 (rotary_table makes them)"
        )
    return rotary_op(x, cos.detach(), sin.detach(), False)


def rotary_table(inv_freq: Tensor, positions: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """The CPU's table, made there and copied: one table has one set of bits everywhere."""
    run = choose(HOST_TABLE[torch.float32].id).run
    table = run(inv_freq.detach().cpu().contiguous(), positions.cpu().contiguous(), scaling)
    cos, sin = (each.to(positions.device) for each in table)
    return cos, sin


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The definition, as torch's separate pointwise operations."""
    width = cos.shape[1]
    turning = x[..., :width].float()
    first, second = turning.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    y = (turning * cos[:, None] + turned * sin[:, None]).to(x.dtype)
    return torch.cat((y, x[..., width:]), dim=-1)


CONTRACTS = register_gpu(
    {"triton": rotate},
    name="rotary.halves",
    op="rotary",
    formula="y = round(x cos + rotate_half(x) sin); columns past the table unchanged",
    order="elementwise",
    rounding="products and sum in fp32 without FMA, one rounding",
    functions="none",
    reference="zeromismatch.kernels.rotary.gpu:reference",
    rtol=(1e-5, 2e-2),
)
TABLES = register_gpu(
    {"host-core": rotary_table},
    name="rotary_table.fp64",
    storages=("float32",),
    op="rotary_table",
    formula="rotary_table.fp64.float32.cpu.v1, computed by the CPU and copied",
    order="none: elementwise",
    rounding="fp64 without FMA, once to fp32",
    functions="sincos64.v1",
    reference="zeromismatch.kernels.reference.rotary:rotary_table",
    rtol=(0.0, 0.0),
)
