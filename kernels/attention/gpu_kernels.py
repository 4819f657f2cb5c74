"""Triton kernels of paged and packed attention, forward: one contract for every phase.

Per query row, keys are walked in blocks of BN on a grid anchored at position 0 of the request, in
chunks of P positions. Inside a chunk (fresh state at its start)::

    z  = q . k                     # one fp32 accumulator, head dimension ascending
    m' = max(m, round(max(z) * c)) # c = scale * log2(e)
    p  = exp2(fma(z, c, -m'));  a = exp2(m - m');  pb = round(p)
    l  = l * a + pb . 1            # a matrix product with ones: its order is the key order
    acc = acc * a + pb . v

Chunks are merged ascending with ``fma`` into (M, L, ACC) from (-inf, 0, 0), always, also when
there is only one; ``o = (ACC + 0) / L`` by IEEE division. Masked keys give p = 0 and are exact
no-ops, and their V is zero-filled. So query tile, head packing, pages, splits and the number of
queries in a call are schedule. ``walk`` keeps all chunks of a query tile in one program (prefill,
packed training); ``split`` gives each (request, kv head, chunk) a program and ``merge`` adds the
partials in order; the only chunk of a request is finished by ``split`` itself.

Legend: T tokens, H query heads, HK kv heads, G = H / HK, D head size, B requests.
"""

# ruff: noqa: E741  (l is the denominator's usual name)

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(z, scale, c, SOFTCAP: tl.constexpr):
    """(x, factor): scores before the running max, and what turns them into base-2 logarithms."""
    if SOFTCAP > 0.0:
        t = z * scale * (2.0 * LOG2E / SOFTCAP)
        capped = SOFTCAP * (1.0 - tl.math.div_rn(2.0 + tl.zeros_like(t), tl.math.exp2(t) + 1.0))
        z = tl.where(z == float("-inf"), z, capped)  # a masked key stays masked
        factor = LOG2E
    else:
        factor = c
    return z, factor


@triton.jit
def _step(z, b_v, m, l, acc, scale, c, SOFTCAP: tl.constexpr, BN: tl.constexpr):
    """One block of keys: scores z [R, BN] (masked to -inf), values b_v [BN, D]."""
    x, factor = _scores(z, scale, c, SOFTCAP)
    m_new = tl.maximum(m, tl.max(x, 1) * factor)
    guard = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(tl.fma(x, tl.zeros_like(x) + factor, tl.zeros_like(x) - guard[:, None]))
    a = tl.math.exp2(m - guard)
    pb = p.to(b_v.dtype)
    l = tl.dot(pb, tl.full((BN, 16), 1.0, b_v.dtype), l * a[:, None], input_precision="ieee")
    acc = tl.dot(pb, b_v, acc * a[:, None], input_precision="ieee")
    return m_new, l, acc


@triton.jit
def _merge(total_m, total_l, total_acc, m, l, acc):
    """Add one chunk to the running total; l and total_l are [R]."""
    m_new = tl.maximum(total_m, m)
    guard = tl.where(m_new == float("-inf"), 0.0, m_new)
    a = tl.math.exp2(total_m - guard)
    b = tl.math.exp2(m - guard)
    total_l = tl.fma(total_l, a, l * b)
    a2 = tl.zeros_like(acc) + a[:, None]
    total_acc = tl.fma(total_acc, a2, acc * b[:, None])
    return m_new, total_l, total_acc


@triton.jit
def _finish(total_m, total_l, total_acc, sink, HAS_SINK: tl.constexpr):
    """(o, lse) of finished rows; the sink joins the denominator only."""
    if HAS_SINK:
        sink2 = sink * LOG2E
        m_new = tl.maximum(total_m, sink2)
        a = tl.math.exp2(total_m - m_new)
        total_l = tl.fma(total_l, a, tl.math.exp2(sink2 - m_new))
        total_acc = total_acc * a[:, None]
        total_m = m_new
    safe = tl.where(total_l == 0.0, 1.0, total_l)
    o = tl.math.div_rn(total_acc + 0.0, tl.zeros_like(total_acc) + safe[:, None])
    return o, total_m + tl.math.log2(safe)


@triton.jit
def _find(start_ptr, B, index):
    """The request that owns work item ``index``: last b with start[b] <= index."""
    low = 0
    high = B
    while high - low > 1:
        mid = (low + high) // 2
        if tl.load(start_ptr + mid) <= index:
            low = mid
        else:
            high = mid
    return low


