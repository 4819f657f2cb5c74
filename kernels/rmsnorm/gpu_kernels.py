"""Triton kernels of RMSNorm, forward and backward.

    s  = round(x + residual)                                 (with a residual)
    r  = 1 / sqrt(sum(s * s) / H + eps)                      IEEE division and square root
    y  = round(round(s * r) * w)                             OFFSET 0
    y  = round((s * r) * (1 + w))                            OFFSET 1 (unit_offset)
    y  = round((s * r) * w)                                  OFFSET 2 (wide)
    dx = r (g - s (sum(g s) / H) r r) (+ ds),  g = dy w;     dw = sum over rows of dy round(s r)

Row sums run in W lanes (one warp's 16-byte loads: 256 for 16-bit types, 128 for fp32, less for a
smaller H): column c goes to lane c % W, columns ascending; then ``row_sum``. The order depends on H
and dtype alone. dw adds ROWS rows ascending into a part (narrow rows: SLOTS running sums, row i in
slot i % SLOTS, then a tree of halves), and the parts in LANES running sums and a tree of halves.

The forward keeps a row in registers; rows too wide for that are read twice, the second time
backwards, so that caches still hold them. The backward reads rows twice, ROWS of them by one
program, which makes dw on the way. Legend: M rows, H columns, W lanes, R rows at a time.
"""

# ruff: noqa: RUF005, B007  (Triton has no unpacking in tuples, nor a loop without a name)
import triton
import triton.language as tl

from ..gpu.tree import fold_rows, row_sum


@triton.jit
def _mean(lanes, H: tl.constexpr, R: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr):
    total = row_sum(lanes, R, W, VEC)
    if H & (H - 1) == 0:
        return total * (1.0 / H)  # the bits of the division, at a tenth of its instructions
    return tl.math.div_rn(total, tl.zeros((R,), tl.float32) + H)


@triton.jit
def _reciprocal(lanes, H: tl.constexpr, eps, R: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr):
    mean = _mean(lanes, H, R, W, VEC)
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
        if OFFSET == 1:
            w = 1.0 + w
        y = x * r[:, None]
        y = y * w if OFFSET else y.to(dtype).to(tl.float32) * w
        tl.store(y_ptr + at, y.to(dtype), mask=mask, cache_modifier=".cs")


