"""Triton kernels of packed attention's backward: two passes, no atomics, p recomputed from lse.

    delta = tree(o * do) over the head dimension
    p  = exp2(fma(z, c, -lse));  ds = p (do . v - delta)    (softcap: times 1 - (x / cap)^2)
    dV = sum p^T do;  dK = scale sum ds^T q    one accumulator: group heads ascending, queries
        ascending
    dQ = scale sum ds k                        one accumulator: keys ascending, blocks on the
        absolute grid

Masked pairs are exact zeros, and their operands are zero-filled, so tiles are schedule.
Legend: T tokens, H query heads, HK kv heads, G = H / HK, D head size, BM queries, BN keys.
"""

import triton
import triton.language as tl

from ..gpu.tree import row_sum
from .gpu_kernels import _find, _scores


@triton.jit
def attention_delta_kernel(
    o_ptr,
    do_ptr,
    delta_ptr,
    T,
    H,
    R: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """delta [H, T]."""
    items = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    dims = tl.arange(0, BD)
    mask = (items < T * H)[:, None] & (dims < D)[None, :]
    o = tl.load(o_ptr + items[:, None] * D + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + items[:, None] * D + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(delta_ptr + items % H * T + items // H, row_sum(o * do, R, BD, 8), mask=items < T * H)


@triton.jit
def _probabilities(z, lse, scale, c, SOFTCAP: tl.constexpr):
    """(p, derivative of the capped score): lse broadcasts against z."""
    x, factor = _scores(z, scale, c, SOFTCAP)
    p = tl.math.exp2(tl.fma(x, tl.zeros_like(x) + factor, tl.zeros_like(x) - lse))
    if SOFTCAP > 0.0:
        ratio = x * (1.0 / SOFTCAP)
        slope = 1.0 - ratio * ratio
    else:
        slope = tl.full(x.shape, 1.0, tl.float32)
    return p, slope


@triton.jit
def attention_dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    query_start_ptr,
    tile_start_ptr,
    B,
    T,
    stride_qt,
    stride_kt,
    scale,
    c,
    G: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """dK and dV of BN keys of one kv head; everything is held transposed, keys as rows."""
    tile = tl.program_id(1)
    if tile >= tl.load(tile_start_ptr + B):
        return
    b = _find(tile_start_ptr, B, tile)
    start = tl.load(query_start_ptr + b)
    length = tl.load(query_start_ptr + b + 1) - start
    n0 = (tile - tl.load(tile_start_ptr + b)) * BN
    kv_head = tl.program_id(0)
    keys = n0 + tl.arange(0, BN)
    dims = tl.arange(0, BD)
    m_k = (keys < length)[:, None] & (dims < D)[None, :]
    k_at = (start + keys).to(tl.int64)[:, None] * stride_kt + kv_head * D + dims[None, :]
    k = tl.load(k_ptr + k_at, mask=m_k, other=0.0)
    v = tl.load(v_ptr + k_at, mask=m_k, other=0.0)
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BD), tl.float32)
    m_low = n0 // BM * BM
    m_high = length
    if WINDOW > 0:
        m_high = tl.minimum(length, n0 + BN + WINDOW - 1)
    count = tl.cdiv(m_high - m_low, BM)
    for step in range(G * count):
        head = kv_head * G + step // count
        queries = m_low + (step % count) * BM + tl.arange(0, BM)
        live = queries < length
        m_q = live[:, None] & (dims < D)[None, :]
        q_at = (start + queries).to(tl.int64)[:, None] * stride_qt + head * D + dims[None, :]
        q = tl.load(q_ptr + q_at, mask=m_q, other=0.0)
        do = tl.load(do_ptr + q_at, mask=m_q, other=0.0)
        lse = tl.load(lse_ptr + head * T + start + queries, mask=live, other=0.0)
        delta = tl.load(delta_ptr + head * T + start + queries, mask=live, other=0.0)
        z = tl.dot(k, tl.trans(q), input_precision="ieee")
        p, slope = _probabilities(z, lse[None, :], scale, c, SOFTCAP)
        seen = (keys[:, None] <= queries[None, :]) & live[None, :] & (keys < length)[:, None]
        if WINDOW > 0:
            seen = seen & (keys[:, None] > queries[None, :] - WINDOW)
        p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = tl.where(seen, p * (dp - delta[None, :]) * slope, 0.0)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    out = (start + keys).to(tl.int64)[:, None] * stride_kt + kv_head * D + dims[None, :]
    tl.store(dk_ptr + out, (dk * scale).to(dk_ptr.dtype.element_ty), mask=m_k)
    tl.store(dv_ptr + out, dv.to(dv_ptr.dtype.element_ty), mask=m_k)


@triton.jit
def attention_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    query_start_ptr,
    tile_start_ptr,
    B,
    T,
    stride_qt,
    stride_kt,
    scale,
    c,
    G: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """dQ of BM queries of one head."""
    tile = tl.program_id(1)
    if tile >= tl.load(tile_start_ptr + B):
        return
    b = _find(tile_start_ptr, B, tile)
    start = tl.load(query_start_ptr + b)
    length = tl.load(query_start_ptr + b + 1) - start
    m0 = (tl.load(tile_start_ptr + b + 1) - 1 - tile) * BM
    head = tl.program_id(0)
    queries = m0 + tl.arange(0, BM)
    live = queries < length
    dims = tl.arange(0, BD)
    m_q = live[:, None] & (dims < D)[None, :]
    q_at = (start + queries).to(tl.int64)[:, None] * stride_qt + head * D + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=m_q, other=0.0)
    do = tl.load(do_ptr + q_at, mask=m_q, other=0.0)
    lse = tl.load(lse_ptr + head * T + start + queries, mask=live, other=0.0)
    delta = tl.load(delta_ptr + head * T + start + queries, mask=live, other=0.0)
    dq = tl.zeros((BM, BD), tl.float32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(m0 - WINDOW + 1, 0) // BN * BN
    for n in range(low, tl.minimum(m0 + BM, length), BN):
        keys = n + tl.arange(0, BN)
        m_k = (keys < length)[:, None] & (dims < D)[None, :]
        k_at = (start + keys).to(tl.int64)[:, None] * stride_kt + (head // G) * D + dims[None, :]
        k = tl.load(k_ptr + k_at, mask=m_k, other=0.0)
        v = tl.load(v_ptr + k_at, mask=m_k, other=0.0)
        z = tl.dot(q, tl.trans(k), input_precision="ieee")
        p, slope = _probabilities(z, lse[:, None], scale, c, SOFTCAP)
        seen = (keys[None, :] <= queries[:, None]) & (keys < length)[None, :]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > queries[:, None] - WINDOW)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = tl.where(seen, p * (dp - delta[:, None]) * slope, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    tl.store(dq_ptr + q_at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=m_q)