@triton.jit
def _key_rows(table_ptr, positions, kv_len, PAGE: tl.constexpr, PAGED: tl.constexpr):
    """Rows of the key storage that hold these positions (int64)."""
    if PAGED:
        pages = tl.load(table_ptr + positions // PAGE, mask=positions < kv_len, other=0)
        rows = pages.to(tl.int64) * PAGE + positions % PAGE
    else:
        rows = positions.to(tl.int64)
    return rows


@triton.jit
def _masked_block(
    q,
    m,
    l,
    acc,
    k_ptr,
    v_ptr,
    rows,
    n,
    query_pos,
    kv_len,
    stride_kn,
    scale,
    c,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One block with causal, window and length masks; k_ptr and v_ptr point at the kv head."""
    positions = n + tl.arange(0, BN)
    dims = tl.arange(0, BD)
    inside = positions < kv_len
    m_kv = inside[:, None] if BD == D else inside[:, None] & (dims < D)[None, :]
    offsets = rows[:, None] * stride_kn + dims[None, :]
    b_k = tl.load(k_ptr + offsets, mask=m_kv, other=0.0)
    b_v = tl.load(v_ptr + offsets, mask=m_kv, other=0.0)
    z = tl.dot(q, tl.trans(b_k), input_precision="ieee")
    visible = inside[None, :] & (positions[None, :] <= query_pos[:, None])
    if WINDOW > 0:
        visible = visible & (positions[None, :] > query_pos[:, None] - WINDOW)
    z = tl.where(visible, z, float("-inf"))
    return _step(z, b_v, m, l, acc, scale, c, SOFTCAP, BN)


@triton.jit
def attention_walk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    o_ptr,
    lse_ptr,
    sink_ptr,
    query_start_ptr,
    kv_len_ptr,
    kv_start_ptr,
    table_ptr,
    walk_start_ptr,
    B,
    H,
    stride_qt,
    stride_kn,
    stride_kh,
    stride_table,
    stride_ot,
    stride_lse,
    scale,
    c,
    G: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PAGE: tl.constexpr,
    PAGED: tl.constexpr,
    TMA: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """All chunks of one tile: BM rows = (BM // R tokens) x (R heads that share a kv head)."""
    tile = tl.program_id(1)
    if tile >= tl.load(walk_start_ptr + B):
        return
    b = _find(walk_start_ptr, B, tile)
    BQ: tl.constexpr = BM // R
    query_start = tl.load(query_start_ptr + b)
    q_len = tl.load(query_start_ptr + b + 1) - query_start
    kv_len = tl.load(kv_len_ptr + b)
    # later tiles have more keys: start them first
    local = tl.load(walk_start_ptr + b + 1) - 1 - tile
    head0 = tl.program_id(0) * R
    kv_head = head0 // G
    lanes = tl.arange(0, BM)
    token = local * BQ + lanes // R
    heads = head0 + lanes % R
    m_row = (lanes < BQ * R) & (token < q_len)
    query_pos = kv_len - q_len + token
    dims = tl.arange(0, BD)
    q_rows = (query_start + token).to(tl.int64) * stride_qt + heads * D
    m_q = m_row[:, None] if BD == D else m_row[:, None] & (dims < D)[None, :]
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=m_q, other=0.0)
    kv_start = 0
    if not PAGED:
        kv_start = tl.load(kv_start_ptr + b)
    first_row = kv_start.to(tl.int64) * stride_kn if not PAGED else tl.zeros((), tl.int64)
    k_ptr += first_row + kv_head * stride_kh
    v_ptr += first_row + kv_head * stride_kh
    table_ptr += b.to(tl.int64) * stride_table

    pos0 = kv_len - q_len + local * BQ
    key_end = tl.minimum(pos0 + BQ, kv_len)
    key_first = 0
    full_end = (pos0 + 1) // BN * BN
    if WINDOW > 0:
        key_first = tl.maximum(pos0 - WINDOW + 1, 0) // BN * BN
        full_end = key_first
    total_m = tl.full((BM,), float("-inf"), tl.float32)
    total_l = tl.zeros((BM,), tl.float32)
    total_acc = tl.zeros((BM, BD), tl.float32)
    for chunk in range(key_first // P, tl.cdiv(key_end, P)):
        low = tl.maximum(chunk * P, key_first)
        high = tl.minimum(chunk * P + P, key_end)
        middle = tl.maximum(tl.minimum(high, full_end), low)
        m = tl.full((BM,), float("-inf"), tl.float32)
        l = tl.zeros((BM, 16), tl.float32)
        acc = tl.zeros((BM, BD), tl.float32)
        for n in range(low, middle, BN):
            if TMA:
                b_k = k_desc.load([kv_start + n, kv_head * D])
                z = tl.dot(q, b_k.T, input_precision="ieee")
                b_v = v_desc.load([kv_start + n, kv_head * D])
            else:
                positions = n + tl.arange(0, BN)
                rows = _key_rows(table_ptr, positions, kv_len, PAGE, PAGED)
                offsets = rows[:, None] * stride_kn + dims[None, :]
                if BD == D:
                    b_k = tl.load(k_ptr + offsets)
                    b_v = tl.load(v_ptr + offsets)
                else:
                    b_k = tl.load(k_ptr + offsets, mask=(dims < D)[None, :], other=0.0)
                    b_v = tl.load(v_ptr + offsets, mask=(dims < D)[None, :], other=0.0)
                z = tl.dot(q, tl.trans(b_k), input_precision="ieee")
            m, l, acc = _step(z, b_v, m, l, acc, scale, c, SOFTCAP, BN)
        for n in tl.range(middle, high, BN, num_stages=1):
            rows = _key_rows(table_ptr, n + tl.arange(0, BN), kv_len, PAGE, PAGED)
            m, l, acc = _masked_block(
                q,
                m,
                l,
                acc,
                k_ptr,
                v_ptr,
                rows,
                n,
                query_pos,
                kv_len,
                stride_kn,
                scale,
                c,
                D,
                BD,
                BN,
                WINDOW,
                SOFTCAP,
            )
        total_m, total_l, total_acc = _merge(total_m, total_l, total_acc, m, tl.max(l, 1), acc)
    sink = tl.zeros((BM,), tl.float32)
    if HAS_SINK:
        sink = tl.load(sink_ptr + heads, mask=m_row, other=0.0).to(tl.float32)
    o, lse = _finish(total_m, total_l, total_acc, sink, HAS_SINK)
    o_rows = (query_start + token).to(tl.int64) * stride_ot + heads * D
    tl.store(o_ptr + o_rows[:, None] + dims[None, :], o.to(o_ptr.dtype.element_ty), mask=m_q)
    tl.store(lse_ptr + heads * stride_lse + query_start + token, lse, mask=m_row)


@triton.jit
def attention_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    part_m_ptr,
    part_l_ptr,
    o_ptr,
    lse_ptr,
    sink_ptr,
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
    stride_ot,
    stride_lse,
    scale,
    c,
    G: tl.constexpr,
    QS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINK: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Persistent: one P-chunk of one request and kv head at a time, partials to scratch."""
    work = tl.program_id(0)
    total = tl.load(split_start_ptr + B) * HK
    lanes = tl.arange(0, BM)
    dims = tl.arange(0, BD)
    while work < total:
        item = work // HK
        kv_head = work % HK
        b = _find(split_start_ptr, B, item)
        query_start = tl.load(query_start_ptr + b)
        q_len = tl.load(query_start_ptr + b + 1) - query_start
        kv_len = tl.load(kv_len_ptr + b)
        token = lanes // G
        heads = kv_head * G + lanes % G
        m_row = (lanes < QS * G) & (token < q_len)
        query_pos = kv_len - q_len + token
        key_first = 0
        if WINDOW > 0:
            key_first = tl.maximum(kv_len - q_len - WINDOW + 1, 0) // BN * BN
        first_item = tl.load(split_start_ptr + b)
        chunk = key_first // P + item - first_item
        low = tl.maximum(chunk * P, key_first)
        high = tl.minimum(chunk * P + P, kv_len)
        q_rows = (query_start + token).to(tl.int64) * stride_qt + heads * D
        m_q = m_row[:, None] if BD == D else m_row[:, None] & (dims < D)[None, :]
        q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=m_q, other=0.0)
        m = tl.full((BM,), float("-inf"), tl.float32)
        l = tl.zeros((BM, 16), tl.float32)
        acc = tl.zeros((BM, BD), tl.float32)
        table = table_ptr + b.to(tl.int64) * stride_table
        # page numbers are read one block ahead, so that key addresses never wait for them
        rows = _key_rows(table, low + tl.arange(0, BN), kv_len, PAGE, True)
        for n in tl.range(low, high, BN, num_stages=STAGES):
            ahead = _key_rows(table, n + BN + tl.arange(0, BN), kv_len, PAGE, True)
            m, l, acc = _masked_block(
                q,
                m,
                l,
                acc,
                k_ptr + kv_head * stride_kh,
                v_ptr + kv_head * stride_kh,
                rows,
                n,
                query_pos,
                kv_len,
                stride_kn,
                scale,
                c,
                D,
                BD,
                BN,
                WINDOW,
                SOFTCAP,
            )
            rows = ahead
        if tl.load(split_start_ptr + b + 1) - first_item == 1:
            total_m = tl.full((BM,), float("-inf"), tl.float32)
            total_l = tl.zeros((BM,), tl.float32)
            total_acc = tl.zeros((BM, BD), tl.float32)
            total_m, total_l, total_acc = _merge(total_m, total_l, total_acc, m, tl.max(l, 1), acc)
            sink = tl.zeros((BM,), tl.float32)
            if HAS_SINK:
                sink = tl.load(sink_ptr + heads, mask=m_row, other=0.0).to(tl.float32)
            o, lse = _finish(total_m, total_l, total_acc, sink, HAS_SINK)
            row = (query_start + token).to(tl.int64)
            o_at = (row * stride_ot + heads * D)[:, None] + dims[None, :]
            tl.store(o_ptr + o_at, o.to(o_ptr.dtype.element_ty), mask=m_q)
            tl.store(lse_ptr + heads * stride_lse + row, lse, mask=m_row)
        else:
            slot = (item.to(tl.int64) * HK + kv_head) * BM + lanes
            tl.store(part_ptr + slot[:, None] * BD + dims[None, :], acc, mask=m_row[:, None])
            tl.store(part_m_ptr + slot, m, mask=m_row)
            tl.store(part_l_ptr + slot, tl.max(l, 1), mask=m_row)
        work += tl.num_programs(0)
    if DEPENDENT:
        gdc_launch_dependents()
