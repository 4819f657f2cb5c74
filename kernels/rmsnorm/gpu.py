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

from ..dispatch import choose
from ..errors import ContractError
from ..gpu.device import aligned, require
from ..gpu.register import register_gpu, serving

DW_ROWS, DW_FAN = 64, 32


def _shape(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Lanes W and neighbours VEC define the order, by width and dtype only; R rows per program."""
    vector = 16 // dtype.itemsize
    lanes = min(32 * vector, max(2 * vector, 1 << (width - 1).bit_length()))
    return {"W": lanes, "VEC": vector, "R": 4 * (32 * vector // lanes)}


def forward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    unit_offset: bool = False,
    residual: Tensor | None = None,
) -> Any:
    """y of [M, H]; with a residual ``(y, s)``, s = round(x + residual)."""
    from . import gpu_kernels

    x, weight = aligned(x), aligned(weight)
    residual = None if residual is None else aligned(residual)
    rows, width = x.shape
    y = torch.empty_like(x)
    s = y if residual is None else torch.empty_like(x)
    if rows:
        shape = _shape(width, x.dtype)
        gpu_kernels.rmsnorm_fwd_kernel[(-(-rows // shape["R"]),)](
            x,
            x if residual is None else residual,
            weight,
            y,
            s,
            rows,
            eps,
            H=width,
            **shape,
            RESIDUAL=residual is not None,
            OFFSET=unit_offset,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return y if residual is None else (y, s)


def backward(
    dy: Tensor,
    s: Tensor,
    weight: Tensor,
    eps: float,
    unit_offset: bool = False,
    ds: Tensor | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dx [M, H], dw fp32 [H]): ds joins dx, ``initial`` is added to the finished dw."""
    from . import gpu_kernels

    s, dy, weight = aligned(s), aligned(dy), aligned(weight)
    ds = None if ds is None else aligned(ds)
    rows, width = s.shape
    dx, dw = torch.empty_like(s), torch.zeros(width, dtype=torch.float32, device=s.device)
    if not rows:
        return dx, dw if initial is None else dw.copy_(initial)
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
            return dx, dw if initial is None else initial + dw
        part, blocks = out, groups


@torch.library.custom_op("zeromismatch::rmsnorm", mutates_args=())
def rmsnorm_op(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """(y, s) of [M, H]; s is empty without a residual."""
    run = choose(serving(CONTRACTS, "rmsnorm", x.dtype)).run
    if residual is None:
        return run(x, weight, eps, unit_offset, None), x.new_empty(0)
    return run(x, weight, eps, unit_offset, residual)


@rmsnorm_op.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape if residual is not None else (0,))


@torch.library.custom_op("zeromismatch::rmsnorm_grad", mutates_args=())
def rmsnorm_grad_op(
    dy: Tensor, s: Tensor, weight: Tensor, eps: float, unit_offset: bool, ds: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(dx [M, H], dw fp32 [H])."""
    run = choose(serving(GRADIENTS, "rmsnorm_grad", s.dtype)).run
    return run(dy, s, weight, eps, unit_offset, ds, None)


@rmsnorm_grad_op.register_fake
def _(
    dy: Tensor, s: Tensor, weight: Tensor, eps: float, unit_offset: bool, ds: Tensor | None
) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape), s.new_empty(s.shape[1], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, weight, *settings = inputs
    ctx.save_for_backward(x if residual is None else output[1], weight)
    ctx.settings = (*settings, residual is not None)


def _grad(ctx: Any, dy: Tensor, ds: Tensor) -> tuple[Tensor | None, ...]:
    s, weight = ctx.saved_tensors
    eps, unit_offset, has_residual = ctx.settings
    dx, dw = rmsnorm_grad_op(dy, s, weight, eps, unit_offset, ds if has_residual else None)
    return dx, dx.clone() if has_residual else None, dw.to(weight.dtype), None, None


rmsnorm_op.register_autograd(_grad, setup_context=_keep)


def _check(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    require("rmsnorm", x, residual, weight)
    alike = residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    if x.dim() == 0 or weight.shape != x.shape[-1:] or weight.dtype != x.dtype or not alike:
        other = None if residual is None else (residual.dtype, tuple(residual.shape))
        raise ContractError(
            f"rmsnorm needs x [..., H], residual like x, weight [H], all of one dtype, not "
            f"{x.dtype} {tuple(x.shape)}, {other}, {weight.dtype} {tuple(weight.shape)}; "
            "check the layer"
        )


def rmsnorm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Normalised ``x[..., H]`` times ``weight[H]``; differentiable once."""
    _check(x, None, weight)
    rows = x.reshape(-1, x.shape[-1])
    return rmsnorm_op(rows, None, weight, float(eps), unit_offset)[0].view(x.shape)


def rmsnorm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """(y, s): s = round(x + residual), y = rmsnorm(s); differentiable once."""
    _check(x, residual, weight)
    width = x.shape[-1]
    rows, other = x.reshape(-1, width), residual.reshape(-1, width)
    y, s = rmsnorm_op(rows, other, weight, float(eps), unit_offset)
    return y.view(x.shape), s.view(x.shape)


def rmsnorm_backward(
    dy: Tensor,
    s: Tensor,
    weight: Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
    ds: Tensor | None = None,
    accumulate_into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``kernels/rmsnorm``; what came before is added to the finished sum of this call."""
    require("rmsnorm_backward", s, dy, weight)
    run = choose(serving(GRADIENTS, "rmsnorm_grad", s.dtype)).run
    dx, dw = run(dy, s, weight, eps, unit_offset, ds, accumulate_into)
    return dx, dw if accumulate_into is None else accumulate_into.copy_(dw)


def reference(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    unit_offset: bool = False,
    residual: Tensor | None = None,
) -> Any:
    """The contract's definition in plain torch pointwise operations (IEEE; nothing fused)."""
    s = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = s.float()
    y = wide * _inverse_rms(wide, eps, x.dtype)
    if unit_offset:
        y = (y * (1.0 + weight.float())).to(x.dtype)
    else:
        y = (y.to(x.dtype).float() * weight.float()).to(x.dtype)
    return y if residual is None else (y, s)


def reference_grad(
    dy: Tensor,
    s: Tensor,
    weight: Tensor,
    eps: float,
    unit_offset: bool = False,
    ds: Tensor | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient's definition, likewise; dw by blocks of rows, then groups of blocks."""
    wide, scale = s.float(), weight.float()
    g = dy.float() * (1.0 + scale if unit_offset else scale)
    r = _inverse_rms(wide, eps, s.dtype)
    factor = _mean(g * wide, s.dtype) * (r * r)
    dx = r * (g - wide * factor)
    dx = dx if ds is None else dx + ds.float()
    normed = wide * r if unit_offset else (wide * r).to(s.dtype).float()
    dw = _ascending(dy.float() * normed, DW_ROWS)
    while dw.shape[0] > 1:
        dw = _ascending(dw, DW_FAN)
    total = dw[0] if dw.shape[0] else torch.zeros_like(scale)
    return dx.to(s.dtype), total if initial is None else initial + total


def _ascending(rows: Tensor, size: int) -> Tensor:
    """Each block of ``size`` rows summed from +0, ascending."""
    blocks = -(-rows.shape[0] // size)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, blocks * size - rows.shape[0]))
    total = torch.zeros(blocks, rows.shape[1], device=rows.device)
    for row in padded.view(blocks, size, -1).unbind(1):
        total = total + row
    return total


def _mean(values: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, 1]: lanes, then neighbours, then halves, then one division."""
    width = values.shape[-1]
    shape = _shape(width, dtype)
    lanes = shape["W"]
    total = torch.zeros(values.shape[0], lanes, device=values.device)
    for part in torch.nn.functional.pad(values, (0, -width % lanes)).split(lanes, dim=-1):
        total = total + part
    while total.shape[-1] > lanes // shape["VEC"]:
        total = total[..., 0::2] + total[..., 1::2]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total / torch.full((), float(width), device=values.device)


def _inverse_rms(wide: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    one = torch.ones((), device=wide.device)
    shift = torch.full((), eps, dtype=torch.float32, device=wide.device)
    return one / torch.sqrt(_mean(wide * wide, dtype) + shift)


CONTRACTS = register_gpu(
    {"triton": forward},
    name="rmsnorm.lanes",
    op="rmsnorm",
    formula="y = round(round(s / sqrt(mean(s s) + eps)) w), or (1 + w) in fp32 and one rounding; "
    "s = x or round(x + residual)",
    order="sum of squares in lanes, columns ascending, then neighbours, then halves",
    rounding="fp32; normalised value rounded before the weight unless unit_offset",
    functions="IEEE division and square root, no FMA",
    reference="zeromismatch.kernels.rmsnorm.gpu:reference",
)
GRADIENTS = register_gpu(
    {"triton": backward},
    name="rmsnorm_grad.lanes",
    op="rmsnorm_grad",
    formula="dx = ds + r (g - s mean(g s) r r), g = dy w; dw = sum over rows of dy round(s r)",
    order=f"row sums as in the forward; dw in blocks of {DW_ROWS} rows ascending, then "
    f"{DW_FAN} blocks ascending at a time",
    rounding="fp32 inside, dx once to storage, dw stays fp32; no FMA",
    functions="IEEE division and square root",
    reference="zeromismatch.kernels.rmsnorm.gpu:reference_grad",
)
