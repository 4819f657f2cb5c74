"""Triton programs of decode when programs are few: scores of every block at once, then the values.

The contract's steps as in ``gpu_kernels.py``. A block's scores depend on nothing before it, so each
(chunk, block) has a program that reads keys only; what is a chain (running maximum, sums) reads
them back, and each program of it owns DS columns of the values. So keys and values of a chunk are
drawn through many multiprocessors instead of one.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gpu_kernels import _find, _key_rows, _step


@triton.jit
def _chunk(
    work,
    query_start_ptr,
    kv_len_ptr,
    split_start_ptr,
    B,
    HK,
    BN: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """(request, first query row, new tokens, keys, first and last position) of a chunk."""
    item = work // HK
    b = _find(split_start_ptr, B, item)
    query_start = tl.load(query_start_ptr + b)
    q_len = tl.load(query_start_ptr + b + 1) - query_start
    kv_len = tl.load(kv_len_ptr + b)
    key_first = 0
    if WINDOW > 0:
        key_first = tl.maximum(kv_len - q_len - WINDOW + 1, 0) // BN * BN
    chunk = key_first // P + item - tl.load(split_start_ptr + b)
    low = tl.maximum(chunk * P, key_first)
    high = tl.minimum(chunk * P + P, kv_len)
    return b, query_start, q_len, kv_len, low, high


@triton.jit
def attention_scores_kernel(
    q_ptr,
    k_ptr,
    z_ptr,
    query_start_ptr,
    kv_len_ptr,
    table_ptr,
    split_start_ptr,
    B,
    HK,
    stride_qt,
    stride_kn,
    stride_kh,
    stride_table,
    G: tl.constexpr,
    QS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Masked scores [BM, BN] of one block of one chunk and kv head."""
    if DEPENDENT:
        gdc_launch_dependents()
    work = tl.program_id(0)
    if work >= tl.load(split_start_ptr + B) * HK:
        return
    b, query_start, q_len, kv_len, low, high = _chunk(
        work, query_start_ptr, kv_len_ptr, split_start_ptr, B, HK, BN, P, WINDOW
    )
    n = low + tl.program_id(1) * BN
    if n >= high:
        return
    kv_head = work % HK
    lanes = tl.arange(0, BM)
    dims = tl.arange(0, BD)
    positions = n + tl.arange(0, BN)
    token = lanes // G
    m_row = (lanes < QS * G) & (token < q_len)
    query_pos = kv_len - q_len + token
    m_q = m_row[:, None] if BD == D else m_row[:, None] & (dims < D)[None, :]
    q_rows = (query_start + token).to(tl.int64) * stride_qt + (kv_head * G + lanes % G) * D
    rows = _key_rows(table_ptr + b.to(tl.int64) * stride_table, positions, kv_len, PAGE, True)
    inside = positions < kv_len
    m_kv = inside[:, None] if BD == D else inside[:, None] & (dims < D)[None, :]
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=m_q, other=0.0)
    offsets = rows[:, None] * stride_kn + kv_head * stride_kh + dims[None, :]
    b_k = tl.load(k_ptr + offsets, mask=m_kv, other=0.0)
    z = tl.dot(q, tl.trans(b_k), input_precision="ieee")
    visible = inside[None, :] & (positions[None, :] <= query_pos[:, None])
    if WINDOW > 0:
        visible = visible & (positions[None, :] > query_pos[:, None] - WINDOW)
    z = tl.where(visible, z, float("-inf"))
    block = work.to(tl.int64) * (P // BN) + tl.program_id(1)
    tl.store(z_ptr + (block * BM + lanes)[:, None] * BN + tl.arange(0, BN)[None, :], z)


@triton.jit
def attention_values_kernel(
    z_ptr,
    v_ptr,
    part_ptr,
    part_m_ptr,
    part_l_ptr,
    query_start_ptr,
    kv_len_ptr,
    table_ptr,
    split_start_ptr,
    B,
    HK,
    stride_kn,
    stride_kh,
    stride_table,
    scale,
    c,
    G: tl.constexpr,
    QS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    DS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The chain over a chunk's blocks for DS columns of the values; partials to scratch."""
    if DEPENDENT:
        gdc_launch_dependents()
    work = tl.program_id(0)
    if work >= tl.load(split_start_ptr + B) * HK:
        return
    b, _, q_len, kv_len, low, high = _chunk(
        work, query_start_ptr, kv_len_ptr, split_start_ptr, B, HK, BN, P, WINDOW
    )
    kv_head = work % HK
    lanes = tl.arange(0, BM)
    dims = tl.program_id(1) * DS + tl.arange(0, DS)
    table = table_ptr + b.to(tl.int64) * stride_table
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM, 16), tl.float32)  # noqa: E741  (the denominator's usual name)
    acc = tl.zeros((BM, DS), tl.float32)
    scores = work.to(tl.int64) * (P // BN) * BM * BN + lanes[:, None] * BN
    scores = z_ptr + scores + tl.arange(0, BN)[None, :]
    if DEPENDENT:
        gdc_wait()
    for n in tl.range(low, high, BN, num_stages=STAGES):
        positions = n + tl.arange(0, BN)
        rows = _key_rows(table, positions, kv_len, PAGE, True)
        m_v = (positions < kv_len)[:, None] & (dims < D)[None, :]
        offsets = rows[:, None] * stride_kn + kv_head * stride_kh + dims[None, :]
        b_v = tl.load(v_ptr + offsets, mask=m_v, other=0.0)
        z = tl.load(scores + (n - low) // BN * (BM * BN))
        m, l, acc = _step(z, b_v, m, l, acc, scale, c, SOFTCAP, BN)  # noqa: E741
    m_row = (lanes < QS * G) & (lanes // G < q_len)
    slot = work.to(tl.int64) * BM + lanes
    tl.store(part_ptr + slot[:, None] * BD + dims[None, :], acc, mask=m_row[:, None])
    if tl.program_id(1) == 0:
        tl.store(part_m_ptr + slot, m, mask=m_row)
        tl.store(part_l_ptr + slot, tl.max(l, 1), mask=m_row)
