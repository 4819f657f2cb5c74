"""The definition of ``gated.silu`` and ``activation.silu``.

    silu(x)        = round(x / (1 + exp(-x)))             exp.cpu.v1, true division, fp32 inside
    silu_mul(g, u) = round(silu(g) * u)                   so fused and unfused have the same bits

Frozen.
"""

from torch import Tensor

from .exp import exp32


def silu(x: Tensor) -> Tensor:
    """Elementwise, any shape, rounded to ``x``'s dtype."""
    value = x.float()
    return (value / (1.0 + exp32(0.0 - value))).to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, each of the two steps rounded."""
    return (silu(gate).float() * up.float()).to(gate.dtype)
