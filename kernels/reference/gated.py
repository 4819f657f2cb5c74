"""The definition of the activations, their gated products and the softcap, forward and gradient.

    silu(x)        = round(x / (1 + exp(-x)))             exp.cpu.v1, true division, fp32 inside
    silu_mul(g, u) = round(silu(g) * u)                   so fused and unfused have the same bits

    slope(x)       = sig * fma(x, 1 - sig, 1),  sig = 1 / (1 + exp(-x))
    silu_grad      = round(dy * slope(x))
    silu_mul_grad  = round(round(dy * u) * slope(g)),  round(dy * silu(g))

    gelu(x)        = round(max(x, -100) / (1 + exp(-w)))  w = t (B fma(K, t t, 1)), |t| <= 100
    slope(x)       = sig * fma(t (1 - sig), B fma(3 K, t t, 1), 1),  sig = 1 / (1 + exp(-w))

with B = 2 sqrt(2 / pi) and K = 0.044715; gelu_mul and the gradients follow silu's. The softcap of
fp32 logits is ``cap tanh(x / cap)`` with tanh.cpu.v1, its gradient ``dy fma(-t, t, 1)``.

Frozen.
"""

import torch
from torch import Tensor

from .attention import tanh32
from .exp import exp32
from .fma import fma32


def silu(x: Tensor) -> Tensor:
    """Elementwise, any shape, rounded to ``x``'s dtype."""
    value = x.float()
    return (value / (1.0 + exp32(0.0 - value))).to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, each of the two steps rounded."""
    return (silu(gate).float() * up.float()).to(gate.dtype)


def silu_grad(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of :func:`silu` in ``x``."""
    value = x.float()
    sig = 1.0 / (1.0 + exp32(0.0 - value))
    return (dy.float() * (sig * fma32(value, 1.0 - sig, torch.tensor(1.0)))).to(x.dtype)


def silu_mul_grad(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`silu_mul` in ``gate`` and ``up``."""
    reaching_silu = (dy.float() * up.float()).to(gate.dtype)
    return silu_grad(reaching_silu, gate), (dy.float() * silu(gate).float()).to(gate.dtype)


_TWO_ROOTS = 1.5957691216  # 2 sqrt(2 / pi)
_CUBIC, _THREE_CUBIC = 0.044715, 0.134145


def gelu(x: Tensor) -> Tensor:
    """The tanh approximation, elementwise, any shape, rounded to ``x``'s dtype."""
    value = x.float()
    return (value.clamp(min=-100.0) / (1.0 + exp32(0.0 - _inside(value)))).to(x.dtype)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) * up``, each of the two steps rounded."""
    return (gelu(gate).float() * up.float()).to(gate.dtype)


def gelu_grad(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of :func:`gelu` in ``x``."""
    value = x.float()
    t = value.clamp(-100.0, 100.0)
    sig = 1.0 / (1.0 + exp32(0.0 - _inside(value)))
    slope = sig * fma32(t * (1.0 - sig), _scaled(t, _THREE_CUBIC), torch.tensor(1.0))
    return (dy.float() * slope).to(x.dtype)


def gelu_mul_grad(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of :func:`gelu_mul` in ``gate`` and ``up``."""
    reaching_gelu = (dy.float() * up.float()).to(gate.dtype)
    return gelu_grad(reaching_gelu, gate), (dy.float() * gelu(gate).float()).to(gate.dtype)


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)`` of fp32 values."""
    limit = torch.tensor(cap, dtype=torch.float32)
    return limit * tanh32(x / limit)


def softcap_grad(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    """The gradient of :func:`softcap` in ``x``."""
    t = tanh32(x / torch.tensor(cap, dtype=torch.float32))
    return dy * fma32(-t, t, torch.tensor(1.0))


def _inside(value: Tensor) -> Tensor:
    t = value.clamp(-100.0, 100.0)
    return t * _scaled(t, _CUBIC)


def _scaled(t: Tensor, cubic: float) -> Tensor:
    """``B fma(cubic, t t, 1)``."""
    inner = fma32(torch.tensor(cubic), t * t, torch.tensor(1.0))
    return torch.tensor(_TWO_ROOTS) * inner
