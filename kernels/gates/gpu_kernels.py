"""Triton programs of the gates of recurrent layers: elementwise, a block of elements each.

    sigmoid(x) = 1 / (1 + exp2(-x log2 e))                    softplus(x) = x above 20, else
                                                              max(x, 0) + log1p(exp2(-|x| log2 e))

Formulas and rounding points are the CPU's; exp2 is ``ex2.approx``, log1p the CPU's series in fp64.
Nothing is contracted into an FMA. An element's bits depend on nothing but its own operands.

Legend: N columns of a row, P columns of a head.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
SIGMOID, SIGMOID_MUL, RELU_SQUARED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
DECAY, TIME_STEP, DISCRETISED, SKIP = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3),
)  # fmt: skip


@triton.jit
def sigmoid(x):
    """fp32."""
    return tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.math.exp2(-x * LOG2E))


@triton.jit
def softplus(x):
    """fp32; log(1 + y) = 2 artanh(y / (2 + y)), its series to the power 23."""
    y = tl.math.exp2(-tl.abs(x) * LOG2E).to(tl.float64)
    r = y / (y + 2.0)
    square = r * r
    p = tl.zeros(x.shape, tl.float64) + 1.0 / 23.0
    for back in tl.static_range(11):
        p = p * square + 1.0 / (21.0 - 2.0 * back)
    small = tl.maximum(x, 0.0) + ((2.0 * r) * p).to(tl.float32)
    return tl.where(x > 20.0, x, small)


@triton.jit
def gate_kernel(x_ptr, z_ptr, y_ptr, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """y [size]: sigmoid(x), x round(sigmoid(z)) or max(x, 0)^2."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    dtype = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if KIND == SIGMOID:
        y = sigmoid(x)
    elif KIND == SIGMOID_MUL:
        z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
        y = x * sigmoid(z).to(dtype).to(tl.float32)
    else:
        x = tl.where(x > 0.0, x, tl.where(x == x, 0.0, x))
        y = x * x
    tl.store(y_ptr + at, y.to(dtype), mask=mask)


@triton.jit
def row_gate_kernel(
    x_ptr, other_ptr, a_ptr, b_ptr, y_ptr, g_ptr, size, N, P, low, high,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Operators with parameters per head or column; an element each.

    decay: x = a, a_ptr = A_log, b_ptr = dt_bias; time_step: x = dt, b_ptr = dt_bias; discretised:
    other = dt, a_ptr = A_log, y = v, g; skip: x, other = o, a_ptr = D.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    column, head = at % N, at % N // P
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if KIND != TIME_STEP:
        parameter = tl.load(a_ptr + head, mask=mask, other=0.0).to(tl.float32)
    if KIND == DECAY:
        bias = tl.load(b_ptr + column, mask=mask, other=0.0).to(tl.float32)
        y = -tl.math.exp2(parameter * LOG2E) * softplus(x + bias)
    elif KIND == TIME_STEP:
        bias = tl.load(b_ptr + column, mask=mask, other=0.0).to(dtype).to(tl.float32)
        soft = softplus((x + bias).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        y = tl.where(soft < low, low, tl.where(soft > high, high, soft))
    elif KIND == DISCRETISED:
        dt = tl.load(other_ptr + at // P, mask=mask, other=0.0).to(tl.float32)
        y = x * dt
        rate = -tl.math.exp2(parameter * LOG2E)
        tl.store(g_ptr + at // P, rate * dt, mask=mask & (at % P == 0))
    else:
        y = tl.load(other_ptr + at, mask=mask, other=0.0) + parameter * x
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
