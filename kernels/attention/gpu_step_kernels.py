"""Triton programs of one step: the work list, the cache write, and keys moved to aligned tiles.

No sums here: they move bits and count tiles. Launched by ``gpu_step.py`` and ``gpu_launch.py``.
"""

import triton
import triton.language as tl

from .gpu_kernels import _find


@triton.jit
def attention_schedule_kernel(
    query_start_ptr,
    kv_len_ptr,
    walk_start_ptr,
    split_start_ptr,
    B,
    QS,
    BQ,
    P,
    WINDOW: tl.constexpr,
    BB: tl.constexpr,
):
    """Work lists: walk tiles of BQ queries where a request has more than QS, else its P-chunks."""
    lanes = tl.arange(0, BB)
    m_b = lanes < B
    q_len = tl.load(query_start_ptr + lanes + 1, mask=m_b, other=0) - tl.load(
        query_start_ptr + lanes, mask=m_b, other=0
    )
    kv_len = tl.load(kv_len_ptr + lanes, mask=m_b, other=0)
    first = kv_len * 0
    if WINDOW > 0:
        first = tl.maximum(kv_len - q_len - WINDOW + 1, 0) // P
    walk = tl.where(q_len > QS, (q_len + BQ - 1) // BQ, 0)
    split = tl.where((q_len > QS) | (q_len == 0), 0, (kv_len + P - 1) // P - first)
    tl.store(walk_start_ptr + lanes + 1, tl.cumsum(walk, 0), mask=m_b)
    tl.store(split_start_ptr + lanes + 1, tl.cumsum(split, 0), mask=m_b)
    tl.store(walk_start_ptr, 0)
    tl.store(split_start_ptr, 0)


@triton.jit
def write_kv_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    width,
    stride_k,
    stride_v,
    BLOCK: tl.constexpr,
):
    """One token: copy HK * D values of k and v to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    lanes = tl.arange(0, BLOCK)
    mask = lanes < width
    tl.store(
        k_cache_ptr + slot * width + lanes,
        tl.load(k_ptr + token * stride_k + lanes, mask=mask),
        mask=mask,
    )
    tl.store(
        v_cache_ptr + slot * width + lanes,
        tl.load(v_ptr + token * stride_v + lanes, mask=mask),
        mask=mask,
    )


@triton.jit
def align_keys_kernel(
    k_ptr,
    v_ptr,
    k_out_ptr,
    v_out_ptr,
    query_start_ptr,
    block_start_ptr,
    B,
    width,
    stride,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    BW: tl.constexpr,
):
    """Packed keys to storage where each request begins at a multiple of BN rows, zero-filled behind
    its end.
    """
    block = tl.program_id(0)
    if block >= tl.load(block_start_ptr + B):
        return
    b = _find(block_start_ptr, B, block)
    start = tl.load(query_start_ptr + b)
    length = tl.load(query_start_ptr + b + 1) - start
    local = (
        (block - tl.load(block_start_ptr + b)) * BN + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    )
    cols = tl.arange(0, BW)
    source = (start + local).to(tl.int64)[:, None] * stride + cols[None, :]
    target = (block * BN + tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[
        :, None
    ] * width + cols[None, :]
    live = (local < length)[:, None] & (cols < width)[None, :]
    keep = (cols < width)[None, :] & (local >= 0)[:, None]
    tl.store(k_out_ptr + target, tl.load(k_ptr + source, mask=live, other=0.0), mask=keep)
    tl.store(v_out_ptr + target, tl.load(v_ptr + source, mask=live, other=0.0), mask=keep)
