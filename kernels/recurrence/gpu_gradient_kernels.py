"""Triton programs of the recurrences' gradient over whole requests, from boundary states.

``updates``: per chunk, value head and block of value columns, u again where the forward kept only
states. ``walk``: per request, value head and block of value columns, chunks descending with dS';
rows descending give du, then dS is folded ascending, and r's part of the state is read.
``through``: per chunk, head and block of keys, what passes through S and dS'. ``rows``,
``columns``, ``gates``: per row and head, the sums over earlier rows, later rows, and log decays.
Sums over K, V and tiles of rows are trees by index, everything else one chain as written, so a
request's bits depend on nothing but its own rows.
Formulas: ``kernels/reference/recurrence_grad.py``.

Legend: T rows, N chunks of C rows (CP, KP, VP: padded to powers of two), HK, HV heads, K, V sizes.
"""

import triton
import triton.language as tl

from ..gpu.tree import row_sum
from .gpu_kernels import LOG2E, fold_deep


@triton.jit
def _sum(v, W: tl.constexpr):
    """[W] -> [1]."""
    return row_sum(v[None, :], 1, W, 8 if W > 128 else 4)


@triton.jit
def _gate(g_ptr, row, d, K, CHANNELS: tl.constexpr):
    """Log decays of a row: [KP] per channel, or the same number in every lane."""
    if CHANNELS:
        return tl.load(g_ptr + row * K + d, mask=d < K, other=0.0)
    return tl.load(g_ptr + row + d * 0)


