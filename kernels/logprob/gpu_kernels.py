"""Triton kernels of log-probabilities from fp32 logits, forward and backward.

    z = logit / T                                       IEEE division, always performed
    block b (BV columns, absolute): m_b = max z;  s_b = sum exp2((z - m_b) log2 e)
    m = max m_b;  s = ascending sum of s_b exp2((m_b - m) log2 e)
    lp = (z_target - m) - log2(s) ln 2
    d_logit = g (onehot - exp2(((z - m) - log2(s) ln 2) log2 e)) / T

Inside a block the order is ``tile_sum`` over BV / W blocks of W columns; a vocabulary tail adds
exact zeros. Blocks are fixed, so
the number of rows, row blocks and vocabulary chunks of a caller are schedule.
Legend: T rows, V vocabulary, BV columns per block, NB blocks.
"""

import triton
import triton.language as tl

from ..gpu.tree import tile_sum

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def logprob_block_kernel(
    logits_ptr,
    temperature_ptr,
    max_ptr,
    sum_ptr,
    V,
    num_blocks,
    stride,
    BV: tl.constexpr,
    W: tl.constexpr,
    VEC: tl.constexpr,
):
    """(m_b, s_b) of one row and one block, held in registers."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    N: tl.constexpr = BV // W
    cols = block * BV + (tl.arange(0, N) * W)[:, None] + tl.arange(0, W)[None, :]
    mask = cols < V
    t = tl.load(temperature_ptr + row)
    z = tl.load(logits_ptr + row * stride + cols, mask=mask, other=float("-inf"))
    z = tl.math.div_rn(z, tl.zeros_like(z) + t)
    m = tl.max(tl.max(z, 1), 0)
    e = tl.where(mask, tl.math.exp2((z - m) * LOG2E), 0.0)
    one = tl.arange(0, 1)
    tl.store(max_ptr + row * num_blocks + block, m)
    tl.store(sum_ptr + row * num_blocks + block + one, tile_sum(e, 1, N, W, VEC))


@triton.jit
def logprob_merge_kernel(
    max_ptr,
    sum_ptr,
    chosen_ptr,
    temperature_ptr,
    lp_ptr,
    row_max_ptr,
    log_sum_ptr,
    T,
    num_blocks,
    BT: tl.constexpr,
    BB: tl.constexpr,
):
    """One row per lane: exact maximum, then the blocks ascending."""
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    mask = rows < T
    m = tl.full((BT,), float("-inf"), tl.float32)
    for block in range(num_blocks):
        m = tl.maximum(m, tl.load(max_ptr + rows * num_blocks + block, mask=mask, other=0.0))
    s = tl.zeros((BT,), tl.float32)
    for block in range(num_blocks):
        m_b = tl.load(max_ptr + rows * num_blocks + block, mask=mask, other=0.0)
        s_b = tl.load(sum_ptr + rows * num_blocks + block, mask=mask, other=0.0)
        s = s + s_b * tl.math.exp2((m_b - m) * LOG2E)
    log_sum = tl.math.log2(s) * LN2
    z = tl.math.div_rn(
        tl.load(chosen_ptr + rows, mask=mask, other=0.0),
        tl.load(temperature_ptr + rows, mask=mask, other=1.0),
    )
    tl.store(lp_ptr + rows, (z - m) - log_sum, mask=mask)
    tl.store(row_max_ptr + rows, m, mask=mask)
    tl.store(log_sum_ptr + rows, log_sum, mask=mask)


@triton.jit
def logprob_chosen_kernel(
    logits_ptr, targets_ptr, chosen_ptr, T, first, width, stride, BT: tl.constexpr
):
    """Copy the target's logit where it lies in columns [first, first + width)."""
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    target = tl.load(targets_ptr + rows, mask=rows < T, other=-1) - first
    mask = (rows < T) & (target >= 0) & (target < width)
    tl.store(
        chosen_ptr + rows,
        tl.load(logits_ptr + rows * stride + target, mask=mask, other=float("nan")),
        mask=mask,
    )


@triton.jit
def logprob_bwd_kernel(
    logits_ptr,
    targets_ptr,
    temperature_ptr,
    row_max_ptr,
    log_sum_ptr,
    g_ptr,
    out_ptr,
    first,
    width,
    stride,
    stride_out,
    BV: tl.constexpr,
):
    """d_logits of one row and block of a chunk that starts at column ``first``."""
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BV + tl.arange(0, BV)
    mask = cols < width
    t = tl.zeros((BV,), tl.float32) + tl.load(temperature_ptr + row)
    z = tl.math.div_rn(tl.load(logits_ptr + row * stride + cols, mask=mask, other=0.0), t)
    e = (z - tl.load(row_max_ptr + row)) - tl.load(log_sum_ptr + row)
    p = tl.math.exp2(e * LOG2E)
    onehot = tl.where(tl.load(targets_ptr + row) - first == cols, 1.0, 0.0)
    d = tl.math.div_rn(tl.load(g_ptr + row) * (onehot - p), t)
    tl.store(out_ptr + row * stride_out + cols, d.to(out_ptr.dtype.element_ty), mask=mask)
