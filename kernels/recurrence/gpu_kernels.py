"""Triton programs of the recurrences: weights of every row on its own, then the walk over rows.

``recurrence_weights_kernel``: one program per row and value head adds log decays from the row
backwards and leaves e_ij (q_i . k_j), e_ij (k_i . k_j), w_i q_i and w_i k_i in scratch; it also
copies the row to its page. ``recurrence_walk_kernel``: one program per request, value head and
block of value columns holds S [K, BV] and the chunk's u [C, BV] and takes the rows in order. Sums
over K and over rows are trees by index (``kernels/gpu/tree.py``), with exact zeros where there is
nothing, so a row's bits do not depend on who computes it with whom. Folds add rows descending.

Legend: T rows, C rows per chunk (CP: padded to a power of two), K, V sizes (KP), HK, HV heads.
"""

import triton
import triton.language as tl

from ..gpu.tree import _fold, fold_rows, row_sum

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def fold_deep(v, N: tl.constexpr, W: tl.constexpr):
    """[N, W] -> [W], N a power of two up to 256."""
    if N >= 256:
        v = _fold(v, 1, 256, W)
    if N >= 128:
        v = _fold(v, 1, 128, W)
    return tl.reshape(fold_rows(v, N if N < 64 else 64, W), (W,))


@triton.jit
def recurrence_weights_kernel(
    q_ptr, k_ptr, g_ptr, k_pages, g_pages, slot_ptr, owner_ptr, start_ptr,
    a_ptr, b_ptr, qs_ptr, ks_ptr, HK, HV, K, C: tl.constexpr,
    CHANNELS: tl.constexpr, DELTA: tl.constexpr, KP: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """a, b [T, HV, C]; qs, ks [T, HV, K]. A negative slot is padding."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    slot = tl.load(slot_ptr + t)
    if slot < 0:
        return
    kh = h // (HV // HK)
    begin = tl.load(start_ptr + tl.load(owner_ptr + t)).to(tl.int64)
    page, i = slot // C, (slot % C).to(tl.int32)
    d = tl.arange(0, KP)
    live = d < K
    width = K if CHANNELS else 1
    one = live if CHANNELS else d < 1
    q = tl.load(q_ptr + (t * HK + kh) * K + d, mask=live, other=0.0)
    k = tl.load(k_ptr + (t * HK + kh) * K + d, mask=live, other=0.0)
    decay = tl.zeros((KP,), tl.float32)
    for back in range(0, i + 1):
        j = i - back
        row = t - back
        new = row >= begin
        k_row = tl.where(new, 0, (page * C + j) * HK + kh)
        old_k = tl.load(k_pages + k_row * K + d, mask=live & (row < begin), other=0.0)
        new_k = tl.load(k_ptr + (row * HK + kh) * K + d, mask=live & new, other=0.0)
        key = tl.where(new, new_k, old_k)
        g_row = tl.where(new, 0, (page * C + j) * HV + h)
        if CHANNELS:
            e = tl.exp2(decay * LOG2E)
            moved = e * key
            pair = tl.where((tl.arange(0, 2) == 0)[:, None], (q * moved)[None, :],
                            (k * moved)[None, :])  # fmt: skip
            old_g = tl.load(g_pages + g_row * K + d, mask=live & (row < begin), other=0.0)
            new_g = tl.load(g_ptr + (row * HV + h) * K + d, mask=live & new, other=0.0)
            factor = 1.0
        else:
            pair = tl.where((tl.arange(0, 2) == 0)[:, None], (q * key)[None, :],
                            (k * key)[None, :])  # fmt: skip
            old_g = tl.load(g_pages + g_row + d * 0, mask=row < begin, other=0.0)
            new_g = tl.load(g_ptr + row * HV + h + d * 0, mask=new, other=0.0)
            factor = tl.max(tl.exp2(decay * LOG2E), 0)  # all lanes are equal
        sums = row_sum(pair, 2, KP, VEC) * factor
        both = tl.arange(0, 2)
        at = (t * HV + h) * C + j + both * 0
        tl.store(a_ptr + at, sums, mask=both == 0)
        if DELTA:
            tl.store(b_ptr + at, sums, mask=both == 1)
        decay = decay + tl.where(new, new_g, old_g)
    w = tl.exp2(decay * LOG2E)
    tl.store(qs_ptr + (t * HV + h) * K + d, w * q, mask=live)
    if DELTA:
        tl.store(ks_ptr + (t * HV + h) * K + d, w * k, mask=live)
    own = tl.load(g_ptr + (t * HV + h) * width + d, mask=one, other=0.0)
    tl.store(g_pages + (slot * HV + h) * width + d, own, mask=one)
    tl.store(k_pages + (slot * HK + kh) * K + d, k, mask=live & (h % (HV // HK) == 0))


@triton.jit
def recurrence_walk_kernel(
    v_ptr, beta_ptr, a_ptr, b_ptr, qs_ptr, ks_ptr, k_pages, u_pages, g_pages, end_pages,
    start_ptr, length_ptr, table_ptr, o_ptr, widest, HK, HV, K, V, C: tl.constexpr,
    CHANNELS: tl.constexpr, DELTA: tl.constexpr, KP: tl.constexpr, CP: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """o [T, HV, V]; writes u of the new rows and the end states of chunks that become full."""
    request = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    kh = h // (HV // HK)
    cols = tl.program_id(2) * BV + tl.arange(0, BV)
    fits = cols < V
    d, c = tl.arange(0, KP), tl.arange(0, CP)
    live = (d < K)[:, None] & fits[None, :]
    first = tl.load(start_ptr + request).to(tl.int64)
    last = tl.load(start_ptr + request + 1).to(tl.int64)
    position = tl.load(length_ptr + request).to(tl.int64) - (last - first)
    table = table_ptr + request * widest
    before = tl.load(table + position // C - 1, mask=(position >= C) & (last > first), other=0)
    state_at = d[:, None] * V + cols[None, :]
    state = tl.load(
        end_pages + (before.to(tl.int64) * HV + h) * K * V + state_at,
        mask=live & (position >= C), other=0.0,
    )  # fmt: skip
    page = tl.load(table + position // C, mask=last > first, other=0).to(tl.int64)
    u_at = c[:, None] * HV * V + cols[None, :]
    held = (c < position % C)[:, None] & fits[None, :]
    u = tl.load(u_pages + (page * C * HV + h) * V + u_at, mask=held, other=0.0)
    for t in range(first, last):
        i = (position % C).to(tl.int32)
        if i == 0:
            page = tl.load(table + position // C).to(tl.int64)
            u = tl.zeros((CP, BV), tl.float32)
        row = t * HV + h
        fresh = tl.load(v_ptr + row * V + cols, mask=fits, other=0.0)
        if DELTA:
            ks = tl.load(ks_ptr + row * K + d, mask=d < K, other=0.0)
            b = tl.load(b_ptr + row * C + c, mask=c < i, other=0.0)
            r = fold_deep(ks[:, None] * state, KP, BV) + fold_deep(b[:, None] * u, CP, BV)
            fresh = tl.load(beta_ptr + row) * (fresh - r)
        u = tl.where((c == i)[:, None], fresh[None, :], u)
        tl.store(u_pages + ((page * C + i) * HV + h) * V + cols, fresh, mask=fits)
        qs = tl.load(qs_ptr + row * K + d, mask=d < K, other=0.0)
        a = tl.load(a_ptr + row * C + c, mask=c <= i, other=0.0)
        o = fold_deep(qs[:, None] * state, KP, BV) + fold_deep(a[:, None] * u, CP, BV)
        tl.store(o_ptr + row * V + cols, o, mask=fits)
        if i == C - 1:
            decay = tl.zeros((KP,), tl.float32)
            total = tl.zeros((KP, BV), tl.float32)
            for back in range(0, C):
                j = C - 1 - back
                at = page * C + j
                key = tl.load(k_pages + (at * HK + kh) * K + d, mask=d < K, other=0.0)
                value = tl.sum(tl.where((c == j)[:, None], u, 0.0), 0)  # one row, the rest zeros
                moved = tl.exp2(decay * LOG2E) * key
                total = tl.fma(
                    tl.broadcast_to(moved[:, None], (KP, BV)),
                    tl.broadcast_to(value[None, :], (KP, BV)), total,
                )  # fmt: skip
                if CHANNELS:
                    gate = tl.load(g_pages + (at * HV + h) * K + d, mask=d < K, other=0.0)
                else:
                    gate = tl.load(g_pages + at * HV + h + d * 0)
                decay = decay + gate
            w = tl.broadcast_to(tl.exp2(decay * LOG2E)[:, None], (KP, BV))
            state = tl.fma(w, state, total)
            state = tl.where(live, state, 0.0)
            tl.store(end_pages + (page * HV + h) * K * V + state_at, state, mask=live)
        position += 1
