"""The definition of ``gated.silu`` and ``activation.silu``, forward and gradient.

    silu(x)        = round(x / (1 + exp(-x)))             exp.cpu.v1, true division, fp32 inside
    silu_mul(g, u) = round(silu(g) * u)                   so fused and unfused have the same bits

    slope(x)       = sig * fma(x, 1 - sig, 1),  sig = 1 / (1 + exp(-x))
    silu_grad      = round(dy * slope(x))
    silu_mul_grad  = round(round(dy * u) * slope(g)),  round(dy * silu(g))

Frozen.
"""

import torch
from torch import Tensor

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
