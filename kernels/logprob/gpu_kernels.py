"""Triton kernels of log-probabilities from fp32 logits, forward and backward.

    z = logit / T                                       IEEE division, always performed
    block b (BV columns, absolute): m_b = max z;  s_b = sum exp2((z - m_b) log2 e)
    m = max m_b;  s = ascending sum of s_b exp2((m_b - m) log2 e)
    lp = (z_target - m) - log2(s) ln 2
    d_logit = g (onehot - exp2(((z - m) - log2(s) ln 2) log2 e)) / T

Inside a block the sum runs in W lanes (column % W), columns ascending, then a tree of neighbouring
lanes; a vocabulary tail adds exact zeros. Blocks are fixed, so
the number of rows, row blocks and vocabulary chunks of a caller are schedule.
Legend: T rows, V vocabulary, BV columns per block, NB blocks.
"""

import triton
import triton.language as tl

from ..gpu.tree import row_tree

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def logprob_block_kernel(
    logits_ptr, temperature_ptr, max_ptr, sum_ptr, T, V, num_blocks, stride,
    BV: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):
    """(m_b, s_b) of R rows and one block; the second pass finds the logits in cache."""
    rows = (tl.program_id(1) * R + tl.arange(0, R)).to(tl.int64)
    block = tl.program_id(0)
    live = rows < T
    t = tl.zeros((R, W), tl.float32) + tl.load(temperature_ptr + rows, mask=live, other=1.0)[:, None]
    peak = tl.full((R, W), float("-inf"), tl.float32)
    for first in tl.range(0, BV, W, loop_unroll_factor=4):
        cols = block * BV + first + tl.arange(0, W)
        mask = live[:, None] & (cols < V)[None, :]
        z = tl.load(logits_ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=float("-inf"))
        peak = tl.maximum(peak, tl.math.div_rn(z, t), propagate_nan=tl.PropagateNan.ALL)
    m = tl.max(peak, 1)
    lanes = tl.zeros((R, W), tl.float32)
    for first in tl.range(0, BV, W, loop_unroll_factor=4):
        cols = block * BV + first + tl.arange(0, W)
        mask = live[:, None] & (cols < V)[None, :]
        z = tl.load(logits_ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)
        e = tl.math.exp2((tl.math.div_rn(z, t) - m[:, None]) * LOG2E)
        lanes = lanes + tl.where(mask, e, 0.0)
    tl.store(max_ptr + rows * num_blocks + block, m, mask=live)
    tl.store(sum_ptr + rows * num_blocks + block, row_tree(lanes, R, W), mask=live)


@triton.jit
def logprob_merge_kernel(
    max_ptr, sum_ptr, chosen_ptr, temperature_ptr, lp_ptr, row_max_ptr, log_sum_ptr, T, num_blocks,
    BT: tl.constexpr, BB: tl.constexpr,
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
    z = tl.math.div_rn(tl.load(chosen_ptr + rows, mask=mask, other=0.0),
                       tl.load(temperature_ptr + rows, mask=mask, other=1.0))
    tl.store(lp_ptr + rows, (z - m) - log_sum, mask=mask)
    tl.store(row_max_ptr + rows, m, mask=mask)
    tl.store(log_sum_ptr + rows, log_sum, mask=mask)


@triton.jit
def logprob_chosen_kernel(logits_ptr, targets_ptr, chosen_ptr, T, first, width, stride, BT: tl.constexpr):
    """Copy the target's logit where it lies in columns [first, first + width)."""
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    target = tl.load(targets_ptr + rows, mask=rows < T, other=-1) - first
    mask = (rows < T) & (target >= 0) & (target < width)
    tl.store(chosen_ptr + rows, tl.load(logits_ptr + rows * stride + target, mask=mask, other=0.0), mask=mask)


@triton.jit
def logprob_bwd_kernel(
    logits_ptr, targets_ptr, temperature_ptr, row_max_ptr, log_sum_ptr, g_ptr, out_ptr,
    first, width, stride, stride_out, BV: tl.constexpr,
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
