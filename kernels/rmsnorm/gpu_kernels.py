"""Triton kernels of RMSNorm, forward and backward.

    s  = round(x + residual)                                 (with a residual)
    r  = 1 / sqrt(sum(s * s) / H + eps)                      IEEE division and square root
    y  = round(round(s * r) * w)   or, unit_offset,  y = round((s * r) * (1 + w))

The sum runs in W lanes (one warp's 16-byte loads: 256 for 16-bit types, 128 for fp32, less for a
smaller H): column c goes to lane c % W, columns ascending; then ``row_sum``. The order depends on H
and dtype alone. dx uses the same order; dw sums tokens ascending inside blocks of ROWS, then FAN
blocks ascending at a time, level by level. A row is read twice, the second time backwards, so that
caches still hold it. Legend: M rows, H columns, W lanes, R rows per program.
"""

import triton
import triton.language as tl

from ..gpu.tree import row_sum


@triton.jit
def _reciprocal(lanes, H, eps, R: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr):
    mean = tl.math.div_rn(row_sum(lanes, R, W, VEC), tl.zeros((R,), tl.float32) + H)
    return tl.math.div_rn(tl.full((R,), 1.0, tl.float32), tl.math.sqrt_rn(mean + eps))


@triton.jit
def rmsnorm_fwd_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    s_ptr,
    M,
    eps,
    H: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
    R: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """R rows per program."""
    rows = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    dtype = y_ptr.dtype.element_ty
    lanes = tl.zeros((R, W), tl.float32)
    for first in tl.range(0, H, W, loop_unroll_factor=4):
        cols = first + tl.arange(0, W)
        mask = (rows < M)[:, None] & (cols < H)[None, :]
        at = rows[:, None] * H + cols[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if RESIDUAL:
            s = (x + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)).to(dtype)
            tl.store(s_ptr + at, s, mask=mask)
            x = s.to(tl.float32)
        lanes = lanes + x * x
    r = _reciprocal(lanes, H, eps, R, W, VEC)
    for back in tl.range(0, H, W, loop_unroll_factor=4):
        cols = (H - 1) // W * W - back + tl.arange(0, W)
        mask = (rows < M)[:, None] & (cols < H)[None, :]
        at = rows[:, None] * H + cols[None, :]
        if RESIDUAL:
            x = tl.load(s_ptr + at, mask=mask, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first").to(
                tl.float32
            )
        w = tl.load(w_ptr + rows[:, None] * 0 + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        y = x * r[:, None]
        y = y * (1.0 + w) if OFFSET else y.to(dtype).to(tl.float32) * w
        tl.store(y_ptr + at, y.to(dtype), mask=mask, cache_modifier=".cs")


@triton.jit
def rmsnorm_bwd_kernel(
    s_ptr,
    w_ptr,
    dy_ptr,
    ds_ptr,
    dx_ptr,
    r_ptr,
    M,
    eps,
    H: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
    R: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """dx = r (g - s (sum(g s) / H) r r) (+ ds), g = dy * w; also keeps r for dw."""
    rows = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    squares = tl.zeros((R, W), tl.float32)
    products = tl.zeros((R, W), tl.float32)
    for first in tl.range(0, H, W, loop_unroll_factor=4):
        cols = first + tl.arange(0, W)
        mask = (rows < M)[:, None] & (cols < H)[None, :]
        at = rows[:, None] * H + cols[None, :]
        s = tl.load(s_ptr + at, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + rows[:, None] * 0 + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if OFFSET:
            w = 1.0 + w
        g = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32) * w
        squares = squares + s * s
        products = products + g * s
    r = _reciprocal(squares, H, eps, R, W, VEC)
    mean = tl.math.div_rn(row_sum(products, R, W, VEC), tl.zeros((R,), tl.float32) + H)
    factor = mean * (r * r)
    for back in tl.range(0, H, W, loop_unroll_factor=4):
        cols = (H - 1) // W * W - back + tl.arange(0, W)
        mask = (rows < M)[:, None] & (cols < H)[None, :]
        at = rows[:, None] * H + cols[None, :]
        s = tl.load(s_ptr + at, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + rows[:, None] * 0 + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if OFFSET:
            w = 1.0 + w
        g = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32) * w
        dx = r[:, None] * (g - s * factor[:, None])
        if RESIDUAL:
            dx += tl.load(ds_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(r_ptr + rows, r, mask=rows < M)


@triton.jit
def rmsnorm_dw_kernel(
    s_ptr,
    dy_ptr,
    r_ptr,
    part_ptr,
    M,
    H,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """One block of ROWS tokens, ascending, for BC columns."""
    block = tl.program_id(0)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = cols < H
    acc = tl.zeros((BC,), tl.float32)
    for i in tl.range(0, ROWS, loop_unroll_factor=8):
        row = (block * ROWS + i).to(tl.int64)
        live = mask & (row < M)
        s = tl.load(s_ptr + row * H + cols, mask=live, other=0.0)
        r = tl.load(r_ptr + row, mask=row < M, other=0.0)
        n = s.to(tl.float32) * r
        if not OFFSET:
            n = n.to(s.dtype).to(tl.float32)
        acc += tl.load(dy_ptr + row * H + cols, mask=live, other=0.0).to(tl.float32) * n
    tl.store(part_ptr + block.to(tl.int64) * H + cols, acc, mask=mask)


@triton.jit
def column_sum_kernel(part_ptr, out_ptr, num_blocks, H, FAN: tl.constexpr, BC: tl.constexpr):
    """FAN blocks ascending into one, one column per lane."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1) * FAN
    acc = tl.zeros((BC,), tl.float32)
    for i in tl.static_range(FAN):
        block = (first + i).to(tl.int64)
        acc += tl.load(
            part_ptr + block * H + cols, mask=(cols < H) & (first + i < num_blocks), other=0.0
        )
    tl.store(
        out_ptr + tl.program_id(1).to(tl.int64) * H + cols,
        acc.to(out_ptr.dtype.element_ty),
        mask=cols < H,
    )
