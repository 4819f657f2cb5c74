"""The definition of ``rmsnorm.lanes16``: RMSNorm in fp32 with one written order.

    s      = round(x + residual), or x
    sumsq  = 16 lanes, column c in lane c % 16, one FMA each, ascending; then the lane tree
    r      = 1 / sqrt(sumsq / H + eps)              each step one fp32 operation
    y      = round(round(s * r) * w)                Llama: the normalised value is rounded first
    y      = round((s * r) * (1 + w))               unit_offset (Gemma): one rounding at the end

Missing columns of a last partial chunk are zeros, whose FMA changes nothing. The square root is
taken in fp64 and rounded, which gives the correctly rounded fp32 root; torch's own fp32 ``sqrt``
is one ulp off in places, and where depends on the element's position in the tensor. Frozen.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .exp import LANES, sum_lanes
from .fma import fma32


def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """``y`` for rows ``x [T, H]``; with a residual ``(y, s)``."""
    s = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    values, w = s.float(), weight.float()
    scaled = values * inverse_rms(values, eps)[:, None]
    y = scaled * (1.0 + w) if unit_offset else scaled.to(x.dtype).float() * w
    y = y.to(x.dtype)
    return y if residual is None else (y, s)


def inverse_rms(values: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(values ** 2) + eps)`` of fp32 rows ``[T, H]``."""
    columns = values.shape[1]
    chunks = pad(values, (0, -columns % LANES)).unflatten(1, (-1, LANES))
    lanes = torch.zeros_like(chunks[:, 0])
    for chunk in chunks.unbind(1):
        lanes = fma32(chunk, chunk, lanes)
    mean = sum_lanes(lanes) / torch.tensor(float(columns))
    shifted = mean + torch.tensor(eps, dtype=torch.float32)
    return 1.0 / torch.sqrt(shifted.double()).float()
