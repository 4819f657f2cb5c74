"""Triton kernels of the gated activations, forward and backward.

    silu(x) = x / (1 + exp2(-x log2 e))                         IEEE division
    gelu(x) = x * h / 1,  h = 1 - 1 / (1 + exp2(2 u log2 e)),   u = sqrt(2 / pi) (x + 0.044715 x^3)
    y = round(round(act(gate)) * up)

gelu is the tanh form: 0.5 (1 + tanh u) = h. The activation is rounded before the product, so fused
and unfused calls agree. exp2 is ``ex2.approx.ftz``; nothing is contracted into an FMA. Elementwise
throughout.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def _gate(x, GELU: tl.constexpr):
    """The factor h with act(x) = x * h for gelu, and the sigmoid for silu."""
    if GELU:
        u = SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x))
        e = tl.math.exp2(u * (2.0 * LOG2E))
        return 1.0 - tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + e)
    return tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.math.exp2(-x * LOG2E))


@triton.jit
def _activation(x, GELU: tl.constexpr):
    if GELU:
        return x * _gate(x, True)
    return tl.math.div_rn(x, 1.0 + tl.math.exp2(-x * LOG2E))


@triton.jit
def gated_fwd_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    M,
    F,
    stride_g,
    stride_u,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    HAS_UP: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    dtype = y_ptr.dtype.element_ty
    x = tl.load(gate_ptr + row * stride_g + cols, mask=mask, other=0.0).to(tl.float32)
    y = _activation(x, GELU).to(dtype)
    if HAS_UP:
        up = tl.load(up_ptr + row * stride_u + cols, mask=mask, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) * up).to(dtype)
    tl.store(y_ptr + row * F + cols, y, mask=mask)


@triton.jit
def gated_bwd_kernel(
    gate_ptr,
    up_ptr,
    dy_ptr,
    dgate_ptr,
    dup_ptr,
    M,
    F,
    stride_g,
    stride_u,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    HAS_UP: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    dtype = dgate_ptr.dtype.element_ty
    x = tl.load(gate_ptr + row * stride_g + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * F + cols, mask=mask, other=0.0).to(tl.float32)
    d_act = dy
    if HAS_UP:
        up = tl.load(up_ptr + row * stride_u + cols, mask=mask, other=0.0).to(tl.float32)
        act = _activation(x, GELU).to(dtype).to(tl.float32)
        tl.store(dup_ptr + row * F + cols, (dy * act).to(dtype), mask=mask)
        d_act = dy * up
    h = _gate(x, GELU)
    if GELU:
        slope = (2.0 * SQRT_2_OVER_PI) * (1.0 + 3.0 * 0.044715 * (x * x))
    else:
        slope = tl.full(x.shape, 1.0, tl.float32)
    dx = d_act * (h + x * (h * (1.0 - h)) * slope)
    tl.store(dgate_ptr + row * F + cols, dx.to(dtype), mask=mask)


@triton.jit
def softcap_kernel(x_ptr, dy_ptr, out_ptr, size, cap, BLOCK: tl.constexpr, BACKWARD: tl.constexpr):
    """cap tanh(x / cap), or dy (1 - tanh(x / cap)^2); fp32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    u = tl.math.div_rn(x, tl.zeros_like(x) + cap)
    a = tl.abs(u)
    e = tl.math.exp2(a * (-2.0 * LOG2E))
    far = tl.math.div_rn(1.0 - e, 1.0 + e)
    s = u * u
    series = 1.0 - s * (0.33333334 - s * (0.13333334 - s * (0.05396825 - s * 0.021869488)))
    t = tl.where(a < 0.25, u * series, tl.where(u < 0.0, -far, far))
    y = tl.load(dy_ptr + at, mask=mask, other=0.0) * (1.0 - t * t) if BACKWARD else t * cap
    tl.store(out_ptr + at, y, mask=mask)
