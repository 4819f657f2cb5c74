"""Triton kernel of the rotary embedding, forward and backward, in place of torch's pointwise chain.

    y = round(x * cos + rotate_half(x) * sin)     fp32, no FMA, one rounding

The backward is the transposed rotation: dx = g * cos - rotate_half(g * sin), written out per half.
Legend: T tokens, N heads, D head size (even); one program takes BT tokens of one head.
"""

import triton
import triton.language as tl


@triton.jit
def rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    T,
    N,
    stride_t,
    stride_n,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    item = tl.program_id(0) * BT + tl.arange(0, BT)
    token = (item // N).to(tl.int64)
    head = item % N
    dims = tl.arange(0, BD)
    mask = (token < T)[:, None] & (dims < HALF)[None, :]
    x_at = token[:, None] * stride_t + (head * stride_n)[:, None] + dims[None, :]
    y_at = (token * N + head)[:, None] * D + dims[None, :]
    t_at = token[:, None] * (2 * HALF) + dims[None, :]
    x1 = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + x_at + HALF, mask=mask, other=0.0).to(tl.float32)
    c1 = tl.load(cos_ptr + t_at, mask=mask, other=0.0)
    c2 = tl.load(cos_ptr + t_at + HALF, mask=mask, other=0.0)
    s1 = tl.load(sin_ptr + t_at, mask=mask, other=0.0)
    s2 = tl.load(sin_ptr + t_at + HALF, mask=mask, other=0.0)
    if BACKWARD:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1  # unary minus is 0 - x to Triton: another sign of zero
        y2 = x2 * c2 + x1 * s2
    dtype = y_ptr.dtype.element_ty
    tl.store(y_ptr + y_at, y1.to(dtype), mask=mask)
    tl.store(y_ptr + y_at + HALF, y2.to(dtype), mask=mask)
