"""The definition of ``rotary_table.fp64`` and ``rotary.half``.

Table, for position t and frequency i, all in fp64 without FMA, rounded once to fp32 at the end:

    angle = t * inv_freq[i];  n = round_even(angle * 2/pi);  r = ((angle - n P1) - n P2) - n P3
    sin, cos of r: fdlibm's kernel polynomials;  quadrant n mod 4;  times scaling

``n P1`` and ``n P2`` are exact for up to 2**20 quarter turns (P1, P2, P3: pi/2 in pieces of 33
bits), so the angle's own rounding is the largest error. Plain + - * only: any IEEE machine gives
the same bits.

Rotation of a head with columns (a, b), each half of the table's width; further columns are
copied:

    (a, b) -> (a cos_a - b sin_a,  b cos_b + a sin_b)       fp32, no FMA, one rounding to x's dtype

which in fp32 equals torch's ``x * cos + rotate_half(x) * sin`` bit for bit. Frozen.
"""

import torch
from torch import Tensor

_TWO_OVER_PI = 6.36619772367581382433e-01
_PIECES = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624871116645580e-21)
_SINE = (
    1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06,
    -1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01,
)
_COSINE = (
    -1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07,
    2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02,
)


def rotary_table(
    inv_freq: Tensor, positions: Tensor, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """``cos, sin`` fp32 ``[T, 2 n]`` for fp64 frequencies ``[n]`` and int64 positions ``[T]``."""
    angle = positions.to(torch.float64)[:, None] * inv_freq[None, :]
    n = torch.round(angle * _TWO_OVER_PI)
    r = angle
    for piece in _PIECES:
        r = r - n * piece
    z = r * r
    sine = r + r * z * _polynomial(z, _SINE)
    cosine = 1.0 - (0.5 * z - z * z * _polynomial(z, _COSINE))
    quadrant = n.to(torch.int64) & 3
    odd = (quadrant & 1) == 1
    cos = torch.where(odd, sine, cosine)
    sin = torch.where(odd, cosine, sine)
    cos = torch.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    sin = torch.where(quadrant >= 2, -sin, sin)
    cos, sin = (cos * scaling).float(), (sin * scaling).float()
    return torch.cat((cos, cos), dim=1), torch.cat((sin, sin), dim=1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``cos.shape[1]`` columns of every head of ``x [T, heads, D]``."""
    width = cos.shape[1]
    half = width // 2
    a, b = x[..., :half].float(), x[..., half:width].float()
    cos_a, cos_b = cos[:, None, :half], cos[:, None, half:]
    sin_a, sin_b = sin[:, None, :half], sin[:, None, half:]
    rotated = torch.cat((a * cos_a - b * sin_a, b * cos_b + a * sin_b), dim=-1).to(x.dtype)
    return torch.cat((rotated, x[..., width:]), dim=-1)


def _polynomial(z: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = torch.full_like(z, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * z + coefficient
    return value