@triton.jit
def recurrence_grad_walk_kernel(
    do_ptr, k_ptr, g_ptr, beta_ptr, a_ptr, b_ptr, qs_ptr, ks_ptr, ends_ptr, base_ptr, first_ptr,
    count_ptr, state_ptr, d_ends, du_ptr, r_ptr, HK, HV, K, V, C, CHANNELS: tl.constexpr,
    DELTA: tl.constexpr, KP: tl.constexpr, CP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """d_ends [N, HV, K, V], du and r's part of the state [T, HV, V]."""
    request = tl.program_id(0)
    h = tl.program_id(1)
    kh = h // (HV // HK)
    cols = tl.program_id(2) * BV + tl.arange(0, BV)
    fits = cols < V
    d, c = tl.arange(0, KP), tl.arange(0, CP)
    live = (d < K)[:, None] & fits[None, :]
    at = d[:, None] * V + cols[None, :]
    lowest, highest = tl.load(base_ptr + request), tl.load(base_ptr + request + 1)
    d_state = tl.zeros((KP, BV), tl.float32)
    for done in range(0, highest - lowest):
        chunk = (highest - 1 - done).to(tl.int64)
        first = tl.load(first_ptr + chunk).to(tl.int64)
        count = tl.load(count_ptr + chunk)
        source = tl.load(state_ptr + chunk).to(tl.int64)
        tl.store(d_ends + (chunk * HV + h) * K * V + at, d_state, mask=live)
        tile = (first + c)[:, None] * HV * V + h * V + cols[None, :]
        d_o = tl.load(do_ptr + tile, mask=(c < count)[:, None] & fits[None, :], other=0.0)
        d_r = tl.zeros((CP, BV), tl.float32)
        decay = tl.zeros((KP,), tl.float32)
        for back in range(0, count):
            j = count - 1 - back
            row = (first + j) * HV + h
            key = tl.load(k_ptr + ((first + j) * HK + kh) * K + d, mask=d < K, other=0.0)
            moved = tl.exp2(decay * LOG2E) * key
            column = ((first + c) * HV + h) * C + j
            a = tl.load(a_ptr + column, mask=(c >= j) & (c < count), other=0.0)
            d_u = fold_deep(moved[:, None] * d_state, KP, BV) + fold_deep(a[:, None] * d_o, CP, BV)
            if DELTA:
                b = tl.load(b_ptr + column, mask=(c > j) & (c < count), other=0.0)
                d_u = d_u + fold_deep(b[:, None] * d_r, CP, BV)
                one = -(tl.load(beta_ptr + row) * d_u)
                d_r = tl.where((c == j)[:, None], one[None, :], d_r)
            tl.store(du_ptr + row * V + cols, d_u, mask=fits)
            decay = decay + _gate(g_ptr, row, d, K, CHANNELS)
        if source >= 0:
            total = tl.broadcast_to(tl.exp2(decay * LOG2E)[:, None], (KP, BV)) * d_state
            for i in range(0, count):
                row = (first + i) * HV + h
                qs = tl.load(qs_ptr + row * K + d, mask=d < K, other=0.0)
                one = tl.load(do_ptr + row * V + cols, mask=fits, other=0.0)
                total = tl.fma(
                    tl.broadcast_to(qs[:, None], (KP, BV)), tl.broadcast_to(one[None, :], (KP, BV)),
                    total,
                )  # fmt: skip
                if DELTA:
                    ks = tl.load(ks_ptr + row * K + d, mask=d < K, other=0.0)
                    one = tl.sum(tl.where((c == i)[:, None], d_r, 0.0), 0)  # a row, and zeros
                    total = tl.fma(
                        tl.broadcast_to(ks[:, None], (KP, BV)),
                        tl.broadcast_to(one[None, :], (KP, BV)), total,
                    )  # fmt: skip
            d_state = tl.where(live, total, 0.0)
            if DELTA:
                state = tl.load(ends_ptr + (source * HV + h) * K * V + at, mask=live, other=0.0)
                for i in range(0, count):
                    row = (first + i) * HV + h
                    ks = tl.load(ks_ptr + row * K + d, mask=d < K, other=0.0)
                    r = fold_deep(ks[:, None] * state, KP, BV)
                    tl.store(r_ptr + row * V + cols, r, mask=fits)


@triton.jit
def recurrence_grad_updates_kernel(
    v_ptr, beta_ptr, b_ptr, ks_ptr, ends_ptr, first_ptr, count_ptr, state_ptr, u_ptr, HV, K, V, C,
    KP: tl.constexpr, CP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """u [T, HV, V] of a delta rule, from the states that chunks begin from: rows ascending."""
    chunk = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    cols = tl.program_id(2) * BV + tl.arange(0, BV)
    fits = cols < V
    d, c = tl.arange(0, KP), tl.arange(0, CP)
    first = tl.load(first_ptr + chunk).to(tl.int64)
    source = tl.load(state_ptr + chunk).to(tl.int64)
    state = tl.load(
        ends_ptr + (source * HV + h) * K * V + d[:, None] * V + cols[None, :],
        mask=(d < K)[:, None] & fits[None, :] & (source >= 0), other=0.0,
    )  # fmt: skip
    u = tl.zeros((CP, BV), tl.float32)
    for i in range(0, tl.load(count_ptr + chunk)):
        row = (first + i) * HV + h
        ks = tl.load(ks_ptr + row * K + d, mask=d < K, other=0.0)
        b = tl.load(b_ptr + row * C + c, mask=c < i, other=0.0)
        r = fold_deep(ks[:, None] * state, KP, BV) + fold_deep(b[:, None] * u, CP, BV)
        one = tl.load(beta_ptr + row) * (tl.load(v_ptr + row * V + cols, mask=fits, other=0.0) - r)
        u = tl.where((c == i)[:, None], one[None, :], u)
        tl.store(u_ptr + row * V + cols, one, mask=fits)


@triton.jit
def recurrence_grad_through_kernel(
    do_ptr, u_ptr, du_ptr, beta_ptr, ends_ptr, d_ends, first_ptr, count_ptr, state_ptr, x_ptr,
    y_ptr, z_ptr, inner_ptr, HV, K, V, DELTA: tl.constexpr, VP: tl.constexpr, VEC: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """x = S do, y = S dr, z = dS' u [T, HV, K]; inner [N, HV, K] = S . dS'."""
    chunk = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    d, v = tl.program_id(2) * BK + tl.arange(0, BK), tl.arange(0, VP)
    live = (d < K)[:, None] & (v < V)[None, :]
    at = d[:, None] * V + v[None, :]
    first = tl.load(first_ptr + chunk).to(tl.int64)
    source = tl.load(state_ptr + chunk).to(tl.int64)
    held = live & (source >= 0)
    state = tl.load(ends_ptr + (source * HV + h) * K * V + at, mask=held, other=0.0)
    d_state = tl.load(d_ends + (chunk * HV + h) * K * V + at, mask=live, other=0.0)
    inner = row_sum(state * d_state, BK, VP, VEC)
    tl.store(inner_ptr + (chunk * HV + h) * K + d, inner, mask=d < K)
    for i in range(0, tl.load(count_ptr + chunk)):
        row = (first + i) * HV + h
        d_o = tl.load(do_ptr + row * V + v, mask=v < V, other=0.0)
        u = tl.load(u_ptr + row * V + v, mask=v < V, other=0.0)
        x = row_sum(state * d_o[None, :], BK, VP, VEC)
        tl.store(x_ptr + row * K + d, x, mask=d < K)
        tl.store(z_ptr + row * K + d, row_sum(d_state * u[None, :], BK, VP, VEC), mask=d < K)
        if DELTA:
            d_u = tl.load(du_ptr + row * V + v, mask=v < V, other=0.0)
            d_r = -(tl.load(beta_ptr + row) * d_u)
            tl.store(y_ptr + row * K + d, row_sum(state * d_r[None, :], BK, VP, VEC), mask=d < K)


@triton.jit
def recurrence_grad_rows_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr, du_ptr, r_ptr, a_ptr, b_ptr, x_ptr, y_ptr,
    z_ptr, inner_ptr, owner_ptr, first_ptr, count_ptr, dq_ptr, dk_ptr, dbeta_ptr, da_ptr, db_ptr,
    pairs_ptr, start_ptr, HK, HV, K, V, C, CHANNELS: tl.constexpr, DELTA: tl.constexpr,
    KP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """dq, the row's part of dk [T, HV, K], dbeta [T, HV]; for the other programs dD_i,-1 and, by
    pairs of rows [T, HV, C], da and db (times e where a head has one decay) and dD."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    kh = h // (HV // HK)
    d, v = tl.arange(0, KP), tl.arange(0, VP)
    one_k, one_v = d < K, v < V
    chunk = tl.load(owner_ptr + t).to(tl.int64)
    first = tl.load(first_ptr + chunk).to(tl.int64)
    i = (t - first).to(tl.int32)
    last = i == tl.load(count_ptr + chunk) - 1
    row = t * HV + h
    q = tl.load(q_ptr + (t * HK + kh) * K + d, mask=one_k, other=0.0)
    k = tl.load(k_ptr + (t * HK + kh) * K + d, mask=one_k, other=0.0)
    d_o = tl.load(do_ptr + row * V + v, mask=one_v, other=0.0)
    d_u = tl.load(du_ptr + row * V + v, mask=one_v, other=0.0)
    d_r, r = d_u, d_u
    if DELTA:
        d_r = -(tl.load(beta_ptr + row) * d_u)
        r = tl.load(r_ptr + row * V + v, mask=one_v, other=0.0)
    dq, dk = tl.zeros((KP,), tl.float32), tl.zeros((KP,), tl.float32)
    decay = tl.zeros((KP,), tl.float32)
    lane = tl.arange(0, 1)
    for back in range(0, i + 1):
        j = i - back
        other = (first + j) * HV + h
        key = tl.load(k_ptr + ((first + j) * HK + kh) * K + d, mask=one_k, other=0.0)
        u = tl.load(u_ptr + other * V + v, mask=one_v, other=0.0)
        e = tl.exp2(decay * LOG2E)
        moved = e * key
        d_a = _sum(d_o * u, VP)
        dq = tl.fma(tl.broadcast_to(d_a, (KP,)), moved, dq)
        d_b = tl.zeros((1,), tl.float32)
        if DELTA:
            d_b = tl.where(j < i, _sum(d_r * u, VP), 0.0)
            dk = tl.fma(tl.broadcast_to(d_b, (KP,)), moved, dk)
            b = tl.load(b_ptr + row * C + j, mask=j < i, other=0.0)
            r = tl.fma(tl.zeros((VP,), tl.float32) + b, u, r)
        place = row * C + j + lane
        if CHANNELS:
            tl.store(da_ptr + place, d_a)
            tl.store(db_ptr + place, d_b)
        else:
            factor = tl.max(e, 0)  # all lanes are equal
            tl.store(da_ptr + place, d_a * factor)
            pair = d_a * tl.load(a_ptr + place)
            if DELTA:
                tl.store(db_ptr + place, d_b * factor)
                pair = tl.fma(d_b, tl.load(b_ptr + place, mask=lane + j < i, other=0.0), pair)
            if last:
                z = tl.load(z_ptr + other * K + d, mask=one_k, other=0.0)
                pair = pair + factor * _sum(key * z, KP)
            tl.store(pairs_ptr + place, pair)
        decay = decay + _gate(g_ptr, other, d, K, CHANNELS)
    w = tl.exp2(decay * LOG2E)
    x = tl.load(x_ptr + row * K + d, mask=one_k, other=0.0)
    dq = tl.fma(w, x, dq)
    start = q * x
    if DELTA:
        y = tl.load(y_ptr + row * K + d, mask=one_k, other=0.0)
        dk = tl.fma(w, y, dk)
        start = tl.fma(k, y, start)
        strength = tl.load(v_ptr + row * V + v, mask=one_v, other=0.0) - r
        tl.store(dbeta_ptr + row + lane, _sum(d_u * strength, VP))
    if last:
        start = start + tl.load(inner_ptr + (chunk * HV + h) * K + d, mask=one_k, other=0.0)
    if CHANNELS:
        tl.store(start_ptr + row * K + d, w * start, mask=one_k)
    else:
        tl.store(start_ptr + row + lane, tl.max(w, 0) * _sum(start, KP))
    tl.store(dq_ptr + row * K + d, dq, mask=one_k)
    tl.store(dk_ptr + row * K + d, dk, mask=one_k)


@triton.jit
def recurrence_grad_columns_kernel(
    q_ptr, k_ptr, g_ptr, da_ptr, db_ptr, z_ptr, owner_ptr, first_ptr, count_ptr, dk_ptr, HK, HV,
    K, C, CHANNELS: tl.constexpr, DELTA: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """What later rows of the chunk and the next chunks give to dk, added to the row's part."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    kh = h // (HV // HK)
    d = tl.arange(0, KP)
    one = d < K
    chunk = tl.load(owner_ptr + t).to(tl.int64)
    first = tl.load(first_ptr + chunk).to(tl.int64)
    j = (t - first).to(tl.int32)
    dk = tl.load(dk_ptr + (t * HV + h) * K + d, mask=one, other=0.0)
    decay = tl.zeros((KP,), tl.float32)
    for i in range(j, tl.load(count_ptr + chunk)):
        row = (first + i) * HV + h
        gate = _gate(g_ptr, row, d, K, CHANNELS)
        decay = decay + tl.where(i > j, gate, 0.0)
        q = tl.load(q_ptr + ((first + i) * HK + kh) * K + d, mask=one, other=0.0)
        d_a = tl.zeros((KP,), tl.float32) + tl.load(da_ptr + row * C + j)
        e = tl.exp2(decay * LOG2E)
        dk = tl.fma(d_a, e * q if CHANNELS else q, dk)
        if DELTA:
            k = tl.load(k_ptr + ((first + i) * HK + kh) * K + d, mask=one, other=0.0)
            d_b = tl.zeros((KP,), tl.float32) + tl.load(db_ptr + row * C + j)
            dk = tl.fma(d_b, e * k if CHANNELS else k, dk)
    z = tl.load(z_ptr + (t * HV + h) * K + d, mask=one, other=0.0)
    dk = tl.fma(tl.exp2(decay * LOG2E), z, dk)
    tl.store(dk_ptr + (t * HV + h) * K + d, dk, mask=one)


@triton.jit
def recurrence_grad_gates_kernel(
    pairs_ptr, start_ptr, owner_ptr, first_ptr, count_ptr, dg_ptr, HV, C, CP: tl.constexpr
):
    """dg [T, HV]: over later rows of the chunk, ascending, what passes the row's decay."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    c, lane = tl.arange(0, CP), tl.arange(0, 1)
    chunk = tl.load(owner_ptr + t).to(tl.int64)
    first = tl.load(first_ptr + chunk).to(tl.int64)
    m = (t - first).to(tl.int32)
    total = tl.zeros((1,), tl.float32)
    for i in range(m, tl.load(count_ptr + chunk)):
        row = (first + i) * HV + h
        pairs = tl.load(pairs_ptr + row * C + c, mask=c < m, other=0.0)
        total = total + (_sum(pairs, CP) + tl.load(start_ptr + row))
    tl.store(dg_ptr + t * HV + h + lane, total)


@triton.jit
def recurrence_grad_channels_kernel(
    q_ptr, k_ptr, g_ptr, da_ptr, db_ptr, z_ptr, start_ptr, owner_ptr, first_ptr, count_ptr, dg_ptr,
    HK, HV, K, C, KP: tl.constexpr,
):  # fmt: skip
    """dg [T, HV, K], as above with a decay per channel: pairs are computed again."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    kh = h // (HV // HK)
    d = tl.arange(0, KP)
    one = d < K
    chunk = tl.load(owner_ptr + t).to(tl.int64)
    first = tl.load(first_ptr + chunk).to(tl.int64)
    count = tl.load(count_ptr + chunk)
    m = (t - first).to(tl.int32)
    total, head = tl.zeros((KP,), tl.float32), tl.zeros((KP,), tl.float32)
    for i in range(m, count):
        row = (first + i) * HV + h
        head = head + tl.load(g_ptr + row * K + d, mask=one, other=0.0)  # from row m to row i
        q = tl.load(q_ptr + ((first + i) * HK + kh) * K + d, mask=one, other=0.0)
        k = tl.load(k_ptr + ((first + i) * HK + kh) * K + d, mask=one, other=0.0)
        part, decay = tl.zeros((KP,), tl.float32), head
        for back in range(0, m):
            j = m - 1 - back
            other = (first + j) * HV + h
            key = tl.load(k_ptr + ((first + j) * HK + kh) * K + d, mask=one, other=0.0)
            d_a = tl.zeros((KP,), tl.float32) + tl.load(da_ptr + row * C + j)
            d_b = tl.zeros((KP,), tl.float32) + tl.load(db_ptr + row * C + j)
            both = tl.fma(d_a, q, d_b * k)
            z = tl.load(z_ptr + other * K + d, mask=one & (i == count - 1), other=0.0)
            part = tl.fma(tl.exp2(decay * LOG2E) * key, both + z, part)
            decay = decay + tl.load(g_ptr + other * K + d, mask=one, other=0.0)
        start = tl.load(start_ptr + row * K + d, mask=one, other=0.0)
        total = total + (part + start)
    tl.store(dg_ptr + (t * HV + h) * K + d, total, mask=one)
