"""Triton programs of recurrences for few new rows, as in decode, with the bits of whole chunks.

``recurrence_rows_kernel``, a program per chunk and head, takes its new rows in order: of T, of a,
and, where decays are per channel, of k and q decayed since the chunk's start. A row is the first
of a tile of 16 in the same matrix instructions, and subtracts the rows of its own block of 16 in
the same order; ``recurrence_scores_kernel`` has a alone, for all heads of a key head.
``recurrence_replay_kernel``, a program per chunk, head and BV columns, reads R of
earlier rows, makes its rows' own, then U = T R and o.

Legend: as in :mod:`.gpu_block_kernels`.
"""

import triton
import triton.language as tl

from ..gpu.tree import row_sum
from .gpu_block_kernels import LOG2E, _either, _reopen, _tile


@triton.jit(do_not_specialize=["widest", "B"])
def recurrence_rows_kernel(
    q_ptr, k_ptr, beta_ptr, a_ptr, decayed_ptr, k_pages, g_pages, open_ptr, full_ptr, owner_ptr,
    ends_ptr, start_ptr, length_ptr, table_ptr, widest, B, HK, HV, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, CHANNELS: tl.constexpr, KP: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """T as ``recurrence_solve_kernel`` leaves it; bf16 a [T, HV, C] and k, q [T, HV, 2, K]."""
    n = tl.program_id(1)
    h = tl.program_id(0)
    live, request, low, begin, stop, shift = _tile(
        n, owner_ptr, ends_ptr, start_ptr, length_ptr, B, C
    )
    if live:
        dtype = open_ptr.dtype.element_ty
        page = tl.load(table_ptr + request * widest + low // C).to(tl.int64)
        wide, kh = HK * K, h // (HV // HK) * K
        keys = kh + _either(
            begin <= low, k_ptr + (low + shift) * wide, k_pages + page * C * wide, K % 8 == 0
        )
        j, d, r = tl.arange(0, CP), tl.arange(0, KP), tl.arange(0, 16)
        kept = open_ptr + (page * HV + h) * (2 * K * V)
        solved = full_ptr + (n.to(tl.int64) * HV + h) * (C * C)
        solved = _either(stop < low + C, kept, solved, K * V % 4 == 0)
        old, last = tl.maximum(begin - low, 0).to(tl.int32), tl.minimum(stop - low, C).to(tl.int32)
        if (old > 0) & (stop >= low + C):
            _reopen(kept, solved, j, old, C)
        for i in range(old, last):
            at = i // 16 * 16
            row = low + shift + i
            whole = d < K
            k = tl.load(k_ptr + row * wide + kh + d, mask=whole, other=0.0)
            q = tl.load(q_ptr + row * wide + kh + d, mask=whole, other=0.0)
            beta = tl.load(beta_ptr + row * HV + h)
            before = j < at
            both = tl.where((r == 0)[:, None], k[None, :], 0.0).to(dtype)
            both = tl.where((r == 1)[:, None], q[None, :], both).to(dtype)
            if CHANNELS:
                deep = HV * K
                decays = g_pages + (page * C * HV + h) * K + d
                g_i = tl.load(decays + i * deep, mask=whole, other=0.0)
                ended = tl.load(decays + (at - 1) * deep, mask=whole & (at > 0), other=0.0)
                mask = before[:, None] & whole[None, :]
                k_j = tl.load(keys + j[:, None] * wide + d[None, :], mask=mask, other=0.0)
                g_j = tl.load(decays[None, :] + j[:, None] * deep, mask=mask, other=0.0)
                mask = (at + r <= i)[:, None] & whole[None, :]
                k_r = tl.load(keys + (at + r)[:, None] * wide + d[None, :], mask=mask, other=0.0)
                g_r = tl.load(decays[None, :] + (at + r)[:, None] * deep, mask=mask, other=0.0)
                since = tl.where(before[:, None] & whole[None, :], ended[None, :] - g_j, 0.0)
                k_j = (k_j.to(tl.float32) * tl.exp2(since * LOG2E)).to(dtype)
                until = tl.exp2((g_i - ended) * LOG2E)
                both = (both.to(tl.float32) * until[None, :]).to(dtype)
                pair = tl.dot(both, tl.trans(k_j))
                b = tl.sum(tl.where((r == 0)[:, None], pair, 0.0), 0)  # one row, the rest zeros
                a = tl.sum(tl.where((r == 1)[:, None], pair, 0.0), 0)
                moved = k_r.to(tl.float32) * tl.exp2(
                    tl.where(mask, g_i[None, :] - g_r, 0.0) * LOG2E
                )
                upto = (at + r <= i)[:, None]
                near = row_sum(
                    tl.where(upto, moved * k.to(tl.float32)[None, :], 0.0), 16, KP, VEC
                )
                close = row_sum(
                    tl.where(upto, moved * q.to(tl.float32)[None, :], 0.0), 16, KP, VEC
                )
                near = tl.where(at + r < i, near, 0.0) * beta
                to = a_ptr + (row * HV + h) * C
                tl.store(to + j, a.to(dtype), mask=before)
                tl.store(to + at + r, close.to(dtype), mask=at + r <= i)
                w = tl.exp2(g_i * LOG2E)
                to = decayed_ptr + (row * HV + h) * (2 * K) + d
                tl.store(to, (k.to(tl.float32) * w).to(dtype), mask=whole)
                tl.store(to + K, (q.to(tl.float32) * w).to(dtype), mask=whole)
                far = tl.where(before, b, 0.0).to(dtype)
            else:
                mask = (j <= i)[None, :] & whole[:, None]
                keys_t = tl.load(keys + j[None, :] * wide + d[:, None], mask=mask, other=0.0)
                decays = g_pages + page * C * HV + h
                g_j = tl.load(decays + j * HV, mask=j <= i, other=0.0)
                g_i = tl.load(decays + i * HV)
                pair = tl.dot(both, keys_t)
                e = tl.exp2(tl.where(j <= i, g_i - g_j, 0.0) * LOG2E)
                b = tl.sum(tl.where((r == 0)[:, None], pair, 0.0), 0) * e
                a = tl.sum(tl.where((r == 1)[:, None], pair, 0.0), 0) * e
                tl.store(a_ptr + (row * HV + h) * C + j, a.to(dtype), mask=j <= i)
                near = tl.where((j >= at) & (j < i), b, 0.0) * beta
                far = tl.where(before, b, 0.0).to(dtype)
            earlier = tl.load(
                solved + j[:, None] * C + j[None, :], mask=before[:, None] & (j < C)[None, :],
                other=0.0,
            )  # fmt: skip
            far_rows = tl.where((r == 0)[:, None], far[None, :], 0.0).to(dtype)
            sums = tl.dot(far_rows, earlier)
            sums = tl.sum(tl.where((r == 0)[:, None], sums, 0.0), 0)
            x = beta * (tl.where(j == i, 1.0, 0.0) - sums)
            for s in tl.static_range(15):
                mine = tl.load(solved + (at + s) * C + j, mask=(at + s < i) & (j < C), other=0.0)
                if CHANNELS:
                    factor = tl.sum(tl.where(r == s, near, 0.0), 0)
                else:
                    factor = tl.sum(tl.where(j == at + s, near, 0.0), 0)
                x = x - factor * mine.to(tl.float32)
            tl.store(solved + i * C + j, x.to(dtype), mask=j < C)
            tl.debug_barrier()  # other threads read this row from here on


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
    q_ptr, k_ptr, v_ptr, a_ptr, u_pages, g_pages, end_pages, open_ptr, full_ptr, owner_ptr,
    ends_ptr, start_ptr, length_ptr, table_ptr, o_ptr, widest, B, HK, HV, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, DELTA: tl.constexpr,
    CHANNELS: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """o fp32 [T, HV, V], 16 new rows of a chunk at once; CHANNELS: of q and k decayed before."""
    h = tl.program_id(1)
    n = tl.program_id(2)
    live, request, low, begin, stop, shift = _tile(
        n, owner_ptr, ends_ptr, start_ptr, length_ptr, B, C
    )
    if live:
        dtype = v_ptr.dtype.element_ty
        table = table_ptr + request * widest + low // C
        before = tl.load(table - 1, mask=low > 0, other=0).to(tl.int64)
        page = tl.load(table).to(tl.int64)
        cols = tl.program_id(0) * BV + tl.arange(0, BV)
        d, j, r = tl.arange(0, KP), tl.arange(0, CP), tl.arange(0, 16)
        fits, whole = cols < V, (d < K)[None, :]
        state = tl.load(
            end_pages + (before * HV + h) * (K * V) + d[:, None] * V + cols[None, :],
            mask=(d < K)[:, None] & fits[None, :] & (low > 0), other=0.0,
        ).to(dtype)  # fmt: skip
        old, last = tl.maximum(begin - low, 0).to(tl.int32), tl.minimum(stop - low, C).to(tl.int32)
        open_now = stop < low + C
        wide, keys_wide, kh = HV * V, HK * K, h // (HV // HK) * K
        kept = u_pages + page * C * wide + h * V + cols[None, :]
        held = old if DELTA else last  # pages hold all rows of v already
        left = tl.load(
            kept + j[:, None] * wide, mask=(j < held)[:, None] & fits[None, :], other=0.0
        )
        if DELTA:
            solved_ptr = _either(
                open_now, open_ptr + (page * HV + h) * (2 * K * V),
                full_ptr + (n.to(tl.int64) * HV + h) * (C * C), K * V % 4 == 0,
            )  # fmt: skip
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
