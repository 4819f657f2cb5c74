"""Triton programs of recurrences for few new rows, as in decode, with the bits of whole chunks.

Delta rules: ``recurrence_step_kernel``, a program per chunk and head, puts its new rows' k and G on
the page, makes their rows of T and of a one after another, then R, U = T R and o, BV columns at a
time. A row is the first of a tile of 16 in the same matrix instructions as in
:mod:`.gpu_block_kernels` and subtracts the rows of its own block of 16 in the same order. Where
decays are per channel, the keys of earlier blocks, decayed to the end of the block before the
row's, lie behind T from the block's first row on, if there is ROOM. After the walk over states,
``recurrence_rest_kernel`` has R and o of chunks that begin from a state of this call. Without a
delta rule ``recurrence_scores_kernel`` has a for all heads of a key head,
``recurrence_replay_kernel`` o.

Legend: as in :mod:`.gpu_block_kernels`.
"""

import triton
import triton.language as tl

from ..gpu.tree import row_sum
from .gpu_block_kernels import LOG2E, _either, _tile
from .gpu_solve_kernels import _reopen


@triton.jit
def _enter(
    k_ptr, g_ptr, keys, decays, row, old, last, wide, deep, K: tl.constexpr, KP: tl.constexpr,
    G: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Rows k [K] and G [G] of a head onto its page; heads of a key head write the same k."""
    d, e = tl.arange(0, KP), tl.arange(0, E)
    total = tl.load(decays + (old - 1) * deep + e, mask=(e < G) & (old > 0), other=0.0)
    for i in range(old, last):
        k = tl.load(k_ptr + (row + i) * wide + d, mask=d < K, other=0.0)
        tl.store(keys + i * wide + d, k, mask=d < K)
        total += tl.load(g_ptr + (row + i) * deep + e, mask=e < G, other=0.0)
        tl.store(decays + i * deep + e, total, mask=e < G)
    tl.debug_barrier()  # other threads read these rows from here on


@triton.jit
def _solve_row(solved, near_ptr, far, earlier, beta, i, C: tl.constexpr, CP: tl.constexpr):
    """Row i of T; near_ptr: beta b of the rows of its own block."""
    j, r = tl.arange(0, CP), tl.arange(0, 16)
    at = i // 16 * 16
    far_rows = tl.where((r == 0)[:, None], far[None, :], 0.0).to(far.dtype)
    sums = tl.dot(far_rows, earlier)
    sums = tl.sum(tl.where((r == 0)[:, None], sums, 0.0), 0)  # one row, the rest zeros
    x = beta * (tl.where(j == i, 1.0, 0.0) - sums)
    tl.debug_barrier()  # other threads read ``near_ptr``
    for s in tl.static_range(15):
        mine = tl.load(solved + (at + s) * C + j, mask=(at + s < i) & (j < C), other=0.0)
        x = x - tl.load(near_ptr + s) * mine.to(tl.float32)
    tl.store(solved + i * C + j, x.to(far.dtype), mask=j < C)
    tl.debug_barrier()  # other threads read this row from here on


@triton.jit
def _rows(
    q_ptr, k_ptr, beta_ptr, a_ptr, near_ptr, keys, decays, solved, row, old, last, wide,
    HV, K: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """New rows of T and of a, decays per head."""
    j, d, r = tl.arange(0, CP), tl.arange(0, KP), tl.arange(0, 16)
    dtype = solved.dtype.element_ty
    whole = d < K
    for i in range(old, last):
        at = i // 16 * 16
        before = j < at
        k = tl.load(k_ptr + (row + i) * wide + d, mask=whole, other=0.0)
        q = tl.load(q_ptr + (row + i) * wide + d, mask=whole, other=0.0)
        beta = tl.load(beta_ptr + (row + i) * HV)
        earlier = tl.load(
            solved + j[:, None] * C + j[None, :], mask=before[:, None] & (j < C)[None, :],
            other=0.0,
        )  # fmt: skip
        both = tl.where((r == 0)[:, None], k[None, :], 0.0).to(dtype)
        both = tl.where((r == 1)[:, None], q[None, :], both).to(dtype)
        mask = (j <= i)[None, :] & whole[:, None]
        keys_t = tl.load(keys + j[None, :] * wide + d[:, None], mask=mask, other=0.0)
        g_j = tl.load(decays + j * HV, mask=j <= i, other=0.0)
        g_i = tl.load(decays + i * HV)
        pair = tl.dot(both, keys_t)
        e = tl.exp2(tl.where(j <= i, g_i - g_j, 0.0) * LOG2E)
        b = tl.sum(tl.where((r == 0)[:, None], pair, 0.0), 0) * e  # one row, the rest zeros
        a = tl.sum(tl.where((r == 1)[:, None], pair, 0.0), 0) * e
        tl.store(a_ptr + (row + i) * HV * C + j, a.to(dtype), mask=j <= i)
        near = tl.where((j >= at) & (j < i), b, 0.0) * beta
        factors = near_ptr + (row + i) * HV * 16
        tl.store(factors + j - at, near, mask=(j >= at) & (j < at + 16))
        _solve_row(solved, factors, tl.where(before, b, 0.0).to(dtype), earlier, beta, i, C, CP)


@triton.jit
def _keep(keys, decays, cache, ended, at, wide, deep, K: tl.constexpr, KP: tl.constexpr):
    """Keys before row at, decayed until the row before it, whose sums of decays are ``ended``."""
    d, r = tl.arange(0, KP), tl.arange(0, 16)
    for first in range(0, at, 16):
        rows = (first + r)[:, None]
        fits = (rows >= 0) & (d < K)[None, :]
        k = tl.load(keys + rows * wide + d[None, :], mask=fits, other=0.0)
        g = tl.load(decays + rows * deep + d[None, :], mask=fits, other=0.0)
        since = tl.where(fits, ended[None, :] - g, 0.0)
        k = (k.to(tl.float32) * tl.exp2(since * LOG2E)).to(cache.dtype.element_ty)
        tl.store(cache + rows * K + d[None, :], k, mask=fits)


@triton.jit
def _channel_rows(
    q_ptr, k_ptr, beta_ptr, a_ptr, decayed_ptr, near_ptr, keys, decays, solved, cache, row, old,
    last, wide, HV, K: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, KP: tl.constexpr,
    VEC: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """As ``_rows``, decays per channel; k and q decayed since the chunk's start, too."""
    j, d, r = tl.arange(0, CP), tl.arange(0, KP), tl.arange(0, 16)
    dtype = solved.dtype.element_ty
    whole, deep = d < K, HV * K
    for i in range(old, last):
        at = i // 16 * 16
        before = j < at
        k = tl.load(k_ptr + (row + i) * wide + d, mask=whole, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + (row + i) * wide + d, mask=whole, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + (row + i) * HV)
        earlier = tl.load(
            solved + j[:, None] * C + j[None, :], mask=before[:, None] & (j < C)[None, :],
            other=0.0,
        )  # fmt: skip
        g_i = tl.load(decays + i * deep + d, mask=whole, other=0.0)
        ended = tl.load(decays + (at - 1) * deep + d, mask=whole & (at > 0), other=0.0)
        mask = (at + r <= i)[:, None] & whole[None, :]
        k_r = tl.load(keys + (at + r)[:, None] * wide + d[None, :], mask=mask, other=0.0)
        g_r = tl.load(decays + (at + r)[:, None] * deep + d[None, :], mask=mask, other=0.0)
        if (i == at) | AGAIN:
            _keep(keys, decays, cache, ended, at, wide, deep, K, KP)
            tl.debug_barrier()  # other threads read these rows from here on
        k_j = tl.load(
            cache + j[:, None] * K + d[None, :], mask=before[:, None] & whole[None, :], other=0.0
        )  # fmt: skip
        until = tl.exp2((g_i - ended) * LOG2E)
        both = tl.where((r == 0)[:, None], (k * until)[None, :], 0.0).to(dtype)
        both = tl.where((r == 1)[:, None], (q * until)[None, :].to(dtype), both)
        pair = tl.dot(both, tl.trans(k_j))
        b = tl.sum(tl.where((r == 0)[:, None], pair, 0.0), 0)  # one row, the rest zeros
        a = tl.sum(tl.where((r == 1)[:, None], pair, 0.0), 0)
        moved = k_r.to(tl.float32) * tl.exp2(tl.where(mask, g_i[None, :] - g_r, 0.0) * LOG2E)
        near = row_sum(tl.where(mask, moved * k[None, :], 0.0), 16, KP, VEC)
        close = row_sum(tl.where(mask, moved * q[None, :], 0.0), 16, KP, VEC)
        factors = near_ptr + (row + i) * HV * 16
        tl.store(factors + r, tl.where(at + r < i, near, 0.0) * beta)
        to = a_ptr + (row + i) * HV * C
        tl.store(to + j, a.to(dtype), mask=before)
        tl.store(to + at + r, close.to(dtype), mask=at + r <= i)
        w = tl.exp2(g_i * LOG2E)
        to = decayed_ptr + (row + i) * HV * (2 * K) + d
        tl.store(to, (k * w).to(dtype), mask=whole)
        tl.store(to + K, (q * w).to(dtype), mask=whole)
        _solve_row(solved, factors, tl.where(before, b, 0.0).to(dtype), earlier, beta, i, C, CP)


@triton.jit
def _replay(
    q_ptr, k_ptr, v_ptr, a_ptr, u_pages, g_pages, end_pages, solved_ptr, o_ptr, before, page, h,
    HK, HV, low, shift, old, last, open_now, cols, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
    KP: tl.constexpr,
):  # fmt: skip
    """R and o of a chunk's new rows, 16 at once; CHANNELS: of q and k decayed before."""
    dtype = v_ptr.dtype.element_ty
    d, j, r = tl.arange(0, KP), tl.arange(0, CP), tl.arange(0, 16)
    fits, whole = cols < V, (d < K)[None, :]
    state = tl.load(
        end_pages + (before * HV + h) * (K * V) + d[:, None] * V + cols[None, :],
        mask=(d < K)[:, None] & fits[None, :] & (low > 0), other=0.0,
    ).to(dtype)  # fmt: skip
    wide, keys_wide, kh = HV * V, HK * K, h // (HV // HK) * K
    kept = u_pages + page * C * wide + h * V + cols[None, :]
    held = old if DELTA else last  # pages hold all rows of v already
    left = tl.load(kept + j[:, None] * wide, mask=(j < held)[:, None] & fits[None, :], other=0.0)
    if DELTA:
        solved = tl.load(
            solved_ptr + j[:, None] * C + j[None, :],
            mask=(j < last)[:, None] & (j < C)[None, :], other=0.0,
        )  # fmt: skip
    for at in range(old, last, 16):
        i = at + r
        new = (i < last)[:, None]
        row = (low + shift + i)[:, None]
        if CHANNELS:
            k_at = (row * HV + h) * (2 * K) + d[None, :]
            q_at = k_at + K
        else:
            k_at = row * keys_wide + kh + d[None, :]
            q_at = k_at
        q = tl.load(q_ptr + q_at, mask=new & whole, other=0.0)
        a = tl.load(
            a_ptr + (row * HV + h) * C + j[None, :], mask=new & (j[None, :] <= i[:, None]),
            other=0.0,
        )  # fmt: skip
        o = tl.dot(q, state)
        if not CHANNELS:
            g = tl.load(g_pages + (page * C + i) * HV + h, mask=i < last, other=0.0)
            w = tl.exp2(g * LOG2E)[:, None]
            o *= w
        u = left
        if DELTA:
            k = tl.load(k_ptr + k_at, mask=new & whole, other=0.0)
            v = tl.load(
                v_ptr + row * wide + h * V + cols[None, :], mask=new & fits[None, :], other=0.0
            ).to(tl.float32)
            if CHANNELS:
                v -= tl.dot(k, state)
            else:
                v -= w * tl.dot(k, state)
            fresh = v.to(dtype)
            tl.store(kept + i[:, None] * wide, fresh, mask=new & fits[None, :] & open_now)
            here = (j[:, None] == i[None, :]) & (i < last)[None, :]
            placed = tl.dot(here.to(dtype), fresh).to(dtype)  # a copy: one product is not zero
            left = tl.where(((j >= at) & (j < at + 16))[:, None], placed, left)
            u = tl.dot(solved, left).to(dtype)
        o = tl.dot(a, u, o)
        tl.store(o_ptr + row * wide + h * V + cols[None, :], o, mask=new & fits[None, :])


@triton.jit(do_not_specialize=["widest", "B"])
def recurrence_step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, a_ptr, decayed_ptr, moved_ptr, near_ptr, k_pages, u_pages,
    g_pages, end_pages, open_ptr, full_ptr, owner_ptr, ends_ptr, start_ptr, length_ptr, table_ptr,
    o_ptr, widest, B, HK, HV, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    CHANNELS: tl.constexpr, KP: tl.constexpr, VEC: tl.constexpr, ROOM: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Delta rules: T as ``recurrence_solve_kernel`` leaves it; bf16 a [T, HV, C] and, CHANNELS, k
    and q [T, HV, 2, K]; o fp32 [T, HV, V] but of chunks that begin from a state of this call."""
    n = tl.program_id(1)
    h = tl.program_id(0)
    live, request, low, begin, stop, shift = _tile(
        n, owner_ptr, ends_ptr, start_ptr, length_ptr, B, C
    )
    if live:
        table = table_ptr + request * widest + low // C
        page = tl.load(table).to(tl.int64)
        before = tl.load(table - 1, mask=low > 0, other=0).to(tl.int64)
        wide, kh = HK * K, h // (HV // HK) * K
        G: tl.constexpr = K if CHANNELS else 1
        E: tl.constexpr = KP if CHANNELS else 1
        keys = k_pages + page * C * wide + kh
        decays = g_pages + (page * C * HV + h) * G
        kept = open_ptr + (page * HV + h) * (2 * K * V)
        open_now = stop < low + C
        solved = full_ptr + (n.to(tl.int64) * HV + h) * (C * C)
        solved = _either(open_now, kept, solved, K * V % 4 == 0)
        old, last = tl.maximum(begin - low, 0).to(tl.int32), tl.minimum(stop - low, C).to(tl.int32)
        row = low + shift
        _enter(k_ptr + kh, g_ptr + h * G, keys, decays, row, old, last, wide, HV * G, K, KP, G, E)
        if (old > 0) & (stop >= low + C):
            _reopen(kept, solved, tl.arange(0, CP), old, C)
        if CHANNELS:
            cache = kept + C * C
            if not ROOM:
                cache = moved_ptr + (n.to(tl.int64) * HV + h) * (C * K)
            _channel_rows(
                q_ptr + kh, k_ptr + kh, beta_ptr + h, a_ptr + h * C, decayed_ptr + h * (2 * K),
                near_ptr + h * 16, keys, decays, solved, cache, row, old, last, wide, HV, K, C, CP,
                KP, VEC, not ROOM,
            )  # fmt: skip
        else:
            _rows(
                q_ptr + kh, k_ptr + kh, beta_ptr + h, a_ptr + h * C, near_ptr + h * 16, keys,
                decays, solved, row, old, last, wide, HV, K, C, CP, KP,
            )  # fmt: skip
        if (begin >= low) | (low == 0):
            for first in range(0, V, BV):
                _replay(
                    decayed_ptr if CHANNELS else q_ptr, decayed_ptr if CHANNELS else k_ptr,
                    v_ptr, a_ptr, u_pages, g_pages, end_pages, solved, o_ptr, before, page, h,
                    HK, HV, low, shift, old, last, open_now, first + tl.arange(0, BV), K, V, C,
                    CP, True, CHANNELS, KP,
                )  # fmt: skip


@triton.jit(do_not_specialize=["widest"])
def recurrence_keys_kernel(
    k_pages, g_pages, open_ptr, start_ptr, length_ptr, table_ptr, widest, HK, HV, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Decays per channel: what rows of a begun block of 16 find behind T, from k and G alone."""
    h = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    stop = tl.load(length_ptr + request).to(tl.int64)
    begin = stop - (tl.load(start_ptr + request + 1) - tl.load(start_ptr + request))
    old = (begin % C).to(tl.int32)
    at = old // 16 * 16
    if (begin < stop) & (at > 0) & (at < old):
        page = tl.load(table_ptr + request * widest + begin // C).to(tl.int64)
        keys = k_pages + page * C * (HK * K) + h // (HV // HK) * K
        decays = g_pages + (page * C * HV + h) * K
        d = tl.arange(0, KP)
        ended = tl.load(decays + (at - 1) * (HV * K) + d, mask=d < K, other=0.0)
        cache = open_ptr + (page * HV + h) * (2 * K * V) + C * C
        _keep(keys, decays, cache, ended, at, HK * K, HV * K, K, KP)


@triton.jit(do_not_specialize=["widest"])
def recurrence_rest_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, u_pages, g_pages, end_pages, open_ptr, full_ptr, ends_ptr,
    fold_ptr, folds_ptr, start_ptr, length_ptr, table_ptr, o_ptr, widest, HK, HV, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, CHANNELS: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Delta rules: R and o of chunks that begin from a state of this call."""
    h = tl.program_id(1)
    for at in range(tl.program_id(2), tl.load(folds_ptr), tl.num_programs(2)):
        request = tl.load(fold_ptr + at).to(tl.int64)
        first = tl.load(start_ptr + request).to(tl.int64)
        stop = tl.load(length_ptr + request).to(tl.int64)
        begin = stop - (tl.load(start_ptr + request + 1).to(tl.int64) - first)
        chunks = (stop + C - 1) // C
        place = tl.load(ends_ptr + request).to(tl.int64) - chunks
        for chunk in range(begin // C + 1, chunks):
            low = chunk * C
            table = table_ptr + request * widest + chunk
            before, page = tl.load(table - 1).to(tl.int64), tl.load(table).to(tl.int64)
            open_now = stop < low + C
            solved = _either(
                open_now, open_ptr + (page * HV + h) * (2 * K * V),
                full_ptr + ((place + chunk) * HV + h) * (C * C), K * V % 4 == 0,
            )  # fmt: skip
            _replay(
                q_ptr, k_ptr, v_ptr, a_ptr, u_pages, g_pages, end_pages, solved, o_ptr, before,
                page, h, HK, HV, low, first - begin, 0, tl.minimum(stop - low, C).to(tl.int32),
                open_now, tl.program_id(0) * BV + tl.arange(0, BV), K, V, C, CP, True, CHANNELS,
                KP,
            )  # fmt: skip


@triton.jit(do_not_specialize=["widest", "B"])
def recurrence_scores_kernel(
    q_ptr, k_ptr, a_ptr, k_pages, g_pages, owner_ptr, ends_ptr, start_ptr, length_ptr, table_ptr,
    widest, B, HK, HV, K: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Without a delta rule: a alone, a program per chunk and key head."""
    n = tl.program_id(1)
    kh = tl.program_id(0)
    live, request, low, begin, stop, shift = _tile(
        n, owner_ptr, ends_ptr, start_ptr, length_ptr, B, C
    )
    if live:
        page = tl.load(table_ptr + request * widest + low // C).to(tl.int64)
        wide, R = HK * K, HV // HK
        keys = kh * K + _either(
            begin <= low, k_ptr + (low + shift) * wide, k_pages + page * C * wide, K % 8 == 0
        )
        j, d, r = tl.arange(0, CP), tl.arange(0, KP), tl.arange(0, 16)
        old, last = tl.maximum(begin - low, 0).to(tl.int32), tl.minimum(stop - low, C).to(tl.int32)
        for i in range(old, last):
            row = low + shift + i
            q = tl.load(q_ptr + row * wide + kh * K + d, mask=d < K, other=0.0)
            keys_t = tl.load(
                keys + j[None, :] * wide + d[:, None], mask=(j <= i)[None, :] & (d < K)[:, None],
                other=0.0,
            )  # fmt: skip
            products = tl.dot(tl.where((r == 0)[:, None], q[None, :], 0.0).to(q.dtype), keys_t)
            products = tl.sum(tl.where((r == 0)[:, None], products, 0.0), 0)  # the rest zeros
            for h in range(kh * R, kh * R + R):
                decays = g_pages + page * C * HV + h
                g_j = tl.load(decays + j * HV, mask=j <= i, other=0.0)
                g_i = tl.load(decays + i * HV)
                e = tl.exp2(tl.where(j <= i, g_i - g_j, 0.0) * LOG2E)
                to = a_ptr + (row * HV + h) * C + j
                tl.store(to, (products * e).to(a_ptr.dtype.element_ty), mask=j <= i)


@triton.jit(do_not_specialize=["widest", "B"])
def recurrence_replay_kernel(
    q_ptr, a_ptr, u_pages, g_pages, end_pages, owner_ptr, ends_ptr, start_ptr, length_ptr,
    table_ptr, o_ptr, widest, B, HK, HV, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    CP: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Without a delta rule: o fp32 [T, HV, V]."""
    h = tl.program_id(1)
    live, request, low, begin, stop, shift = _tile(
        tl.program_id(2), owner_ptr, ends_ptr, start_ptr, length_ptr, B, C
    )
    if live:
        table = table_ptr + request * widest + low // C
        before = tl.load(table - 1, mask=low > 0, other=0).to(tl.int64)
        page = tl.load(table).to(tl.int64)
        old, last = tl.maximum(begin - low, 0).to(tl.int32), tl.minimum(stop - low, C).to(tl.int32)
        _replay(
            q_ptr, q_ptr, u_pages, a_ptr, u_pages, g_pages, end_pages, a_ptr, o_ptr, before, page,
            h, HK, HV, low, shift, old, last, True, tl.program_id(0) * BV + tl.arange(0, BV), K, V,
            C, CP, False, False, KP,
        )  # fmt: skip
