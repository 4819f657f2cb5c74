"""Triton program of KDA's substitution on matrix units, whose decays are per channel.

b_ij = sum over d of k_id k_jd exp2((G_id - G_jd) log2 e), and a_ij of q_id k_jd. Rows j of earlier
blocks of 16 by matrix units, both sides decayed to G at the end of the block before i's, in bf16;
rows of i's own block in fp32, one row i at a time: exponents are never positive. Sums over d by
``row_sum``. The rest is :func:`.gpu_solve_kernels._substitute`.
"""

import triton
import triton.language as tl

from ..gpu.tree import row_sum
from .gpu_block_kernels import LOG2E, _either, _tile
from .gpu_solve_kernels import _reopen, _substitute


@triton.jit
def _row(q_rows, keys, decays, row, wide, deep, d, mask):
    q = tl.load(q_rows + row * wide + d, mask=mask, other=0.0)
    k = tl.load(keys + row * wide + d, mask=mask, other=0.0)
    g = tl.load(decays + row * deep + d, mask=mask, other=0.0)
    return q.to(tl.float32), k.to(tl.float32), g


@triton.jit(do_not_specialize=["widest", "B"])
def recurrence_solve_channels_kernel(
    q_ptr, k_ptr, beta_ptr, near_ptr, a_ptr, q_since, k_since, k_until, k_pages, g_pages, open_ptr,
    full_ptr, owner_ptr, ends_ptr, start_ptr, length_ptr, table_ptr, widest, B, HK, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, KP: tl.constexpr,
    VEC: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """New rows of T as ``recurrence_solve_kernel`` leaves them, of a bf16 [T, HV, C], and, bf16
    [n, HV, C, K], of q and k decayed since the chunk's start and of k until its end."""
    n = tl.program_id(1)
    h = tl.program_id(0)
    live, request, low, begin, stop, shift = _tile(
        n, owner_ptr, ends_ptr, start_ptr, length_ptr, B, C
    )
    if live:
        dtype = open_ptr.dtype.element_ty
        page = tl.load(table_ptr + request * widest + low // C).to(tl.int64)
        wide, deep, kh = HK * K, HV * K, h // (HV // HK) * K
        keys = kh + _either(
            begin <= low, k_ptr + (low + shift) * wide, k_pages + page * C * wide, K % 8 == 0
        )
        decays = g_pages + (page * C * HV + h) * K
        j, d, r = tl.arange(0, CP), tl.arange(0, KP), tl.arange(0, 16)
        whole = (d < K)[None, :]
        kept = open_ptr + (page * HV + h) * (2 * K * V)
        solved = full_ptr + (n.to(tl.int64) * HV + h) * (C * C)
        solved = _either(stop < low + C, kept, solved, K * V % 4 == 0)
        factors = near_ptr + (n.to(tl.int64) * HV + h) * 256
        old, last = tl.maximum(begin - low, 0).to(tl.int32), tl.minimum(stop - low, C).to(tl.int32)
        if (old > 0) & (stop >= low + C):
            _reopen(kept, solved, j, old, C)
        own = (n.to(tl.int64) * HV + h) * (C * K) + d[None, :]
        complete = stop >= low + C
        g_end = tl.load(decays + (C - 1) * deep + d, mask=(d < K) & complete, other=0.0)
        for at in range(0, tl.where(complete, old // 16 * 16, 0), 16):
            i = at + r
            k = tl.load(keys + i[:, None] * wide + d[None, :], mask=whole, other=0.0).to(tl.float32)
            g = tl.load(decays + i[:, None] * deep + d[None, :], mask=whole, other=0.0)
            x = (k * tl.exp2((g_end[None, :] - g) * LOG2E)).to(dtype)
            tl.store(k_until + own + i[:, None] * K, x, mask=whole)
        for at in range(old // 16 * 16, last, 16):
            i = at + r
            there, new = (i < last)[:, None] & whole, (i >= old) & (i < last)
            k = tl.load(keys + i[:, None] * wide + d[None, :], mask=there, other=0.0).to(tl.float32)
            q = tl.load(
                q_ptr + (low + shift + i)[:, None] * wide + kh + d[None, :],
                mask=new[:, None] & whole, other=0.0,
            ).to(tl.float32)  # fmt: skip
            g = tl.load(decays + i[:, None] * deep + d[None, :], mask=there, other=0.0)
            w = tl.exp2(g * LOG2E)
            to = own + i[:, None] * K
            tl.store(k_since + to, (k * w).to(dtype), mask=new[:, None] & whole)
            tl.store(q_since + to, (q * w).to(dtype), mask=new[:, None] & whole)
            left = tl.where(complete, g_end[None, :] - g, 0.0)
            x = (k * tl.exp2(left * LOG2E)).to(dtype)
            tl.store(k_until + to, x, mask=whole & complete)
            beta = tl.load(beta_ptr + (low + shift + i) * HV + h, mask=new, other=0.0)
            ended = tl.load(decays + (at - 1) * deep + d, mask=(d < K) & (at > 0), other=0.0)
            before = (j < at)[:, None] & whole
            k_j = tl.load(keys + j[:, None] * wide + d[None, :], mask=before, other=0.0)
            g_j = tl.load(decays + j[:, None] * deep + d[None, :], mask=before, other=0.0)
            since = tl.where(before, ended[None, :] - g_j, 0.0)
            k_j = (k_j.to(tl.float32) * tl.exp2(since * LOG2E)).to(dtype)
            if ROOM:  # for rows of this block to come, behind T
                to = kept + C * C + j[:, None] * K + d[None, :]
                tl.store(to, k_j, mask=before & (last < at + 16) & (stop < low + C))
            until = tl.exp2(tl.where(there, g - ended[None, :], 0.0) * LOG2E)
            far = tl.dot((k * until).to(dtype), tl.trans(k_j)).to(dtype)
            line = a_ptr + ((low + shift + i)[:, None] * HV + h) * C
            a = tl.dot((q * until).to(dtype), tl.trans(k_j)).to(dtype)
            tl.store(line + j[None, :], a, mask=new[:, None] & (j < at)[None, :])
            near, close = tl.zeros((16, 16), tl.float32), tl.zeros((16, 16), tl.float32)
            start, end = tl.maximum(at, old), tl.minimum(at + 16, last)
            q_rows = q_ptr + (low + shift) * wide + kh
            q_row, k_row, g_row = _row(q_rows, keys, decays, start, wide, deep, d, d < K)
            for row in range(start, end):
                ahead = (d < K) & (row + 1 < end)  # the next row is under way meanwhile
                q_next, k_next, g_next = _row(q_rows, keys, decays, row + 1, wide, deep, d, ahead)
                upto = (i <= row)[:, None]
                moved = k * tl.exp2(tl.where(upto & whole, g_row[None, :] - g, 0.0) * LOG2E)
                mine = (r == row - at)[:, None]
                b_row = row_sum(tl.where(upto, moved * k_row[None, :], 0.0), 16, KP, VEC)
                near = tl.where(mine, b_row[None, :], near)
                a_row = row_sum(tl.where(upto, moved * q_row[None, :], 0.0), 16, KP, VEC)
                close = tl.where(mine, a_row[None, :], close)
                q_row, k_row, g_row = q_next, k_next, g_next
            tl.store(
                line + i[None, :], close.to(dtype), mask=new[:, None] & (r[None, :] <= r[:, None])
            )
            near = tl.where(r[None, :] < r[:, None], near, 0.0) * beta[:, None]
            _substitute(solved, factors, far, near, beta, at, old, last, C, CP)
