"""Triton program of the gated RMSNorms and the L2 norm: R rows of one group each.

    h = x, or x silu(gate) (silu_before);  r = 1 / sqrt(mean(h^2) + eps)      rounding as on the CPU

Sums of squares run in W lanes: column c goes to lane c % W, columns ascending, then ``row_sum``.
The order depends on the group's width alone; exp2 is ``ex2.approx``, nothing becomes an FMA.

Legend: M rows times groups, G columns of a group, W lanes, R rows at a time.
"""

import triton
import triton.language as tl

from ..gpu.tree import row_sum

LOG2E = tl.constexpr(1.4426950408889634)
SILU_AFTER, SIGMOID_AFTER, SILU_BEFORE, L2_TIMES, L2_DIVIDE = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4),
)  # fmt: skip


@triton.jit
def _gated(gate_ptr, at, mask, SIGMOID: tl.constexpr):
    z = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    top = tl.full(z.shape, 1.0, tl.float32) if SIGMOID else z
    return tl.math.div_rn(top, 1.0 + tl.math.exp2(-z * LOG2E))


@triton.jit
def gated_norm_kernel(
    x_ptr, gate_ptr, w_ptr, y_ptr, M, groups, eps, scale, G: tl.constexpr, W: tl.constexpr,
    VEC: tl.constexpr, R: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """y of M rows of G columns; w [groups * G]."""
    rows = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    dtype = x_ptr.dtype.element_ty
    lanes = tl.zeros((R, W), tl.float32)
    for first in tl.range(0, G, W):
        cols = first + tl.arange(0, W)
        mask = (rows < M)[:, None] & (cols < G)[None, :]
        at = rows[:, None] * G + cols[None, :]
        h = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if ORDER == SILU_BEFORE:
            h = h * _gated(gate_ptr, at, mask, False)
        lanes = lanes + h * h
    total = row_sum(lanes, R, W, VEC)
    if ORDER < L2_TIMES:
        total = tl.math.div_rn(total, tl.zeros((R,), tl.float32) + G)
    root = tl.math.sqrt_rn(total + eps)
    r = tl.math.div_rn(tl.full((R,), 1.0, tl.float32), root)
    for first in tl.range(0, G, W):
        cols = first + tl.arange(0, W)
        mask = (rows < M)[:, None] & (cols < G)[None, :]
        at = rows[:, None] * G + cols[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if ORDER >= L2_TIMES:
            wide = tl.broadcast_to(root[:, None], (R, W))
            y = tl.math.div_rn(x, wide) if ORDER == L2_DIVIDE else x * r[:, None]
            tl.store(y_ptr + at, y * scale, mask=mask)
        else:
            place = (rows % groups)[:, None] * G + cols[None, :]
            stored = tl.load(w_ptr + place, mask=mask, other=0.0)
            w = stored.to(tl.float32)
            act = _gated(gate_ptr, at, mask, ORDER == SIGMOID_AFTER)
            if ORDER == SILU_BEFORE:
                y = w * (x * act * r[:, None]).to(dtype).to(tl.float32)
            elif ORDER == SILU_AFTER:
                y = w * (x * r[:, None]).to(dtype).to(tl.float32)
                if (dtype != tl.float32) & (stored.dtype != tl.float32):
                    y = y.to(dtype).to(tl.float32)  # to the wider of the two
                y = y * act
            else:
                y = w * (x * r[:, None]) * act
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
