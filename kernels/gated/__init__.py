"""silu and the gated product silu(gate) * up, forward and backward.

    silu(x) = x / (1 + exp(-x))      own exponential, true division, fp32 inside, rounded to storage

Stock silu on a CPU differs between a vector and its tail at odd widths; here every element goes
through the same lanes. The product rounds after silu and again after the multiplication, so that
the fused operator, a separate silu and a separate product have the same bits, in the gradient
too. ``kernels/reference/gated.py`` is the definition; ``pytest tests/kernels/gated`` exercises
it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..cpu.register import covering
from ..dispatch import choose
from ..errors import ContractError
from . import cpu

__all__ = ["silu", "silu_mul"]


def silu(x: Tensor) -> Tensor:
    """``x / (1 + exp(-x))`` elementwise, fp32 or bf16, any shape."""
    covering(cpu.ACTIVATION, x)
    x = x.contiguous()
    return _Silu.apply(x) if torch.is_grad_enabled() and x.requires_grad else _silu(x)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` elementwise; both of one shape and dtype."""
    covering(cpu.GATED, gate)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ContractError(
            f"gate is {gate.dtype} {tuple(gate.shape)}, up is {up.dtype} {tuple(up.shape)}; "
            "give both the same shape and dtype"
        )
    gate, up = gate.contiguous(), up.contiguous()
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _SiluMul.apply(gate, up)
    return _silu_mul(gate, up)


def _silu(x: Tensor) -> Tensor:
    return choose(covering(cpu.ACTIVATION, x).id).run(x.detach())


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return choose(covering(cpu.GATED, gate).id).run(gate.detach(), up.detach())


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _silu(x)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Tensor:
        (x,) = ctx.saved_tensors
        run = choose(covering(cpu.ACTIVATION_GRADIENTS, x).id).run
        return run(grads[0].contiguous(), x)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _silu_mul(gate, up)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        gate, up = ctx.saved_tensors
        run = choose(covering(cpu.GATED_GRADIENTS, gate).id).run
        return run(grads[0].contiguous(), gate, up)
