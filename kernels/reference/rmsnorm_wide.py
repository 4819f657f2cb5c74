"""The definition of ``rmsnorm_wide.lanes16``: RMSNorm whose weight is applied before any rounding.

    s      = round(x + residual), or x
    r      = 1 / sqrt(sumsq / H + eps)              as in ``rmsnorm.py``
    y      = round((s * r) * w)                     w in fp32 (gpt_oss): one rounding at the end

Gradient, with ``g = dy w`` and r recomputed:

    dx     = round(ds + r * fma(-s, c, g))          c as in ``rmsnorm.py``
    dw     = one FMA chain over the rows, ascending, of dy times s r

For fp32 rows these are the numbers of ``rmsnorm.lanes16``; bf16 rows keep what Llama's norm rounds
away between its two products. Frozen.
"""

import torch
from torch import Tensor

from .fma import fma32
from .rmsnorm import dot_lanes, inverse_rms


def rmsnorm_wide(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """``y`` for rows ``x [T, H]``; with a residual ``(y, s)``."""
    s = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    values = s.float()
    y = ((values * inverse_rms(values, eps)[:, None]) * weight.float()).to(x.dtype)
    return y if residual is None else (y, s)


def rmsnorm_wide_grad(
    dy: Tensor,
    s: Tensor,
    weight: Tensor,
    eps: float,
    ds: Tensor | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``dx [T, H]`` and fp32 ``dw [H]``, whose chains start from ``initial`` or 0."""
    values, upstream = s.float(), dy.float()
    g = upstream * (0.0 + weight.float())
    r = inverse_rms(values, eps)
    c = dot_lanes(g, values) * r * r / torch.tensor(float(s.shape[1]))
    dx = r[:, None] * fma32(-values, c[:, None], g)
    scaled = values * r[:, None]
    dw = torch.zeros(s.shape[1]) if initial is None else initial
    for row in range(s.shape[0]):
        dw = fma32(upstream[row], scaled[row], dw)
    return (dx if ds is None else ds.float() + dx).to(s.dtype), dw
