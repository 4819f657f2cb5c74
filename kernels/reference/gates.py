"""The definition of the gates of recurrent layers, forward and gradient.

    sigmoid(x)       = round(1 / (1 + exp(-x)))
    sigmoid_mul(x,z) = round(x round(sigmoid(z)))                 each step rounded, as if not fused
    relu_squared(x)  = round(max(x, 0)^2)
    softplus(x)      = x above 20, else max(x, 0) + log1p(exp(-|x|))
    decay(a)         = -exp(A_log) softplus(a + dt_bias)          fp32; per head or key channel
    time_step(dt)    = clamp(round(softplus(round(dt + round(dt_bias)))), low, high)
    discretised      : v = x dt, g = -exp(A_log) dt               fp32
    skip(o, x)       = o + D x                                    fp32, each step rounded

round() is to the rows' dtype; all inputs are widened exactly, all arithmetic is fp32.
exp is exp.cpu.v1, divisions are IEEE, log1p(y) = 2 artanh(y / (2 + y)), its series to the power 23
in fp64, nothing fused, rounded once (``log1p.series.v1``).

Gradients of rows are rounded once, those of parameters are fp32 chains over rows ascending, from
``initial`` or 0; sums over the columns of a head in 16 lanes, then the tree.

Frozen. Legend: T rows, H heads, N = H or H K columns, P head size.
"""

import torch
from torch import Tensor

from .exp import exp32
from .rmsnorm import dot_lanes

_HIGHEST_POWER = 23
THRESHOLD = 20.0


def sigmoid32(x: Tensor) -> Tensor:
    """fp32."""
    return 1.0 / (1.0 + exp32(0.0 - x))


def _slope(x: Tensor) -> Tensor:
    sig = sigmoid32(x)
    return sig * (1.0 - sig)


def sigmoid(x: Tensor) -> Tensor:
    """Elementwise, rounded to x's dtype."""
    return sigmoid32(x.float()).to(x.dtype)


def sigmoid_grad(dy: Tensor, x: Tensor) -> tuple[Tensor]:
    """The gradient of :func:`sigmoid`."""
    return ((dy.float() * _slope(x.float())).to(x.dtype),)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """``x sigmoid(gate)``, each of the two steps rounded."""
    return (x.float() * sigmoid(gate).float()).to(x.dtype)


def sigmoid_mul_grad(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients in x and gate."""
    reaching = (dy.float() * x.float()).to(x.dtype)
    return (dy.float() * sigmoid(gate).float()).to(x.dtype), *sigmoid_grad(reaching, gate)


def relu_squared(x: Tensor) -> Tensor:
    """Elementwise, rounded to x's dtype."""
    r = torch.relu(x.float())
    return (r * r).to(x.dtype)


def relu_squared_grad(dy: Tensor, x: Tensor) -> tuple[Tensor]:
    """``2 dy max(x, 0)``."""
    r = torch.relu(x.float())
    return ((dy.float() * (r + r)).to(x.dtype),)


def log1p32(y: Tensor) -> Tensor:
    """log(1 + y) for fp32 y between 0 and 1."""
    wide = y.double()
    r = wide / (wide + 2.0)
    square = r * r
    p = torch.full_like(square, 1.0 / _HIGHEST_POWER)
    for power in range(_HIGHEST_POWER - 2, 0, -2):
        p = p * square + 1.0 / power
    return ((2.0 * r) * p).float()


def softplus32(x: Tensor) -> Tensor:
    """fp32."""
    small = torch.relu(x) + log1p32(exp32(0.0 - x.abs()))
    return torch.where(x > THRESHOLD, x, small)


def _softplus_slope(x: Tensor) -> Tensor:
    return torch.where(x > THRESHOLD, 1.0, sigmoid32(x))


def _rate(a_log: Tensor) -> Tensor:
    return -exp32(a_log.float())


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(1, (heads, -1))


def decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """fp32 [T, N] of a [T, N], A_log [H], dt_bias [N]."""
    soft = softplus32(a.float() + dt_bias.float())
    return (_rate(a_log)[:, None] * _by_head(soft, len(a_log))).flatten(1)


def decay_grad(
    dg: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    initial_log: Tensor | None = None,
    initial_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(da, dA_log fp32 [H], ddt_bias fp32 [N])``."""
    heads, t = len(a_log), a.float() + dt_bias.float()
    g = _rate(a_log)[:, None] * _by_head(softplus32(t), heads)
    d_log = _chain(dot_lanes(_by_head(dg, heads), g), initial_log)
    d_t = (_by_head(dg, heads) * _rate(a_log)[:, None]).flatten(1) * _softplus_slope(t)
    return d_t.to(a.dtype), d_log, _chain(d_t, initial_bias)


def _chain(rows: Tensor, initial: Tensor | None) -> Tensor:
    total = torch.zeros(rows.shape[1:]) if initial is None else initial
    for row in rows:
        total = total + row
    return total


def _stepped(dt: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """``(dt + dt_bias, its softplus)``, each rounded, in fp32."""
    shifted = (dt.float() + dt_bias.to(dt.dtype).float()).to(dt.dtype).float()
    return shifted, softplus32(shifted).to(dt.dtype).float()


def time_step(dt: Tensor, dt_bias: Tensor, low: float, high: float) -> Tensor:
    """``[T, H]`` in dt's dtype."""
    return _stepped(dt, dt_bias)[1].clamp(low, high).to(dt.dtype)


def time_step_grad(
    dy: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    low: float,
    high: float,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(d_dt, fp32 ddt_bias)``; nothing passes where the clamp binds."""
    shifted, soft = _stepped(dt, dt_bias)
    inside = (soft >= torch.tensor(low)) & (soft <= torch.tensor(high))
    d_dt = torch.where(inside, dy.float() * _softplus_slope(shifted), 0.0).to(dt.dtype)
    return d_dt, _chain(d_dt.float(), initial)


def discretised(x: Tensor, dt: Tensor, a_log: Tensor) -> tuple[Tensor, Tensor]:
    """``(v [T, H, P], g [T, H])`` fp32 of x [T, H, P], dt [T, H], A_log [H]."""
    step = dt.float()
    return x.float() * step[..., None], _rate(a_log) * step


def discretised_grad(
    dv: Tensor,
    dg: Tensor,
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, d_dt, fp32 dA_log)``."""
    step, rate = dt.float(), _rate(a_log)
    d_dt = dot_lanes(dv, x.float()) + dg * rate
    d_log = _chain(dg * (rate * step), initial)
    return (dv * step[..., None]).to(x.dtype), d_dt.to(dt.dtype), d_log


def skip(o: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """fp32 ``o + D x`` of o, x [T, H, P], D [H]."""
    return o + d.float()[:, None] * x.float()


def skip_grad(
    dy: Tensor, o: Tensor, x: Tensor, d: Tensor, initial: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(do, dx, fp32 dD)``; o has no part in them."""
    dx = (dy * d.float()[:, None]).to(x.dtype)
    return dy.to(o.dtype, copy=True), dx, _chain(dot_lanes(dy, x.float()), initial)
