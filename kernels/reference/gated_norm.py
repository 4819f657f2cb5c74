"""The definition of gated RMSNorms and of the L2 norm of q and k, forward and gradient.

    r = 1 / sqrt(mean(h^2) + eps), n = h r, per group of columns; act = silu or sigmoid of the gate
    silu_after     h = x           y = round(round(w round(n)) act)         Qwen3-Next
    sigmoid_after  h = x           y = round((w n) act)                     Kimi-Linear
    silu_before    h = x act       y = round(w round(n))                    Zamba2, Nemotron-H

round() is to x's dtype; round(w ...) to the wider of w's and x's, which is also the output's dtype
for silu_before. Everything else is fp32: x, gate and w are widened exactly, each may be fp32 or
bf16. Means in 16 lanes, as in :mod:`.rmsnorm`; silu(z) = z / (1 + exp(-z)), sigmoid(z) =
1 / (1 + exp(-z)).

Gradient, with m the weighted norm: dm = dy act (silu_before: dy), dn = w dm, dw = one FMA chain
over rows of dm times n as it was weighted, dh = r fma(-h, c, dn) with c = ((sum(dn h) r) r) / G;
dgate = (dy m) slope, or (dh x) slope, and dx = dh act for silu_before. Rows are rounded once.

    l2norm: y = (h (1 / s)) scale, or (h / s) scale;  s = sqrt(sum(h^2) + eps)           fp32
    dh = ((scale / s) fma(-h, c, dy)),  c = (sum(dy h) / s) / s

Frozen. Legend: T rows, H columns, G columns of a group.
"""

from typing import Literal

import torch
from torch import Tensor

from .exp import exp32
from .fma import fma32
from .rmsnorm import dot_lanes

Order = Literal["silu_after", "sigmoid_after", "silu_before"]


def _sigmoid(gate: Tensor) -> Tensor:
    return 1.0 / (1.0 + exp32(0.0 - gate))


def _act(order: str, gate: Tensor) -> Tensor:
    if order == "sigmoid_after":
        return _sigmoid(gate)
    return gate / (1.0 + exp32(0.0 - gate))


def _slope(order: str, gate: Tensor) -> Tensor:
    sig = _sigmoid(gate)
    if order == "sigmoid_after":
        return sig * (1.0 - sig)
    return sig * fma32(gate, 1.0 - sig, torch.tensor(1.0))


def _root(square: Tensor) -> Tensor:
    return torch.sqrt(square.double()).float()


def _inverse(h: Tensor, eps: float) -> Tensor:
    mean = dot_lanes(h, h) / torch.tensor(float(h.shape[-1]))
    return 1.0 / _root(mean + torch.tensor(eps, dtype=torch.float32))


def _normed(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, order: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(h [T, N, G], r [T, N, 1], n as it is weighted [T, H], act [T, H])``."""
    act = _act(order, gate.float())
    h = x.float() * act if order == "silu_before" else x.float()
    h = h.unflatten(1, (-1, group))
    r = _inverse(h, eps)[..., None]
    n = (h * r).flatten(1)
    if order != "sigmoid_after":
        n = n.to(x.dtype).float()
    return h, r, n, act


def gated_rmsnorm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, order: str
) -> Tensor:
    """``y [T, H]`` of rows x, gate [T, H] and weight [H]."""
    _, _, n, act = _normed(x, gate, weight, eps, group, order)
    wide = torch.promote_types(x.dtype, weight.dtype)
    m = weight.float() * n
    if order == "silu_before":
        return m.to(wide)
    m = m if order == "sigmoid_after" else m.to(wide).float()
    return (m * act).to(x.dtype)


def gated_rmsnorm_grad(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    group: int,
    order: str,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dgate, fp32 dw [H])``; dw's chains start from ``initial`` or 0."""
    h, r, n, act = _normed(x, gate, weight, eps, group, order)
    up, w = dy.float(), weight.float()
    after = order != "silu_before"
    d_m = up * act if after else up
    d_n = (w * d_m).unflatten(1, (-1, group))
    c = dot_lanes(d_n, h)[..., None] * r * r / torch.tensor(float(group))
    d_h = (r * fma32(-h, c, d_n)).flatten(1)
    m = w * n
    if order == "silu_after":
        m = m.to(torch.promote_types(x.dtype, weight.dtype)).float()
    d_act = up * m if after else d_h * x.float()
    d_x = d_h if after else d_h * act
    dw = torch.zeros(x.shape[1]) if initial is None else initial
    for row in range(len(x)):
        dw = fma32(d_m[row], n[row], dw)
    d_gate = d_act * _slope(order, gate.float())
    return d_x.to(x.dtype), d_gate.to(gate.dtype), dw


def l2norm(x: Tensor, eps: float, divide: bool, scale: float) -> Tensor:
    """fp32 ``[T, H]``."""
    h, s = x.float(), _length(x.float(), eps)
    y = h / s if divide else h * (1.0 / s)
    return y * torch.tensor(scale, dtype=torch.float32)


def l2norm_grad(
    dy: Tensor, x: Tensor, eps: float, divide: bool, scale: float
) -> tuple[Tensor]:
    """The gradient in ``x``; the same for both forms."""
    h, s = x.float(), _length(x.float(), eps)
    c = dot_lanes(dy, h)[:, None] / s / s
    factor = torch.tensor(scale, dtype=torch.float32) / s
    return ((factor * fma32(-h, c, dy)).to(x.dtype),)


def _length(h: Tensor, eps: float) -> Tensor:
    return _root(dot_lanes(h, h) + torch.tensor(eps, dtype=torch.float32))[:, None]
