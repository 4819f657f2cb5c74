"""Triton program of the causal convolution over pages: a row and a block of channels each.

Taps are added oldest first in one FMA chain, rows of this call come from the call, earlier ones
from their pages, so the order is that of the CPU contract; exp2 is not.

Legend: T rows, C rows per page, D channels, W taps.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def convolution_kernel(
    x_ptr, w_ptr, bias_ptr, pages, slot_ptr, owner_ptr, start_ptr, length_ptr, table_ptr, y_ptr,
    widest, D, C, W: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y [T, D]: oldest tap first from the bias or 0; rounded, then silu; the row goes to its page.

    A negative slot is padding.
    """
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + t)
    if slot < 0:
        return
    request = tl.load(owner_ptr + t).to(tl.int64)
    first = tl.load(start_ptr + request).to(tl.int64)
    rows = tl.load(start_ptr + request + 1).to(tl.int64) - first
    position = tl.load(length_ptr + request).to(tl.int64) - rows + t - first
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    fits = cols < D
    total = tl.zeros((BD,), tl.float32)
    if HAS_BIAS:
        total = total + tl.load(bias_ptr + cols, mask=fits, other=0.0).to(tl.float32)
    for tap in tl.static_range(W):
        back = W - 1 - tap
        row, place = t - back, position - back
        new, old = row >= first, (row < first) & (place >= 0)
        page = tl.load(table_ptr + request * widest + place // C, mask=old, other=0).to(tl.int64)
        at = tl.where(old, page * C + place % C, 0)
        mine = tl.load(x_ptr + tl.where(new, row, 0) * D + cols, mask=fits & new, other=0.0)
        theirs = tl.load(pages + at * D + cols, mask=fits & old, other=0.0)
        x = tl.where(new, mine, theirs).to(tl.float32)
        w = tl.load(w_ptr + cols * W + tap, mask=fits, other=0.0).to(tl.float32)
        total = tl.fma(x, w, total)
    y = total.to(y_ptr.dtype.element_ty)
    if SILU:
        z = y.to(tl.float32)
        y = tl.div_rn(z, 1.0 + tl.exp2(-z * LOG2E)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + t * D + cols, y, mask=fits)
    tl.store(pages + slot * D + cols, tl.load(x_ptr + t * D + cols, mask=fits, other=0.0),
             mask=fits)  # fmt: skip