@triton.jit
def rmsnorm_row_kernel(
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
    pitch=0,
    HEADS: tl.constexpr = 0,
):
    """R rows per program, held in registers. HEADS: of x, inside rows that are ``pitch`` apart."""
    rows = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    begin = rows * H
    if HEADS:
        begin = rows // HEADS * pitch + rows % HEADS * H
    dtype = y_ptr.dtype.element_ty
    N: tl.constexpr = (H + W - 1) // W
    kept = ()
    for i in tl.static_range(N):
        cols = i * W + tl.arange(0, W)
        mask = (rows < M)[:, None] & (cols < H)[None, :]
        at = begin[:, None] + cols[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
        if RESIDUAL:
            other = tl.load(residual_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
            x = (x.to(tl.float32) + other.to(tl.float32)).to(dtype)
        kept = kept + (x,)
    lanes = tl.zeros((R, W), tl.float32)
    for i in tl.static_range(N):
        x = kept[i].to(tl.float32)
        lanes = lanes + x * x
    r = _reciprocal(lanes, H, eps, R, W, VEC)
    for i in tl.static_range(N):
        cols = i * W + tl.arange(0, W)
        mask = (rows < M)[:, None] & (cols < H)[None, :]
        at = rows[:, None] * H + cols[None, :]
        w = tl.load(w_ptr + rows[:, None] * 0 + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if OFFSET == 1:
            w = 1.0 + w
        if RESIDUAL:
            tl.store(s_ptr + at, kept[i], mask=mask, cache_modifier=".cs")
        y = kept[i].to(tl.float32) * r[:, None]
        y = y * w if OFFSET else y.to(dtype).to(tl.float32) * w
        tl.store(y_ptr + at, y.to(dtype), mask=mask, cache_modifier=".cs")


@triton.jit
def _row_factors(
    s_ptr,
    w_ptr,
    dy_ptr,
    rows,
    M,
    eps,
    H: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
    R: tl.constexpr,
    UNROLL: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """(r, sum(g s) / H r r) of R rows."""
    squares = tl.zeros((R, W), tl.float32)
    products = tl.zeros((R, W), tl.float32)
    for first in tl.range(0, H, W, loop_unroll_factor=UNROLL):
        cols = first + tl.arange(0, W)
        mask = (rows < M)[:, None] & (cols < H)[None, :]
        at = rows[:, None] * H + cols[None, :]
        s = tl.load(s_ptr + at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0, eviction_policy="evict_last")
        w = tl.load(w_ptr + rows[:, None] * 0 + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if OFFSET == 1:
            w = 1.0 + w
        g = dy.to(tl.float32) * w
        squares = squares + s * s
        products = products + g * s
    r = _reciprocal(squares, H, eps, R, W, VEC)
    return r, _mean(products, H, R, W, VEC) * (r * r)


@triton.jit
def _one(values, lanes, index):
    """The entry at ``index``: a sum of one number and zeros."""
    return tl.sum(tl.where(lanes == index, values, 0.0), 0)


@triton.jit
def rmsnorm_bwd_kernel(
    s_ptr,
    w_ptr,
    dy_ptr,
    ds_ptr,
    dx_ptr,
    part_ptr,
    M,
    eps,
    H: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """dx of ROWS rows, R at a time, and their part of dw: rows ascending, one column a lane."""
    block = tl.program_id(0).to(tl.int64)
    dtype = dx_ptr.dtype.element_ty
    N: tl.constexpr = (H + BC - 1) // BC
    lanes = tl.arange(0, R)
    parts = ()
    for i in tl.static_range(N):
        parts = parts + (tl.zeros((BC,), tl.float32),)
    for first in range(0, ROWS, R):
        rows = block * ROWS + first + lanes
        r, factor = _row_factors(s_ptr, w_ptr, dy_ptr, rows, M, eps, H, W, VEC, R, UNROLL, OFFSET)
        sums = ()
        for i in tl.static_range(N):
            cols = i * BC + tl.arange(0, BC)
            w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
            if OFFSET == 1:
                w = 1.0 + w
            total = parts[i]
            for j in tl.static_range(R):
                row = block * ROWS + first + j
                mask = (cols < H) & (row < M)
                at = row * H + cols
                s = tl.load(s_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
                dy = tl.load(dy_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
                dy = dy.to(tl.float32)
                r_j = _one(r, lanes, j)
                wide = s.to(tl.float32)
                dx = r_j * (dy * w - wide * _one(factor, lanes, j))
                if RESIDUAL:
                    dx += tl.load(ds_ptr + at, mask=mask, other=0.0).to(tl.float32)
                tl.store(dx_ptr + at, dx.to(dtype), mask=mask, cache_modifier=".cs")
                normed = wide * r_j
                if not OFFSET:
                    normed = normed.to(dtype).to(tl.float32)
                total += tl.where(mask, dy * normed, 0.0)
            sums = sums + (total,)
        parts = sums
    for i in tl.static_range(N):
        cols = i * BC + tl.arange(0, BC)
        tl.store(part_ptr + block * H + cols, parts[i], mask=cols < H)


@triton.jit
def rmsnorm_narrow_bwd_kernel(
    s_ptr,
    w_ptr,
    dy_ptr,
    ds_ptr,
    dx_ptr,
    part_ptr,
    M,
    eps,
    H: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Rows of at most W columns: dx of ROWS rows, R at a time, and R running sums of dw."""
    block = tl.program_id(0).to(tl.int64)
    dtype = dx_ptr.dtype.element_ty
    cols = tl.arange(0, W)
    w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    if OFFSET == 1:
        w = 1.0 + w
    total = tl.zeros((R, W), tl.float32)
    for first in range(0, ROWS, R):
        rows = block * ROWS + first + tl.arange(0, R)
        mask = (rows < M)[:, None] & (cols < H)[None, :]
        at = rows[:, None] * H + cols[None, :]
        s = tl.load(s_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        g = dy * w
        r = _reciprocal(s * s, H, eps, R, W, VEC)
        factor = _mean(g * s + 0.0, H, R, W, VEC) * (r * r)
        dx = r[:, None] * (g - s * factor[:, None])
        if RESIDUAL:
            dx += tl.load(ds_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dtype), mask=mask)
        normed = s * r[:, None]
        if not OFFSET:
            normed = normed.to(dtype).to(tl.float32)
        total += tl.where(mask, dy * normed, 0.0)
    part = tl.reshape(fold_rows(total, R, W), (W,))
    tl.store(part_ptr + block * H + cols, part, mask=cols < H)


@triton.jit
def rmsnorm_parts_kernel(
    part_ptr, sum_ptr, num_parts, H, BLOCK: tl.constexpr, LANES: tl.constexpr, BC: tl.constexpr
):
    """A sum for each BLOCK parts of dw: part i in lane i % LANES, ascending; then the lanes as a
    tree of halves."""
    cols, block = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    lanes = tl.arange(0, LANES)
    end = min(block * BLOCK + BLOCK, num_parts)
    total = tl.zeros((LANES, BC), tl.float32)
    for first in tl.range(block * BLOCK, end, LANES, loop_unroll_factor=4):
        part = (first + lanes).to(tl.int64)
        mask = (part < end)[:, None] & (cols < H)[None, :]
        total += tl.load(part_ptr + part[:, None] * H + cols[None, :], mask=mask, other=0.0)
    out = sum_ptr + block.to(tl.int64) * H + cols
    tl.store(out, tl.reshape(fold_rows(total, LANES, BC), (BC,)), mask=cols < H)


@triton.jit
def rmsnorm_chain_kernel(sum_ptr, dw_ptr, num_sums, H, BC: tl.constexpr):
    """The sums of blocks, ascending, onto what dw holds."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    dw = tl.load(dw_ptr + cols, mask=cols < H, other=0.0)
    block_ptr = sum_ptr + cols
    for _ in tl.range(0, num_sums, loop_unroll_factor=8):
        dw += tl.load(block_ptr, mask=cols < H, other=0.0)
        block_ptr += H
    tl.store(dw_ptr + cols, dw, mask=cols < H)
