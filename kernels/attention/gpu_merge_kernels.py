"""Triton program that merges the chunks of a row, ascending (see ``gpu_kernels.py``)."""

# ruff: noqa: E741  (l is the denominator's usual name)
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .gpu_kernels import _finish, _merge


@triton.jit
def attention_merge_kernel(
    part_ptr,
    part_m_ptr,
    part_l_ptr,
    o_ptr,
    lse_ptr,
    sink_ptr,
    query_start_ptr,
    split_start_ptr,
    HK,
    stride_ot,
    stride_lse,
    G: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    HAS_SINK: tl.constexpr,
    UNROLL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge the partials of one request and query head, chunks ascending; one needs no merge."""
    if DEPENDENT:  # all wait: the next launch knows of this one alone, and split must have ended
        gdc_wait()
    b = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(split_start_ptr + b)
    last = tl.load(split_start_ptr + b + 1)
    if last - first < 2:
        return
    query_start = tl.load(query_start_ptr + b)
    dims = tl.arange(0, BD)
    one = tl.arange(0, 1)
    for token in range(0, tl.load(query_start_ptr + b + 1) - query_start):
        lane = token * G + head % G
        total_m = tl.full((1,), float("-inf"), tl.float32)
        total_l = tl.zeros((1,), tl.float32)
        total_acc = tl.zeros((1, BD), tl.float32)
        for base in range(first, last, UNROLL):
            for i in tl.static_range(UNROLL):
                item = base + i
                slot = ((one.to(tl.int64) + item) * HK + head // G) * BM + lane
                live = item + one < last
                m = tl.load(part_m_ptr + slot, mask=live, other=float("-inf"))
                l = tl.load(part_l_ptr + slot, mask=live, other=0.0)
                acc = tl.load(
                    part_ptr + slot[:, None] * BD + dims[None, :], mask=live[:, None], other=0.0
                )
                total_m, total_l, total_acc = _merge(total_m, total_l, total_acc, m, l, acc)
        sink = tl.zeros((1,), tl.float32)
        if HAS_SINK:
            sink = tl.load(sink_ptr + head + one).to(tl.float32)
        o, lse = _finish(total_m, total_l, total_acc, sink, HAS_SINK)
        row = (query_start + token).to(tl.int64)
        tl.store(
            o_ptr + row * stride_ot + head * D + dims[None, :] + one[:, None],
            o.to(o_ptr.dtype.element_ty),
            mask=(dims < D)[None, :],
        )
        tl.store(lse_ptr + head * stride_lse + row + one, lse)
