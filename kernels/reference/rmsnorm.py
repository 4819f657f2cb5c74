"""The definition of ``rmsnorm.lanes16``: RMSNorm in fp32 with one written order.

    s      = round(x + residual), or x
    sumsq  = 16 lanes, column c in lane c % 16, one FMA each, ascending; then the lane tree
    r      = 1 / sqrt(sumsq / H + eps)              each step one fp32 operation
    y      = round(round(s * r) * w)                Llama: the normalised value is rounded first
    y      = round((s * r) * (1 + w))               unit_offset (Gemma): one rounding at the end

Gradient, with ``g = dy (0 + w)`` or ``dy (1 + w)``, and r recomputed:

    c      = ((sum(g s) * r) * r) / H               the sum in lanes, as above
    dx     = round(ds + r * fma(-s, c, g))          ds: what reaches s by another path, where given
    dw     = one FMA chain over the rows, ascending, of dy times round(s r) (unit_offset: s r)

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


def rmsnorm_grad(
    dy: Tensor,
    s: Tensor,
    weight: Tensor,
    eps: float,
    unit_offset: bool = False,
    ds: Tensor | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``dx [T, H]`` and fp32 ``dw [H]``, whose chains start from ``initial`` or 0."""
    values, upstream = s.float(), dy.float()
    g = upstream * (float(unit_offset) + weight.float())
    r = inverse_rms(values, eps)
    c = dot_lanes(g, values) * r * r / torch.tensor(float(s.shape[1]))
    dx = r[:, None] * fma32(-values, c[:, None], g)
    scaled = values * r[:, None]
    scaled = scaled if unit_offset else scaled.to(s.dtype).float()
    dw = torch.zeros(s.shape[1]) if initial is None else initial
    for row in range(s.shape[0]):
        dw = fma32(upstream[row], scaled[row], dw)
    return (dx if ds is None else ds.float() + dx).to(s.dtype), dw


def dot_lanes(a: Tensor, b: Tensor) -> Tensor:
    """Dot products of fp32 rows ``[..., H]``: 16 lanes, column c in lane c % 16, then the tree."""
    a, b = (
        pad(each, (0, -each.shape[-1] % LANES)).unflatten(-1, (-1, LANES)) for each in (a, b)
    )
    lanes = torch.zeros_like(a[..., 0, :])
    for chunk in range(a.shape[-2]):
        lanes = fma32(a[..., chunk, :], b[..., chunk, :], lanes)
    return sum_lanes(lanes)


def inverse_rms(values: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(values ** 2) + eps)`` of fp32 rows ``[T, H]``."""
    mean = dot_lanes(values, values) / torch.tensor(float(values.shape[1]))
    shifted = mean + torch.tensor(eps, dtype=torch.float32)
    return 1.0 / torch.sqrt(shifted.double()).float()
