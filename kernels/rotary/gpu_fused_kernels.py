"""Triton program of queries' and keys' norms and rotation: see :mod:`.gpu_fused`.

    y = round(round(x r) w),  r = 1 / sqrt(sum(x x) / D + eps)      with weights, else y = x
    out = round(y cos + rotate_half(y) sin)                         the row's position in the tables

The operations and their order are those of ``rmsnorm_row_kernel`` and ``rotary_kernel``, on the two
halves of a head: the sum's last step but three is that of the halves, which the tree adds first.
Legend: T tokens, HQ and HK heads of queries and keys side by side, D = 2 HALF; R heads per program.
"""

import triton
import triton.language as tl

from ..gpu.tree import row_sum_of_halves


@triton.jit
def norm_rotary_kernel(
    x_ptr,
    q_weight_ptr,
    k_weight_ptr,
    position_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    T,
    pitch,
    eps,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HALF: tl.constexpr,
    VEC: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
):
    item = tl.program_id(0) * R + tl.arange(0, R)
    token = (item // (HQ + HK)).to(tl.int64)
    head = item % (HQ + HK)
    cols = tl.arange(0, HALF)
    is_query = head < HQ
    mask = (token < T)[:, None] & (cols >= 0)[None, :]
    at = (token * pitch + head * (2 * HALF))[:, None] + cols[None, :]
    x1 = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    position = tl.load(position_ptr + token, mask=token < T, other=0).to(tl.int64)
    entry = (position * (2 * HALF))[:, None] + cols[None, :]
    c1 = tl.load(cos_ptr + entry, mask=mask, other=0.0)
    c2 = tl.load(cos_ptr + entry + HALF, mask=mask, other=0.0)
    s1 = tl.load(sin_ptr + entry, mask=mask, other=0.0)
    s2 = tl.load(sin_ptr + entry + HALF, mask=mask, other=0.0)
    dtype = q_ptr.dtype.element_ty
    if NORM:
        total = row_sum_of_halves(x1 * x1, x2 * x2, R, 2 * HALF, VEC)
        mean = total * (1.0 / (2 * HALF))  # a power of two: the bits of the division
        r = tl.math.div_rn(tl.full((R,), 1.0, tl.float32), tl.math.sqrt_rn(mean + eps))[:, None]
        wq1 = tl.load(q_weight_ptr + cols).to(tl.float32)[None, :]
        wq2 = tl.load(q_weight_ptr + cols + HALF).to(tl.float32)[None, :]
        wk1 = tl.load(k_weight_ptr + cols).to(tl.float32)[None, :]
        wk2 = tl.load(k_weight_ptr + cols + HALF).to(tl.float32)[None, :]
        w1 = tl.where(is_query[:, None], wq1, wk1)
        w2 = tl.where(is_query[:, None], wq2, wk2)
        x1 = ((x1 * r).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
        x2 = ((x2 * r).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    y1 = (x1 * c1 - x2 * s1).to(dtype)
    y2 = (x2 * c2 + x1 * s2).to(dtype)
    q_at = ((token * HQ + head) * (2 * HALF))[:, None] + cols[None, :]
    q_mask = mask & is_query[:, None]
    tl.store(q_ptr + q_at, y1, mask=q_mask)
    tl.store(q_ptr + q_at + HALF, y2, mask=q_mask)
    k_at = ((token * HK + head - HQ) * (2 * HALF))[:, None] + cols[None, :]
    k_mask = mask & (head >= HQ)[:, None]
    tl.store(k_ptr + k_at, y1, mask=k_mask)
    tl.store(k_ptr + k_at + HALF, y2, mask=k_mask)
