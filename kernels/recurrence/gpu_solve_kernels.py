"""Triton programs of the delta rules' T = (1 + beta B)^-1 beta, chunks side by side.

``recurrence_solve_kernel``, a program per chunk and head: by substitution, b_ij = e_ij (k_i . k_j)
for j < i: blocks of 16 rows, earlier blocks by matrix units, the block's own rows in order in fp32.

Legend: as in :mod:`.gpu_block_kernels`.
"""

import triton
import triton.language as tl

from .gpu_block_kernels import LOG2E, _either, _tile


@triton.jit
def _reopen(kept, solved, j, old, C: tl.constexpr):
    """T of the rows before this call, for a chunk that becomes full."""
    at = j[:, None] * C + j[None, :]
    mask = (j < old)[:, None] & (j < C)[None, :]
    tl.store(solved + at, tl.load(kept + at, mask=mask, other=0.0), mask=mask)
    tl.debug_barrier()


@triton.jit
def _pairs(y, N: tl.constexpr, CP: tl.constexpr):
    return tl.split(tl.reshape(y, (CP, N // 2, 2)))


@triton.jit
def _sixteen(x, CP: tl.constexpr):
    """[16, CP] as its rows."""
    x0, x1 = _pairs(tl.trans(x), 16, CP)
    x00, x10 = _pairs(x0, 8, CP)
    x01, x11 = _pairs(x1, 8, CP)
    x000, x100 = _pairs(x00, 4, CP)
    x010, x110 = _pairs(x10, 4, CP)
    x001, x101 = _pairs(x01, 4, CP)
    x011, x111 = _pairs(x11, 4, CP)
    r0, r8 = tl.split(x000)
    r4, r12 = tl.split(x100)
    r2, r10 = tl.split(x010)
    r6, r14 = tl.split(x110)
    r1, r9 = tl.split(x001)
    r5, r13 = tl.split(x101)
    r3, r11 = tl.split(x011)
    r7, r15 = tl.split(x111)
    return r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14, r15


@triton.jit
def _substitute(
    solved, near_ptr, far, near, beta, at, old, last, C: tl.constexpr, CP: tl.constexpr
):
    """Rows ``at`` to ``at`` + 15 of T from those before; far [16, CP], near [16, 16] = beta B.

    near_ptr: where near lies for scalar loads. A thread has all rows of its columns.
    """
    j, r = tl.arange(0, CP), tl.arange(0, 16)
    i, before, own = at + r, j < at, (j < C)[None, :]
    dtype = far.dtype
    tl.store(near_ptr + r[:, None] * 16 + r[None, :], near)
    earlier = tl.load(
        solved + j[:, None] * C + j[None, :], mask=before[:, None] & own, other=0.0
    )  # fmt: skip
    x = tl.where(j[None, :] == i[:, None], 1.0, 0.0) - tl.dot(far, earlier)
    line = i[:, None] * C + j[None, :]
    was = tl.load(solved + line, mask=(i < old)[:, None] & own, other=0.0).to(tl.float32)
    rows = _sixteen(tl.where((i < old)[:, None], was, beta[:, None] * x), CP)
    tl.debug_barrier()  # other threads read ``near_ptr``
    done = ()
    for s in tl.static_range(16):
        mine = rows[s]
        for t in tl.static_range(s):
            mine = mine - tl.load(near_ptr + s * 16 + t) * done[t]
        done += (mine.to(dtype).to(tl.float32),)
    for s in tl.static_range(16):
        new = (at + s >= old) & (at + s < last) & (j < C)
        tl.store(solved + (at + s) * C + j, done[s].to(dtype), mask=new)
    tl.debug_barrier()  # other threads read these rows from here on


@triton.jit(do_not_specialize=["widest", "B"])
def recurrence_solve_kernel(
    k_ptr, beta_ptr, near_ptr, k_pages, g_pages, open_ptr, full_ptr, owner_ptr, ends_ptr,
    start_ptr, length_ptr, table_ptr, widest, B, HK, HV, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """New rows of T, C columns each, bf16: into ``full`` [n, HV, C, C] or ``open``, end pages."""
    n = tl.program_id(1)
    h = tl.program_id(0)
    live, request, low, begin, stop, shift = _tile(
        n, owner_ptr, ends_ptr, start_ptr, length_ptr, B, C
    )
    if live:
        dtype = open_ptr.dtype.element_ty
        page = tl.load(table_ptr + request * widest + low // C).to(tl.int64)
        wide = HK * K
        keys = _either(
            begin <= low, k_ptr + (low + shift) * wide, k_pages + page * C * wide, K % 8 == 0
        )
        keys += h // (HV // HK) * K
        j, d, r = tl.arange(0, CP), tl.arange(0, KP), tl.arange(0, 16)
        there = (j < C) & (low + j < stop)
        keys_t = tl.load(
            keys + j[None, :] * wide + d[:, None], mask=there[None, :] & (d < K)[:, None], other=0.0
        )
        decays = g_pages + page * C * HV + h
        g_j = tl.load(decays + j * HV, mask=there, other=0.0)
        kept = open_ptr + (page * HV + h) * (2 * K * V)
        solved = full_ptr + (n.to(tl.int64) * HV + h) * (C * C)
        solved = _either(stop < low + C, kept, solved, K * V % 4 == 0)
        factors = near_ptr + (n.to(tl.int64) * HV + h) * 256
        old, last = tl.maximum(begin - low, 0).to(tl.int32), tl.minimum(stop - low, C).to(tl.int32)
        if (old > 0) & (stop >= low + C):
            _reopen(kept, solved, j, old, C)
        for at in range(old // 16 * 16, last, 16):
            i = at + r
            new = (i >= old) & (i < last)
            k = tl.load(
                keys + i[:, None] * wide + d[None, :], mask=(i < last)[:, None] & (d < K)[None, :],
                other=0.0,
            )  # fmt: skip
            g_i = tl.load(decays + i * HV, mask=i < last, other=0.0)
            beta = tl.load(beta_ptr + (low + shift + i) * HV + h, mask=new, other=0.0)
            before = j < at
            e = tl.exp2(tl.where(before[None, :], g_i[:, None] - g_j[None, :], 0.0) * LOG2E)
            far = tl.where(before[None, :], tl.dot(k, keys_t) * e, 0.0).to(dtype)
            g_r = tl.load(decays + i * HV, mask=i < last, other=0.0)
            under = (r[:, None] > r[None, :]) & new[:, None]
            e = tl.exp2(tl.where(under, g_i[:, None] - g_r[None, :], 0.0) * LOG2E)
            near = tl.where(under, tl.dot(k, tl.trans(k)) * e, 0.0) * beta[:, None]
            _substitute(solved, factors, far, near, beta, at, old, last, C, CP)
