"""Triton programs of the recurrences on matrix units: rows in blocks of 16, by position.

A block is the 16 rows at positions 16 n to 16 n + 15 of a request, wherever a call begins or ends;
every product has a block for its M, so decode runs prefill's instructions with fewer live rows.

``recurrence_rows_kernel`` puts k and G, the running sum of log decays from the chunk's start, on
pages. ``recurrence_block_weights_kernel``, a program per block and value head: a_ij = e_ij (q_i .
k_j), b_ij = e_ij (k_i . k_j), e_ij = exp2((G_i - G_j) log2 e). ``recurrence_block_kernel``, a
program per request, value head and BV columns, takes the blocks in order with S [K, BV] in
registers: X = v - w (k S) - B U, the block's own rows by substitution in order, o = w (q S) + A U;
when a chunk is full S' = w_last S + k' (e U), once.

Operands of products are bf16 (S, a, b, u rounded), sums fp32. Legend: as in :mod:`.gpu_kernels`;
N blocks of a call, C a multiple of 16.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _place(n, owner_ptr, ends_ptr, start_ptr, length_ptr, B):
    """(live, request, first position, new rows from, up to, the call's row less the position)"""
    request = tl.load(owner_ptr + n).to(tl.int64)
    live = request < B
    request = tl.where(live, request, 0)
    first = tl.load(start_ptr + request).to(tl.int64)
    last = tl.load(start_ptr + request + 1).to(tl.int64)
    stop = tl.load(length_ptr + request).to(tl.int64)
    begin = stop - (last - first)
    ends = tl.load(ends_ptr + request).to(tl.int64)
    blocks = (stop + 15) // 16 - begin // 16
    block = begin // 16 + n - (ends - blocks)
    return live, request, block * 16, begin, stop, first - begin


@triton.jit
def recurrence_rows_kernel(
    k_ptr, g_ptr, k_pages, g_pages, owner_ptr, ends_ptr, start_ptr, length_ptr, table_ptr, widest,
    B, HV, KW, C: tl.constexpr, HP: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """k rows of a block to their page; the first block of a chunk's new rows sums their decays."""
    n = tl.program_id(0)
    live, request, position, begin, stop, shift = _place(
        n, owner_ptr, ends_ptr, start_ptr, length_ptr, B
    )
    if live:
        page = tl.load(table_ptr + request * widest + position // C).to(tl.int64)
        p = position + tl.arange(0, 16)
        new = (p >= begin) & (p < stop)
        for at in range(0, KW, KB):
            cols = at + tl.arange(0, KB)
            mask = new[:, None] & (cols < KW)[None, :]
            k = tl.load(k_ptr + (p + shift)[:, None] * KW + cols[None, :], mask=mask, other=0.0)
            tl.store(k_pages + (page * C + p % C)[:, None] * KW + cols[None, :], k, mask=mask)
        if (position % C == 0) | (position <= begin):
            head = tl.arange(0, HP)
            fits = head < HV
            row = tl.maximum(position, begin)
            base = page * C
            total = tl.load(
                g_pages + (base + row % C - 1) * HV + head, mask=fits & (row % C > 0), other=0.0
            )
            until = tl.minimum(stop, position // C * C + C)
            for each in range(row, until):
                total += tl.load(g_ptr + (each + shift) * HV + head, mask=fits, other=0.0)
                tl.store(g_pages + (base + each % C) * HV + head, total, mask=fits)


@triton.jit
def recurrence_block_weights_kernel(
    q_ptr, k_pages, g_pages, a_ptr, b_ptr, w_ptr, owner_ptr, ends_ptr, start_ptr, length_ptr,
    table_ptr, widest, B, HK, HV, K, C: tl.constexpr, CP: tl.constexpr, DELTA: tl.constexpr,
    KP: tl.constexpr,
):  # fmt: skip
    """a bf16, b fp32 [T, HV, C] (b for DELTA), w fp32 [T, HV]."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    live, request, position, begin, stop, shift = _place(
        n, owner_ptr, ends_ptr, start_ptr, length_ptr, B
    )
    if live:
        kh = h // (HV // HK)
        page = tl.load(table_ptr + request * widest + position // C).to(tl.int64)
        p = position + tl.arange(0, 16)
        new = (p >= begin) & (p < stop)
        i, j, d = p % C, tl.arange(0, CP), tl.arange(0, KP)
        there = (j < C) & (position // C * C + j < stop)
        row = p + shift
        keys = tl.load(
            k_pages + ((page * C + j)[None, :] * HK + kh) * K + d[:, None],
            mask=there[None, :] & (d < K)[:, None], other=0.0,
        )  # fmt: skip
        g_j = tl.load(g_pages + (page * C + j) * HV + h, mask=there, other=0.0)
        g_i = tl.load(g_pages + (page * C + i) * HV + h, mask=new, other=0.0)
        fits = new[:, None] & (d < K)[None, :]
        q = tl.load(q_ptr + (row[:, None] * HK + kh) * K + d[None, :], mask=fits, other=0.0)
        reach = new[:, None] & (j[None, :] <= i[:, None])
        e = tl.exp2(tl.where(reach, g_i[:, None] - g_j[None, :], 0.0) * LOG2E)
        at = (row[:, None] * HV + h) * C + j[None, :]
        written = new[:, None] & (j < C)[None, :]
        a = tl.where(reach, tl.dot(q, keys) * e, 0.0)
        tl.store(a_ptr + at, a.to(a_ptr.dtype.element_ty), mask=written)
        if DELTA:
            k = tl.load(
                k_pages + ((page * C + i)[:, None] * HK + kh) * K + d[None, :], mask=fits, other=0.0
            )
            b = tl.where(reach & (j[None, :] < i[:, None]), tl.dot(k, keys) * e, 0.0)
            tl.store(b_ptr + at, b, mask=written)
        tl.store(w_ptr + row * HV + h, tl.exp2(g_i * LOG2E), mask=new)


@triton.jit
def recurrence_block_kernel(
    q_ptr, v_ptr, beta_ptr, a_ptr, b_ptr, w_ptr, k_pages, u_pages, g_pages, end_pages, start_ptr,
    length_ptr, table_ptr, o_ptr, widest, HK, HV, K, V, C: tl.constexpr, CP: tl.constexpr,
    DELTA: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """o fp32 [T, HV, V]; u of the new rows and the end states of chunks that become full."""
    request = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1)
    kh = h // (HV // HK)
    cols = tl.program_id(0) * BV + tl.arange(0, BV)
    d, j, r = tl.arange(0, KP), tl.arange(0, CP), tl.arange(0, 16)
    dtype = v_ptr.dtype.element_ty
    first = tl.load(start_ptr + request).to(tl.int64)
    stop = tl.load(length_ptr + request).to(tl.int64)
    begin = stop - (tl.load(start_ptr + request + 1).to(tl.int64) - first)
    shift = first - begin
    table = table_ptr + request * widest
    fits, live = cols < V, (d < K)[:, None] & (cols < V)[None, :]
    state_at = d[:, None] * V + cols[None, :]
    carried = (begin >= C) & (stop > begin)
    before = tl.load(table + begin // C - 1, mask=carried, other=0).to(tl.int64)
    state_from = end_pages + (before * HV + h) * K * V
    state = tl.load(state_from + state_at, mask=live & carried, other=0.0)
    for position in range(begin // 16 * 16, stop, 16):
        page = tl.load(table + position // C).to(tl.int64)
        r0 = position % C
        p = position + r
        new, old = (p >= begin) & (p < stop), p < begin
        row = p + shift
        own, held = new[:, None] & fits[None, :], (j < r0)[:, None] & fits[None, :]
        wide = new[:, None] & (d < K)[None, :]
        rounded = state.to(dtype)
        q = tl.load(q_ptr + (row[:, None] * HK + kh) * K + d[None, :], mask=wide, other=0.0)
        u_base = u_pages + page * C * HV * V + h * V
        u_at = (r0 + r)[:, None] * HV * V + cols[None, :]
        u = tl.load(u_base + j[:, None] * HV * V + cols[None, :], mask=held, other=0.0)
        back = new[:, None] & (j < r0)[None, :]
        line = (row[:, None] * HV + h) * C
        w = tl.load(w_ptr + row * HV + h, mask=new, other=0.0)[:, None]
        x = tl.load(v_ptr + (row[:, None] * HV + h) * V + cols[None, :], mask=own, other=0.0)
        if DELTA:
            k = tl.load(
                k_pages + ((page * C + r0 + r)[:, None] * HK + kh) * K + d[None, :],
                mask=wide, other=0.0,
            )  # fmt: skip
            b = tl.load(b_ptr + line + j[None, :], mask=back, other=0.0).to(dtype)
            near = tl.load(b_ptr + line + r0 + r[None, :], mask=new[:, None], other=0.0)
            beta = tl.load(beta_ptr + row * HV + h, mask=new, other=0.0)
            left = x.to(tl.float32) - w * tl.dot(k, rounded) - tl.dot(b, u)
            kept = tl.load(u_base + u_at, mask=old[:, None] & fits[None, :], other=0.0)
            left = tl.where(old[:, None], kept.to(tl.float32), left)
            for s in tl.static_range(16):
                this = (r == s)[:, None]
                mine = tl.sum(tl.where(this, left, 0.0), 0)  # one row, the rest zeros
                strength = tl.sum(tl.where(r == s, tl.where(new, beta, 1.0), 0.0), 0)
                mine = (mine * strength).to(dtype).to(tl.float32)
                factor = tl.sum(tl.where((r == s)[None, :], near, 0.0), 1)
                after = new[:, None] & (r > s)[:, None]
                left = tl.where(this, mine[None, :], left)
                left = tl.where(after, left - factor[:, None] * mine[None, :], left)
            fresh = left.to(dtype)
        else:
            kept = tl.load(u_base + u_at, mask=old[:, None] & fits[None, :], other=0.0)
            fresh = tl.where(old[:, None], kept, x)
        tl.store(u_base + u_at, fresh, mask=own)
        a = tl.load(a_ptr + line + j[None, :], mask=back, other=0.0)
        close = tl.load(a_ptr + line + r0 + r[None, :], mask=new[:, None], other=0.0)
        live_rows = (new | old)[:, None]
        fresh = tl.where(live_rows, fresh, tl.zeros_like(fresh))
        o = w * tl.dot(q, rounded) + tl.dot(a, u) + tl.dot(close, fresh)
        tl.store(o_ptr + (row[:, None] * HV + h) * V + cols[None, :], o, mask=own)
        tl.debug_barrier()  # the block's rows of u are read by other threads from here on
        if (r0 == C - 16) & (position + 16 <= stop):
            whole = (j < C)[:, None]
            decays = tl.load(g_pages + (page * C + j) * HV + h, mask=j < C, other=0.0)
            last = tl.load(g_pages + (page * C + C - 1) * HV + h)
            e = tl.exp2((last - decays) * LOG2E)[:, None]
            all_u = tl.load(
                u_base + j[:, None] * HV * V + cols[None, :], mask=whole & fits[None, :], other=0.0
            )
            keys = tl.load(
                k_pages + ((page * C + j)[None, :] * HK + kh) * K + d[:, None],
                mask=(j < C)[None, :] & (d < K)[:, None], other=0.0,
            )  # fmt: skip
            state = tl.exp2(last * LOG2E) * state
            state = state + tl.dot(keys, (all_u.to(tl.float32) * e).to(dtype))
            tl.store(end_pages + (page * HV + h) * K * V + state_at, state, mask=live)
