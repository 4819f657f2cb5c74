"""Triton programs of the recurrences on matrix units: chunks side by side, one walk over states.

``recurrence_pages_kernel``, a program per chunk and part of its columns, puts rows of chunks that
stay open on pages, and for every chunk G, the running sum of log decays from its start.
:mod:`.gpu_solve_kernels` has T of delta rules.
``recurrence_scan_kernel``, a program per request, head and BV columns, takes chunks that become
full in order, S [K, BV] in registers: R = v - w (k S), U = T R, S' = w_last S + k' (e U).
``recurrence_out_kernel``, a program per M rows, head and BV columns, all at once: R and U again,
o = w (q S) + A U, a_ij = e_ij (q_i . k_j), e_ij = exp2((G_i - G_j) log2 e). Without a delta rule U
is v.

A row's T needs the rows before it alone: decode computes one row of T, R, U and o with prefill's
instructions. Operands of products are bf16 (S, T, R, U, a, e U rounded), sums fp32, K ascending.
Pages keep k, G and R (v without a delta rule) of the rows of an open chunk and, where its end state
will be, T and what :mod:`.gpu_replay_kernels` keeps, which does the same row by row for few new
rows; T of a chunk that becomes full lies in scratch.

Legend: as in :mod:`.gpu_kernels`; C a multiple of 16, M rows of a tile, one of a chunk's parts.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(n, owner_ptr, ends_ptr, start_ptr, length_ptr, B, M: tl.constexpr):
    """(live, request, first position, new rows from, up to, the call's row less the position)"""
    request = tl.load(owner_ptr + n).to(tl.int64)
    live = request < B
    request = tl.where(live, request, 0)
    first = tl.load(start_ptr + request).to(tl.int64)
    last = tl.load(start_ptr + request + 1).to(tl.int64)
    stop = tl.load(length_ptr + request).to(tl.int64)
    begin = stop - (last - first)
    ends = tl.load(ends_ptr + request).to(tl.int64)
    tile = (stop + M - 1) // M + n - ends
    return live, request, tile * M, begin, stop, first - begin


@triton.jit
def _either(which, a, b, EVEN: tl.constexpr):
    """One of two pointers, as integers: Triton's compiler for AMD cannot choose between pointers.

    EVEN: both are multiples of 16 bytes.
    """
    p = tl.where(which, a.to(tl.int64), b.to(tl.int64)).to(a.dtype)
    return tl.multiple_of(p, 16) if EVEN else p


@triton.jit
def _copy(new_ptr, pages, row, slot, mask, W, cols):
    """Rows of the call to a page, both W wide."""
    fits = mask[:, None] & (cols < W)[None, :]
    x = tl.load(new_ptr + row[:, None] * W + cols[None, :], mask=fits, other=0.0)
    tl.store(pages + slot[:, None] * W + cols[None, :], x, mask=fits)


@triton.jit(do_not_specialize=["widest", "B"])
def recurrence_pages_kernel(
    k_ptr, v_ptr, g_ptr, k_pages, u_pages, g_pages, owner_ptr, ends_ptr, start_ptr, length_ptr,
    table_ptr, widest, B, GW, KW, VW, C: tl.constexpr, DELTA: tl.constexpr, ALL: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    live, request, low, begin, stop, shift = _tile(
        n, owner_ptr, ends_ptr, start_ptr, length_ptr, B, C
    )
    if live:
        base = tl.load(table_ptr + request * widest + low // C).to(tl.int64) * C
        first, last = tl.maximum(low, begin), tl.minimum(stop, low + C)
        cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
        if (begin > low) | (stop < low + C) | ALL:
            for at in range(first, last, 16):
                p = at + tl.arange(0, 16)
                mask, row, slot = p < last, p + shift, base + p - low
                _copy(k_ptr, k_pages, row, slot, mask, KW, cols)
                if not DELTA:
                    _copy(v_ptr, u_pages, row, slot, mask, VW, cols)
        if tl.program_id(1) * COLS < GW:
            fits = cols < GW
            at = base + first - low
            total = tl.load(g_pages + (at - 1) * GW + cols, mask=fits & (first > low), other=0.0)
            for row in range(first, last, 16):
                ahead = ()
                for s in tl.static_range(16):  # all before any store: one wait
                    mask = fits & (row + s < last)
                    x = tl.load(g_ptr + (row + s + shift) * GW + cols, mask=mask, other=0.0)
                    ahead += (x,)
                for s in tl.static_range(16):
                    total += ahead[s]
                    mask = fits & (row + s < last)
                    tl.store(g_pages + (base + row + s - low) * GW + cols, total, mask=mask)


@triton.jit(do_not_specialize=["widest"])
def recurrence_scan_kernel(
    k_ptr, v_ptr, k_since, k_until, k_pages, u_pages, g_pages, end_pages, full_ptr, ends_ptr,
    fold_ptr, folds_ptr, start_ptr, length_ptr, table_ptr, widest, HK, HV, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
    READY: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """End states of chunks that become full."""
    h = tl.program_id(1)
    for at in range(tl.program_id(2), tl.load(folds_ptr), tl.num_programs(2)):
        request = tl.load(fold_ptr + at).to(tl.int64)
        first = tl.load(start_ptr + request).to(tl.int64)
        stop = tl.load(length_ptr + request).to(tl.int64)
        begin = stop - (tl.load(start_ptr + request + 1).to(tl.int64) - first)
        dtype = v_ptr.dtype.element_ty
        cols = tl.program_id(0) * BV + tl.arange(0, BV)
        d, j = tl.arange(0, KP), tl.arange(0, CP)
        table = table_ptr + request * widest
        fits = cols < V
        live = (d < K)[:, None] & fits[None, :]
        own = h.to(tl.int64) * K * V + d[:, None] * V + cols[None, :]
        carried = begin >= C
        before = tl.load(table + begin // C - 1, mask=carried, other=0).to(tl.int64)
        state = tl.load(end_pages + before * HV * K * V + own, mask=live & carried, other=0.0)
        keys_wide, wide = HK * K, HV * V
        place = tl.load(ends_ptr + request).to(tl.int64) - (stop + C - 1) // C
        for chunk in range(begin // C, stop // C):
            low = chunk * C
            page = tl.load(table + chunk).to(tl.int64)
            fresh, row = begin <= low, low + first - begin
            if not READY:
                keys = _either(
                    fresh, k_ptr + row * keys_wide, k_pages + page * C * keys_wide, K % 8 == 0
                )
                k = tl.load(
                    keys + h // (HV // HK) * K + j[:, None] * keys_wide + d[None, :],
                    mask=(j < C)[:, None] & (d < K)[None, :], other=0.0,
                )  # fmt: skip
            old = begin - low
            rows_at = h * V + j[:, None] * wide + cols[None, :]
            inside = (j < C)[:, None] & fits[None, :]
            u = tl.load(
                v_ptr + row * wide + rows_at, mask=inside & (j >= old)[:, None], other=0.0
            ).to(tl.float32)  # fmt: skip
            held = tl.load(
                u_pages + page * C * wide + rows_at, mask=inside & (j < old)[:, None], other=0.0
            ).to(tl.float32)  # fmt: skip
            if DELTA:
                solved = tl.load(
                    full_ptr + ((place + chunk) * HV + h) * (C * C) + j[:, None] * C + j[None, :],
                    mask=(j < C)[:, None] & (j < C)[None, :], other=0.0,
                )  # fmt: skip
            if READY:
                to = ((place + chunk) * HV + h) * (C * K) + j[:, None] * K + d[None, :]
                mask = (j < C)[:, None] & (d < K)[None, :]
                moved = tl.load(k_since + to, mask=mask & (j >= old)[:, None], other=0.0)
                k = tl.load(k_until + to, mask=mask, other=0.0)
                at_last = g_pages + ((page * C + C - 1) * HV + h) * K + d
                g_last = tl.load(at_last, mask=d < K, other=0.0)
                u -= tl.dot(moved, state.to(dtype))
                u = tl.where((j < old)[:, None], held, u).to(dtype)
                u = tl.dot(solved, u).to(dtype)
                state *= tl.exp2(g_last * LOG2E)[:, None]
            elif CHANNELS:
                decays = g_pages + (page * C * HV + h) * K
                g = tl.load(
                    decays + j[:, None] * (HV * K) + d[None, :],
                    mask=(j < C)[:, None] & (d < K)[None, :], other=0.0,
                )  # fmt: skip
                at_last = decays + (C - 1) * HV * K + d
                g_last = tl.load(at_last, mask=d < K, other=0.0)
                moved = (k.to(tl.float32) * tl.exp2(g * LOG2E)).to(dtype)
                u -= tl.dot(moved, state.to(dtype))
                u = tl.where((j < old)[:, None], held, u).to(dtype)
                u = tl.dot(solved, u).to(dtype)
                k = (k.to(tl.float32) * tl.exp2((g_last[None, :] - g) * LOG2E)).to(dtype)
                state *= tl.exp2(g_last * LOG2E)[:, None]
            else:
                decays = g_pages + page * C * HV + h
                g = tl.load(decays + j * HV, mask=j < C, other=0.0)
                g_last = tl.load(decays + (C - 1) * HV)
                if DELTA:
                    u -= tl.exp2(g * LOG2E)[:, None] * tl.dot(k, state.to(dtype))
                u = tl.where((j < old)[:, None], held, u)
                if DELTA:
                    u = tl.dot(solved, u.to(dtype))
                u = (u * tl.exp2((g_last - g) * LOG2E)[:, None]).to(dtype)
                state *= tl.exp2(g_last * LOG2E)
            state = tl.dot(tl.trans(k), u, state)
            tl.store(end_pages + page * HV * K * V + own, state, mask=live)


@triton.jit(do_not_specialize=["widest", "B"])
def recurrence_out_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, q_since, k_since, k_pages, u_pages, g_pages, end_pages, open_ptr,
    full_ptr, owner_ptr, ends_ptr, chunk_ends_ptr, start_ptr, length_ptr, table_ptr, o_ptr, widest,
    B, HK, HV, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """o fp32 [T, HV, V]."""
    h = tl.program_id(1)
    live, request, position, begin, stop, shift = _tile(
        tl.program_id(2), owner_ptr, ends_ptr, start_ptr, length_ptr, B, M
    )
    if live:
        dtype = v_ptr.dtype.element_ty
        low = position // C * C
        table = table_ptr + request * widest + low // C
        before = tl.load(table - 1, mask=low > 0, other=0).to(tl.int64)
        page = tl.load(table).to(tl.int64)
        cols = tl.program_id(0) * BV + tl.arange(0, BV)
        d, j, r = tl.arange(0, KP), tl.arange(0, CP), tl.arange(0, M)
        fits = cols < V
        state = tl.load(
            end_pages + (before * HV + h) * (K * V) + d[:, None] * V + cols[None, :],
            mask=(d < K)[:, None] & fits[None, :] & (low > 0), other=0.0,
        ).to(dtype)  # fmt: skip
        fresh, row = begin <= low, low + shift
        keys_wide, wide = HK * K, HV * V
        kh = h // (HV // HK) * K
        there = (j < C) & (low + j < stop)
        place = tl.load(chunk_ends_ptr + request).to(tl.int64) - (stop + C - 1) // C + low // C
        if not CHANNELS:
            keys = _either(
                fresh, k_ptr + row * keys_wide, k_pages + page * C * keys_wide, K % 8 == 0
            )
            k = tl.load(
                keys + kh + j[:, None] * keys_wide + d[None, :],
                mask=there[:, None] & (d < K)[None, :], other=0.0,
            )  # fmt: skip
        old = begin - low
        inside, earlier = there[:, None] & fits[None, :], (j < old)[:, None]
        rows_at = h * V + j[:, None] * wide + cols[None, :]
        u = tl.load(v_ptr + row * wide + rows_at, mask=inside & (j >= old)[:, None], other=0.0)
        held = tl.load(u_pages + page * C * wide + rows_at, mask=inside & earlier, other=0.0)
        if DELTA:
            solved_ptr = open_ptr + (page * HV + h) * (2 * K * V)
            solved_ptr = _either(
                stop < low + C, solved_ptr, full_ptr + (place * HV + h) * (C * C), K * V % 4 == 0
            )
            solved = tl.load(
                solved_ptr + j[:, None] * C + j[None, :], mask=there[:, None] & (j < C)[None, :],
                other=0.0,
            )  # fmt: skip
        p = position + r
        i, new = p - low, (p >= begin) & (p < stop)
        reach = new[:, None] & (j[None, :] <= i[:, None])
        if CHANNELS:
            to = (place * HV + h) * (C * K) + d[None, :]
            k = tl.load(
                k_since + to + j[:, None] * K, mask=there[:, None] & ~earlier & (d < K)[None, :],
                other=0.0,
            )  # fmt: skip
            q = tl.load(
                q_since + to + i[:, None] * K, mask=new[:, None] & (d < K)[None, :], other=0.0
            )
            a = tl.load(
                a_ptr + ((p + shift)[:, None] * HV + h) * C + j[None, :], mask=reach, other=0.0
            )
            o = tl.dot(q, state)
        else:
            q = tl.load(
                q_ptr + (p + shift)[:, None] * keys_wide + kh + d[None, :],
                mask=new[:, None] & (d < K)[None, :], other=0.0,
            )  # fmt: skip
            decays = g_pages + page * C * HV + h
            g_i = tl.load(decays + i * HV, mask=new, other=0.0)
            g_j = tl.load(decays + j * HV, mask=there, other=0.0)
            e = tl.exp2(tl.where(reach, g_i[:, None] - g_j[None, :], 0.0) * LOG2E)
            a = tl.where(reach, tl.dot(q, tl.trans(k)) * e, 0.0).to(dtype)
            o = tl.dot(q, state) * tl.exp2(g_i * LOG2E)[:, None]
        if DELTA:
            if CHANNELS:
                left = u.to(tl.float32) - tl.dot(k, state)
            else:
                left = u.to(tl.float32) - tl.exp2(g_j * LOG2E)[:, None] * tl.dot(k, state)
            u = tl.where(earlier, held, left.to(dtype))
            mine = (j >= old) & (low + j >= position) & (low + j < position + M)
            keep = inside & mine[:, None] & (stop < low + C)
            tl.store(u_pages + page * C * wide + rows_at, u, mask=keep)
            u = tl.dot(solved, u).to(dtype)
        else:
            u = tl.where(earlier, held, u)
        o = tl.dot(a, u, o)
        tl.store(
            o_ptr + ((p + shift)[:, None] * HV + h) * V + cols[None, :], o,
            mask=new[:, None] & fits[None, :],
        )  # fmt: skip
