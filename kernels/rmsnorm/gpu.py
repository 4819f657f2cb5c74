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

from ..accumulation import chain_of
from ..dispatch import choose
from ..errors import ContractError
from ..gpu.device import aligned, programs, require
from ..gpu.operator import gpu_operator
from ..gpu.register import register_gpu, serving
from ..taps import tapped

PART_LANES, SLOTS = 32, 32
DW_ROWS = 8192
"""Rows whose products are added as one block: a chain of dw continues between two of them."""
_IN_REGISTERS = 16384  # bytes of a row that one warp can hold


def _shape(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Lanes W and neighbours VEC define the order, by width and dtype only; R rows per program."""
    vector = 16 // dtype.itemsize
    lanes = min(32 * vector, max(2 * vector, 1 << (width - 1).bit_length()))
    return {"W": lanes, "VEC": vector}


def _schedule(width: int, lanes: int, backward: bool) -> dict[str, int]:
    """R rows at a time by num_warps warps: narrow rows share a warp, others have one each.

    UNROLL: loads in flight of the backward's row sums; measured in ``benchmarks/gpu.md``.
    """
    if width <= lanes:
        return {"R": SLOTS, "num_warps": 8}
    return {"R": 4, "num_warps": 4} | ({"UNROLL": 8} if backward else {})


def _part_rows(width: int) -> int:
    """Rows of one part of dw: by width only."""
    return max(16, min(512, 1 << (16384 // max(width, 1)).bit_length()))


def forward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    unit_offset: bool = False,
    residual: Tensor | None = None,
    *,
    wide: bool = False,
) -> Any:
    """y of [M, H]; with a residual ``(y, s)``, s = round(x + residual). wide: one rounding.

    x may be [T, N, H], N heads inside wider rows: y is [T N, H].
    """
    gpu_kernels = programs(__package__, "gpu_kernels")

    inside = {"pitch": x.stride(0), "HEADS": x.shape[1]} if x.dim() == 3 else {}
    x, weight = x if inside else aligned(x), aligned(weight)
    residual = None if residual is None else aligned(residual)
    rows, width = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    s = y if residual is None else torch.empty_like(x)
    if rows:
        shape = _shape(width, x.dtype)
        shape |= _schedule(width, shape["W"], False)
        narrow = width * x.element_size() <= _IN_REGISTERS
        kernel = gpu_kernels.rmsnorm_row_kernel if narrow else gpu_kernels.rmsnorm_fwd_kernel
        kernel[(-(-rows // shape["R"]),)](
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
            OFFSET=2 if wide else int(unit_offset),
            enable_fp_fusion=False,
            **inside,
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
    *,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """(dx [M, H], dw fp32 [H]): ds joins dx, the chain of dw continues from ``initial``."""
    gpu_kernels = programs(__package__, "gpu_kernels")

    s, dy, weight = aligned(s), aligned(dy), aligned(weight)
    ds = None if ds is None else aligned(ds)
    rows, width = s.shape
    dx, dw = torch.empty_like(s), torch.zeros(width, dtype=torch.float32, device=s.device)
    dw = dw if initial is None else dw.copy_(initial)
    if not rows:
        return dx, dw
    shape, part_rows = _shape(width, s.dtype), _part_rows(width)
    shape |= _schedule(width, shape["W"], True)
    parts = -(-rows // part_rows)
    part = torch.empty(parts, width, dtype=torch.float32, device=s.device)
    kernel, shape["ROWS"] = gpu_kernels.rmsnorm_narrow_bwd_kernel, part_rows
    if width > shape["W"]:
        kernel, shape["BC"] = gpu_kernels.rmsnorm_bwd_kernel, min(1024, _power(width))
    kernel[(parts,)](
        s,
        weight,
        dy,
        dy if ds is None else ds,
        dx,
        part,
        rows,
        eps,
        H=width,
        **shape,
        RESIDUAL=ds is not None,
        OFFSET=2 if wide else int(unit_offset),
        enable_fp_fusion=False,
    )
    blocks = -(-rows // DW_ROWS)
    chained = initial is not None or blocks > 1
    sums = torch.empty(blocks, width, dtype=torch.float32, device=s.device) if chained else dw
    gpu_kernels.rmsnorm_parts_kernel[(-(-width // 32), blocks)](
        part, sums, parts, width, BLOCK=DW_ROWS // part_rows, LANES=PART_LANES, BC=32, num_warps=4
    )
    if chained:
        gpu_kernels.rmsnorm_chain_kernel[(-(-width // 32),)](
            sums, dw, blocks, width, BC=32, num_warps=1
        )
    return dx, dw


def _power(width: int) -> int:
    return 1 << (width - 1).bit_length()


@gpu_operator("zeromismatch::rmsnorm")
def rmsnorm_op(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """(y, s) of [M, H]; s is empty without a residual."""
    run = choose(serving(CONTRACTS, "rmsnorm", x.dtype)).run
    if residual is None:
        return tapped("rmsnorm", run(x, weight, eps, unit_offset, None)), x.new_empty(0)
    y, s = run(x, weight, eps, unit_offset, residual)
    return tapped("rmsnorm", y), s


@rmsnorm_op.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape if residual is not None else (0,))


@gpu_operator("zeromismatch::rmsnorm_grad")
def rmsnorm_grad_op(
    dy: Tensor,
    s: Tensor,
    weight: Tensor,
    eps: float,
    unit_offset: bool,
    ds: Tensor | None,
    dw_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(dx [M, H], dw [H]); dw is rounded in here, since a compiler may leave a rounding out."""
    run = choose(serving(GRADIENTS, "rmsnorm_grad", s.dtype)).run
    dx, dw = run(dy, s, weight, eps, unit_offset, ds, None)
    return dx, dw.to(dw_dtype)


@rmsnorm_grad_op.register_fake
def _(dy: Tensor, s: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape), s.new_empty(s.shape[1], dtype=args[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, weight, *settings = inputs
    ctx.save_for_backward(x if residual is None else output[1], weight)
    ctx.settings = (*settings, residual is not None)


def _grad(ctx: Any, dy: Tensor, ds: Tensor) -> tuple[Tensor | None, ...]:
    s, weight = ctx.saved_tensors
    eps, unit_offset, has_residual = ctx.settings
    chain = chain_of(weight, "rmsnorm") if ctx.needs_input_grad[2] else None
    joins, dw = ds if has_residual else None, None
    if chain is None:
        dx, dw = rmsnorm_grad_op(dy, s, weight, eps, unit_offset, joins, weight.dtype)
    else:
        dx, _ = rmsnorm_backward(
            dy, s, weight, eps, unit_offset=unit_offset, ds=joins, accumulate_into=chain
        )
    return dx, dx.clone() if has_residual else None, dw, None, None


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


def rmsnorm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`rmsnorm` of ``x[T, N, H]``, read where it lies in wider rows; no autograd."""
    _check(x, None, weight)
    run = choose(serving(CONTRACTS, "rmsnorm", x.dtype)).run
    width, step = x.shape[-1], 16 // x.element_size()
    readable = x.stride()[1:] == (width, 1) and not (x.stride(0) % step or x.data_ptr() % 16)
    where_it_lies = run is forward and readable and width * x.element_size() <= _IN_REGISTERS
    y = run(x if where_it_lies else x.reshape(-1, width), weight, float(eps), False, None)
    return tapped("rmsnorm", y).view(x.shape)


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
    """See ``kernels/rmsnorm``; the chain continues between blocks of ``DW_ROWS`` rows."""
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
    *,
    wide: bool = False,
) -> Any:
    """The contract's definition in plain torch pointwise operations (IEEE; nothing fused)."""
    s = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    values = s.float()
    y = values * _inverse_rms(values, eps, x.dtype)
    if unit_offset or wide:
        y = (y * (1.0 + weight.float() if unit_offset else weight.float())).to(x.dtype)
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
    *,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradient's definition, likewise; dw by parts of rows, blocks of parts, then a chain."""
    values, scale = s.float(), weight.float()
    g = dy.float() * (1.0 + scale if unit_offset else scale)
    r = _inverse_rms(values, eps, s.dtype)
    factor = _mean(g * values, s.dtype) * (r * r)
    dx = r * (g - values * factor)
    dx = dx if ds is None else dx + ds.float()
    normed = values * r if unit_offset or wide else (values * r).to(s.dtype).float()
    width = s.shape[1]
    slots = SLOTS if width <= _shape(width, s.dtype)["W"] else 1
    total = torch.zeros(width, device=dy.device) if initial is None else initial
    for block in (dy.float() * normed).split(DW_ROWS) if s.shape[0] else ():
        parts = [_in_lanes(part, slots) for part in block.split(_part_rows(width))]
        total = total + _in_lanes(torch.stack(parts), PART_LANES)
    return dx.to(s.dtype), total


def _in_lanes(rows: Tensor, lanes: int) -> Tensor:
    """Row i into running sum i % lanes, ascending from +0; then the sums as a tree of halves."""
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % lanes))
    total = torch.zeros(lanes, rows.shape[1], device=rows.device)
    for step in padded.split(lanes):
        total = total + step
    while total.shape[0] > 1:
        half = total.shape[0] // 2
        total = total[:half] + total[half:]
    return total[0]


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
    version="v2",
    op="rmsnorm_grad",
    formula="dx = ds + r (g - s mean(g s) r r), g = dy w; dw = sum over rows of dy round(s r)",
    order="row sums as in the forward; dw in parts of some rows by the width, ascending (narrow "
    f"rows: {SLOTS} running sums and a tree), then the parts of {DW_ROWS} rows likewise with "
    f"{PART_LANES}, and these blocks ascending",
    rounding="fp32 inside, dx once to storage, dw stays fp32; no FMA",
    functions="IEEE division and square root",
    reference="zeromismatch.kernels.rmsnorm.gpu:reference_grad",
)
