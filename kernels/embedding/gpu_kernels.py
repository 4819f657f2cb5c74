"""Triton kernels of the embedding's backward: no atomics, one defined order.

Tokens are sorted by id (stable, so ascending inside an id). The occurrences of an id are cut into
runs of RUN from its first one; a run is summed ascending in fp32 from +0, runs are added ascending,
and the sum is rounded once. Which program does a run is schedule; how often an id occurs elsewhere
does not matter.

Legend: T tokens, H columns; ``order`` sorted position -> token, ``ids`` sorted ids, ``first`` the
position of each id's first occurrence.
"""

import triton
import triton.language as tl


@triton.jit
def embedding_gather_kernel(ids_ptr, w_ptr, out_ptr, V, H, BH: tl.constexpr):
    """One row, BH columns; an id outside the table gives NaN."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BH + tl.arange(0, BH)
    token = tl.load(ids_ptr + row).to(tl.int64)
    inside = (token >= 0) & (token < V)
    w = tl.load(w_ptr + token * H + cols, mask=(cols < H) & inside, other=float("nan"))
    tl.store(out_ptr + row * H + cols, w, mask=cols < H)


@triton.jit
def _slot(start, short, T, RUN: tl.constexpr):
    """Scratch row of a run: full runs start RUN apart or more; so do an id's short last runs."""
    slot = (start + RUN - 1) // RUN
    return tl.where(short, slot + (T + RUN - 1) // RUN, slot).to(tl.int64)


@triton.jit
def embedding_runs_kernel(
    dy_ptr,
    order_ptr,
    ids_ptr,
    first_ptr,
    part_ptr,
    dw_ptr,
    T,
    H,
    V,
    RUN: tl.constexpr,
    BH: tl.constexpr,
):
    """Positions that start a run sum it: to dw if it is the id's only run, else to scratch."""
    start = tl.program_id(0)
    token = tl.load(ids_ptr + start)
    first = tl.load(first_ptr + start)
    if ((start - first) % RUN != 0) | (token < 0) | (token >= V):
        return
    cols = tl.program_id(1) * BH + tl.arange(0, BH)
    mask = cols < H
    acc = tl.zeros((BH,), tl.float32)
    stop = start
    alive = start < T
    while alive:
        row = tl.load(order_ptr + stop)
        acc += tl.load(dy_ptr + row.to(tl.int64) * H + cols, mask=mask, other=0.0).to(tl.float32)
        stop += 1
        alive = (stop < T) & (stop < start + RUN)
        if alive:
            alive = tl.load(ids_ptr + stop) == token
    more = stop < T
    if more:
        more = tl.load(ids_ptr + stop) == token
    if (start == first) & (more == 0):
        tl.store(dw_ptr + token.to(tl.int64) * H + cols, acc.to(dw_ptr.dtype.element_ty), mask=mask)
    else:
        slot = _slot(start, stop - start < RUN, T, RUN)
        tl.store(part_ptr + slot * H + cols, acc, mask=mask)


@triton.jit
def embedding_combine_kernel(
    ids_ptr,
    first_ptr,
    part_ptr,
    dw_ptr,
    T,
    H,
    V,
    RUN: tl.constexpr,
    BH: tl.constexpr,
):
    """Ids with several runs: add them ascending. Only multiples of RUN can be the last of a first
    run.
    """
    probe = (tl.program_id(0) + 1) * RUN
    if probe >= T:
        return
    first = tl.load(first_ptr + probe)
    # exactly one probe of an id lies in [first + 1, first + RUN]; that one works
    if (first == probe) | (probe - first > RUN):
        return
    token = tl.load(ids_ptr + probe)
    if (first + RUN >= T) | (token < 0) | (token >= V):
        return
    if tl.load(ids_ptr + first + RUN) != token:
        return
    cols = tl.program_id(1) * BH + tl.arange(0, BH)
    mask = cols < H
    acc = tl.zeros((BH,), tl.float32)
    start = first
    alive = first < T
    while alive:
        last = start + RUN - 1
        short = last >= T
        if short == 0:
            short = tl.load(ids_ptr + last) != token
        slot = _slot(start, short, T, RUN)
        acc += tl.load(part_ptr + slot * H + cols, mask=mask, other=0.0)
        start += RUN
        alive = start < T
        if alive:
            alive = tl.load(ids_ptr + start) == token
    tl.store(dw_ptr + token.to(tl.int64) * H + cols, acc.to(dw_ptr.dtype.element_ty), mask=mask)
