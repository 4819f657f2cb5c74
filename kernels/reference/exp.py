"""``exp32(x)``: the CPU core's only exponential (``exp.cpu.v1``), step by step in plain torch.

Range reduction by ln 2 in two pieces, a degree-5 polynomial (Cephes' coefficients) in FMA, then a
multiplication by 2**n made from integer bits. Inputs are clamped to [-87.33654, 88], NaN passes
through, and callers mask -inf themselves. ``sum_lanes`` is the tree that closes every 16-lane
accumulation (``lanes16.tree.v1``).

Frozen: the references of attention, gated products and logprob are defined by it.
"""

import torch
from torch import Tensor

from .fma import fma32

LANES = 16
_LOW, _HIGH = -87.33654, 88.0
_LOG2_E = 1.44269504
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_COEFFICIENTS = (
    1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)


def exp32(x: Tensor) -> Tensor:
    """The exponential of an fp32 tensor, bit-equal to ``exp`` in ``kernels/cpu/simd.h``."""
    x = x.clamp(_fp32(x, _LOW), _fp32(x, _HIGH))
    n = torch.round(x * _fp32(x, _LOG2_E))
    r = fma32(-n, _fp32(x, _LN2_HIGH), x)
    r = fma32(-n, _fp32(x, _LN2_LOW), r)
    p = _fp32(x, 1.9875691500e-4)
    for coefficient in _COEFFICIENTS:
        p = fma32(p, r, _fp32(x, coefficient))
    p = fma32(p * r, r, r + 1.0)
    exponent = torch.where(n.isnan(), 0.0, n).to(torch.int32) + 127
    return p * (exponent << 23).view(torch.float32)


def sum_lanes(lanes: Tensor) -> Tensor:
    """Sum ``[..., 16]`` lanes by halving: (i) + (i + 8), then + 4, + 2, + 1."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[..., :width] + lanes[..., width:]
    return lanes[..., 0]


def _fp32(like: Tensor, value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like.device)
