"""RMSNorm on the GPU: plain, with residual, per head, with weight + 1; forward and backward.

Contract ``rmsnorm.lanes.<dtype>.sm90.v1`` (formula and order in :mod:`.gpu_kernels`): the sum of
squares runs in fixed lanes and a written-out tree, so its order depends on H and dtype alone.
Rounding as transformers' Llama: the normalised value is rounded, multiplied by the weight, rounded;
``unit_offset`` (Gemma) multiplies by 1 + w in fp32 and rounds once. Rows per program, warps and
grid are schedule.

Legend: M rows, H columns.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import Contract, Implementation, register_contract, register_implementation
from ..errors import ContractError
from ..gpu.device import NAMES, aligned, missing, require

DW_ROWS, DW_FAN = 64, 32


def _shape(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Lanes W and neighbours VEC define the order, by width and dtype only; R rows per program."""
    vector = 16 // dtype.itemsize
    lanes = min(32 * vector, max(2 * vector, 1 << (width - 1).bit_length()))
    return {"W": lanes, "VEC": vector, "R": 4 * (32 * vector // lanes)}


@torch.library.custom_op("zeromismatch::rmsnorm", mutates_args=())
def rmsnorm_op(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """(y, s) of [M, H]; s is x itself, or round(x + residual)."""
    from . import gpu_kernels

    x, weight = aligned(x), aligned(weight)
    residual = None if residual is None else aligned(residual)
    rows, width = x.shape
    y = torch.empty_like(x)
    s = torch.empty_like(x) if residual is not None else x.new_empty(0)
    if rows:
        shape = _shape(width, x.dtype)
        gpu_kernels.rmsnorm_fwd_kernel[(-(-rows // shape["R"]),)](
            x,
            x if residual is None else residual,
            weight,
            y,
            y if residual is None else s,
            rows,
            eps,
            H=width,
            **shape,
            RESIDUAL=residual is not None,
            OFFSET=unit_offset,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return y, s


@rmsnorm_op.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape if residual is not None else (0,))


def backward(
    s: Tensor, weight: Tensor, dy: Tensor, ds: Tensor | None, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """(dx [M, H], dweight [H])."""
    from . import gpu_kernels

    s, dy, weight = aligned(s), aligned(dy), aligned(weight)
    ds = None if ds is None else aligned(ds)
    rows, width = s.shape
    dx, dw = torch.empty_like(s), torch.zeros_like(weight)
    if not rows:
        return dx, dw
    shape = _shape(width, s.dtype)
    r = torch.empty(rows, dtype=torch.float32, device=s.device)
    gpu_kernels.rmsnorm_bwd_kernel[(-(-rows // shape["R"]),)](
        s,
        weight,
        dy,
        dy if ds is None else ds,
        dx,
        r,
        rows,
        eps,
        H=width,
        **shape,
        RESIDUAL=ds is not None,
        OFFSET=unit_offset,
        num_warps=4,
        enable_fp_fusion=False,
    )
    blocks = -(-rows // DW_ROWS)
    part = torch.empty(blocks, width, dtype=torch.float32, device=s.device)
    gpu_kernels.rmsnorm_dw_kernel[(blocks, -(-width // 256))](
        s,
        dy,
        r,
        part,
        rows,
        width,
        ROWS=DW_ROWS,
        BC=256,
        OFFSET=unit_offset,
        num_warps=2,
        enable_fp_fusion=False,
    )
    while True:
        groups = -(-blocks // DW_FAN)
        out = (
            dw if groups == 1 else torch.empty(groups, width, dtype=torch.float32, device=s.device)
        )
        gpu_kernels.column_sum_kernel[(-(-width // 128), groups)](
            part, out, blocks, width, FAN=DW_FAN, BC=128, num_warps=2
        )
        if groups == 1:
            return dx, dw
        part, blocks = out, groups


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        y, s = rmsnorm_op(x, residual, weight, eps, unit_offset)
        ctx.save_for_backward(x if residual is None else s, weight)
        ctx.settings = (eps, unit_offset, residual is not None)
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, ds: Tensor) -> tuple[Tensor | None, ...]:
        s, weight = ctx.saved_tensors
        eps, unit_offset, has_residual = ctx.settings
        dx, dw = backward(s, weight, dy, ds if has_residual else None, eps, unit_offset)
        return dx, dx if has_residual else None, dw, None, None


def _check(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    require("rmsnorm", x, residual, weight)
    if weight.shape != x.shape[-1:] or (residual is not None and residual.shape != x.shape):
        raise ContractError(
            f"rmsnorm needs x [..., H], residual like x, weight [H], not {tuple(x.shape)}, "
            f"{None if residual is None else tuple(residual.shape)}, {tuple(weight.shape)}; "
            f"check the layer"
        )


def rmsnorm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Normalised ``x[..., H]`` times ``weight[H]``; differentiable once."""
    _check(x, None, weight)
    return _RmsNorm.apply(x.reshape(-1, x.shape[-1]), None, weight, eps, unit_offset)[0].view(
        x.shape
    )


def rmsnorm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """(y, s): s = round(x + residual), y = rmsnorm(s); differentiable once."""
    _check(x, residual, weight)
    width = x.shape[-1]
    y, s = _RmsNorm.apply(
        x.reshape(-1, width), residual.reshape(-1, width), weight, eps, unit_offset
    )
    return y.view(x.shape), s.view(x.shape)


def _run(x: Tensor, weight: Tensor, eps: float = 1e-6, unit_offset: bool = False) -> Tensor:
    return rmsnorm_op(x, None, weight, eps, unit_offset)[0]


def reference(x: Tensor, weight: Tensor, eps: float = 1e-6, unit_offset: bool = False) -> Tensor:
    """The contract's definition in plain torch pointwise operations (IEEE; nothing fused)."""
    width = x.shape[-1]
    shape = _shape(width, x.dtype)
    lanes = shape["W"]
    wide = x.float()
    squares = torch.zeros(x.shape[0], lanes, device=x.device)
    for part in torch.nn.functional.pad(wide * wide, (0, -width % lanes)).split(lanes, dim=-1):
        squares = squares + part
    while squares.shape[-1] > lanes // shape["VEC"]:
        squares = squares[..., 0::2] + squares[..., 1::2]
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        squares = squares[..., :half] + squares[..., half:]
    one = torch.ones((), device=x.device)
    r = one / torch.sqrt(squares / torch.full((), float(width), device=x.device) + eps)
    y = wide * r
    if unit_offset:
        return (y * (1.0 + weight.float())).to(x.dtype)
    return (y.to(x.dtype).float() * weight.float()).to(x.dtype)


for _name in NAMES.values():
    register_contract(
        Contract(
            id=f"rmsnorm.lanes.{_name}.sm90.v1",
            op="rmsnorm",
            dtype=_name,
            device="sm90",
            formula=(
                "y = round(round(x / sqrt(mean(x x) + eps)) w), or (1 + w) in fp32 and one rounding"
            ),
            order="sum of squares in lanes, columns ascending, then neighbours, then halves",
            rounding="fp32; normalised value rounded before the weight unless unit_offset",
            functions="IEEE division and square root, no FMA",
            reference="zeromismatch.kernels.rmsnorm.gpu:reference",
            gradient_rtol=1e-4 if _name == "float32" else 2e-2,
        )
    )
    register_implementation(
        Implementation(
            contract=f"rmsnorm.lanes.{_name}.sm90.v1", name="triton", run=_run, missing=missing
        )
    )
