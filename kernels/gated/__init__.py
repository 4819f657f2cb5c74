"""silu and gelu, their gated products, and the softcap of logits, forward and backward.

    silu(x)    = x / (1 + exp(-x))
    gelu(x)    = x / (1 + exp(-2 u)),  u = sqrt(2 / pi) (x + 0.044715 x^3)     = x (1 + tanh u) / 2
    softcap(x) = cap tanh(x / cap)                                             fp32 only

Own exponential, true division, fp32 inside, rounded to storage. gelu is the tanh approximation,
written without tanh: near -1 the tanh would cancel, the exponential does not.

Stock activations on a CPU differ between a vector and its tail at odd widths; here every element
goes through the same lanes. A product rounds after the activation and again after the
multiplication, so that the fused operator, a separate activation and a separate product have the
same bits, in the gradient too. CUDA tensors go to :mod:`.gpu`.
``kernels/reference/gated.py`` is the definition;
``pytest tests/kernels/gated`` exercises it.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import Contract
from ..cpu.register import covering
from ..dispatch import choose
from ..errors import ContractError
from . import cpu, gpu

__all__ = ["gelu", "gelu_mul", "silu", "silu_mul", "softcap"]

_Contracts = Mapping[torch.dtype, Contract]


def silu(x: Tensor) -> Tensor:
    """``x / (1 + exp(-x))`` elementwise, fp32 or bf16, any shape."""
    if x.is_cuda:
        return gpu.silu(x)
    return _apply(cpu.ACTIVATION, cpu.ACTIVATION_GRADIENTS, x)


def gelu(x: Tensor) -> Tensor:
    """The tanh approximation of gelu elementwise, fp32 or bf16, any shape."""
    if x.is_cuda:
        return gpu.gelu(x)
    return _apply(cpu.ACTIVATION_GELU, cpu.ACTIVATION_GELU_GRADIENTS, x)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` elementwise; both of one shape and dtype."""
    if gate.is_cuda:
        return gpu.silu_mul(gate, up)
    return _apply(cpu.GATED, cpu.GATED_GRADIENTS, *_alike(gate, up))


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) * up`` elementwise; both of one shape and dtype."""
    if gate.is_cuda:
        return gpu.gelu_mul(gate, up)
    return _apply(cpu.GATED_GELU, cpu.GATED_GELU_GRADIENTS, *_alike(gate, up))


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)`` elementwise, fp32 (logits), any shape."""
    if not 0 < cap < math.inf:
        raise ContractError(f"softcap {cap} is not positive and finite; leave the cap out")
    if x.is_cuda:
        return gpu.softcap(x, cap)
    covering(cpu.SOFTCAP, x)
    x = x.contiguous()
    if torch.is_grad_enabled() and x.requires_grad:
        return _Softcap.apply(x, float(cap))
    return choose(cpu.SOFTCAP[x.dtype].id).run(x.detach(), float(cap))


def _alike(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ContractError(
            f"gate is {gate.dtype} {tuple(gate.shape)}, up is {up.dtype} {tuple(up.shape)}; "
            "give both the same shape and dtype"
        )
    return gate, up


def _apply(contracts: _Contracts, gradients: _Contracts, *tensors: Tensor) -> Tensor:
    covering(contracts, tensors[0])
    tensors = tuple(each.contiguous() for each in tensors)
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return _Activated.apply(contracts, gradients, *tensors)
    return _forward(contracts, *tensors)


def _forward(contracts: _Contracts, *tensors: Tensor) -> Tensor:
    return choose(contracts[tensors[0].dtype].id).run(*tensors)


class _Activated(torch.autograd.Function):
    """An activation of one tensor, or the product of an activated gate and its partner."""

    @staticmethod
    def forward(ctx: Any, contracts: _Contracts, gradients: _Contracts, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.gradients = gradients
        return _forward(contracts, *tensors)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        tensors = ctx.saved_tensors
        got = choose(ctx.gradients[tensors[0].dtype].id).run(grads[0].contiguous(), *tensors)
        return None, None, *(got if isinstance(got, tuple) else (got,))


class _Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.cap = cap
        return choose(cpu.SOFTCAP[x.dtype].id).run(x, cap)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        (x,) = ctx.saved_tensors
        run = choose(cpu.SOFTCAP_GRADIENTS[x.dtype].id).run
        return run(grads[0].contiguous(), x, ctx.cap), None
