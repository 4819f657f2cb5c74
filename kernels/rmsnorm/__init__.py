"""RMSNorm, plain and with a residual, forward and backward, the same bits for every batch.

    y = x * r * w,  r = 1 / sqrt(mean(x ** 2) + eps);   unit_offset (Gemma): (1 + w) instead of w

The mean of squares is taken in 16 fixed lanes and one written tree; square root and division are
correctly rounded. Rounding points are those of transformers' Llama: the normalised value is
rounded to storage, then the product with the weight. With ``unit_offset`` there is one rounding,
at the end; :mod:`.wide` has one with the weight itself. A row's result, and the gradient with
respect to it, depend on that row and the weight alone. The weight's gradient is one chain over the
rows in the order of the call. CUDA tensors go to :mod:`.gpu`, whose contract fixes other lanes.
``kernels/reference/rmsnorm.py`` is the definition; ``pytest tests/kernels/rmsnorm`` exercises it.

Legend: T rows, H width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..accumulation import chain_of
from ..cpu.register import covering
from ..dispatch import choose
from ..errors import ContractError
from . import cpu, gpu
from .wide import rmsnorm_wide

__all__ = ["rmsnorm", "rmsnorm_backward", "rmsnorm_residual", "rmsnorm_wide"]


def rmsnorm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Normalise the last dimension of ``x [..., H]``, fp32 or bf16; ``weight [H]`` of its dtype."""
    if x.dim() == 4 and x.stride(1) < x.stride(2):  # heads before tokens: a token's rows together
        y = rmsnorm(x.transpose(1, 2), weight, eps, unit_offset=unit_offset)
        return y.transpose(1, 2)
    if x.is_cuda:
        return gpu.rmsnorm(x, weight, eps, unit_offset=unit_offset)
    rows = _rows(x, weight)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y = _RMSNorm.apply(rows, None, weight.contiguous(), eps, unit_offset)
    else:
        y = _forward(rows, weight.contiguous(), eps, unit_offset, None)
    return y.view(x.shape)


def rmsnorm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """``(y, s)``: ``s = round(x + residual)`` and ``y = rmsnorm(s)``, shape and dtype of x."""
    if x.is_cuda:
        return gpu.rmsnorm_residual(x, residual, weight, eps, unit_offset=unit_offset)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ContractError(
            f"residual is {residual.dtype} {tuple(residual.shape)}, x is {x.dtype} "
            f"{tuple(x.shape)}; give both the same shape and dtype"
        )
    rows, other = _rows(x, weight), _rows(residual, weight)
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, residual, weight)):
        y, s = _RMSNorm.apply(rows, other, weight.contiguous(), eps, unit_offset)
    else:
        y, s = _forward(rows, weight.contiguous(), eps, unit_offset, other)
    return y.view(x.shape), s.view(x.shape)


def rmsnorm_backward(
    dy: Tensor,
    s: Tensor,
    weight: Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
    ds: Tensor | None = None,
    accumulate_into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(dx [T, H], dw fp32 [H])`` for the normalised rows ``s [T, H]``.

    ds: gradient that reaches ``s`` by another path (the residual's). accumulate_into: an fp32
    ``[H]`` whose chains continue, so that micro-batches give the bits of one batch.
    """
    if s.is_cuda:
        settings = (dy, s, weight, eps)
        return gpu.rmsnorm_backward(
            *settings, unit_offset=unit_offset, ds=ds, accumulate_into=accumulate_into
        )
    run = choose(covering(cpu.GRADIENTS, s).id).run
    ds = None if ds is None else ds.contiguous()
    dx, dw = run(dy.contiguous(), s, weight, eps, unit_offset, ds, accumulate_into)
    return dx, dw if accumulate_into is None else accumulate_into.copy_(dw)


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    covering(cpu.CONTRACTS, x)
    if x.dim() == 0 or weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ContractError(
            f"weight is {weight.dtype} {tuple(weight.shape)} for x {x.dtype} {tuple(x.shape)}; "
            "pass one weight per column, in x's dtype"
        )
    return x.reshape(-1, x.shape[-1]).contiguous()


def _forward(
    rows: Tensor, weight: Tensor, eps: float, unit_offset: bool, residual: Tensor | None
) -> Any:
    run = choose(covering(cpu.CONTRACTS, rows).id).run
    return run(rows, weight, eps, unit_offset, residual)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
    ) -> Any:
        out = _forward(x, weight, eps, unit_offset, residual)
        ctx.save_for_backward(x if residual is None else out[1], weight)
        ctx.settings = (eps, unit_offset, residual is not None)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        s, weight = ctx.saved_tensors
        eps, unit_offset, has_residual = ctx.settings
        ds = grads[1] if has_residual else None
        chain = chain_of(weight, "rmsnorm") if ctx.needs_input_grad[2] else None
        dx, dw = rmsnorm_backward(
            grads[0], s, weight, eps, unit_offset=unit_offset, ds=ds, accumulate_into=chain
        )
        own = dw.to(weight.dtype) if chain is None else None
        return dx, dx if has_residual else None, own, None, None
