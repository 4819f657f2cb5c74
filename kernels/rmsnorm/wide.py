"""RMSNorm whose weight is applied in fp32 before the one rounding, on the CPU: gpt_oss.

    y = round(x * r * w),  r = 1 / sqrt(mean(x ** 2) + eps)

Contract ``rmsnorm_wide.lanes16.<dtype>.cpu.v1``: the order of ``rmsnorm.lanes16``, but a bf16
row is not rounded between its two products. The weight may be fp32 beside bf16 rows, which is how
transformers keeps these norms; a bf16 weight is widened exactly. For fp32 rows the numbers are
those of ``rmsnorm``. ``kernels/reference/rmsnorm_wide.py`` is the definition;
``pytest tests/kernels/rmsnorm`` exercises it. Left out: a fused residual in the public function,
which no model here needs with it.

Legend: T rows, H width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..accumulation import chain_of
from ..cpu.load import core
from ..cpu.register import covering, is_bf16, register_core
from ..dispatch import choose
from ..errors import ContractError
from . import gpu_wide

WIDE = 2
"""``Weighting`` of ``kernels/cpu/rows.h``."""


def _run(
    variant: str, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    s = None if residual is None else torch.empty_like(x)
    core(variant).call(
        "rmsnorm", x, residual, weight.float(), y, s, *x.shape, float(eps), WIDE, is_bf16(x),
        torch.get_num_threads(),
    )  # fmt: skip
    return y if s is None else (y, s)


def _grad(
    variant: str,
    dy: Tensor,
    s: Tensor,
    weight: Tensor,
    eps: float,
    ds: Tensor | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(s)
    dw = torch.zeros(s.shape[1], dtype=torch.float32) if initial is None else initial.clone()
    rstd = torch.empty(s.shape[0], dtype=torch.float32)
    core(variant).call(
        "rmsnorm_backward", dy, s, weight.float(), ds, dx, dw, rstd, *s.shape, float(eps), WIDE,
        is_bf16(s), torch.get_num_threads(),
    )  # fmt: skip
    return dx, dw


CONTRACTS = register_core(
    _run,
    name="rmsnorm_wide.lanes16",
    op="rmsnorm_wide",
    formula="y = s r w, r = 1 / sqrt(mean(s^2) + eps), s = x or round(x + residual)",
    order="sum of squares in 16 lanes, column c in lane c % 16, ascending, then lanes16.tree.v1",
    rounding="weight widened exactly, fp32 inside, one rounding at the end",
    functions="correctly rounded square root and division",
    reference="zeromismatch.kernels.reference.rmsnorm_wide:rmsnorm_wide",
    gradient_rtol=1e-5,
)
GRADIENTS = register_core(
    _grad,
    name="rmsnorm_wide_grad.lanes16",
    op="rmsnorm_wide_grad",
    formula="dx = ds + r (g - s sum(g s) r r / H), g = dy w; dw = sum over rows of dy s r",
    order="row sums in 16 lanes as in the forward; dw one FMA chain over rows, ascending",
    rounding="fp32 inside, dx once to storage, dw stays fp32",
    functions="correctly rounded square root and division",
    reference="zeromismatch.kernels.reference.rmsnorm_wide:rmsnorm_wide_grad",
    gradient_rtol=1e-5,
)


def rmsnorm_wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise ``x [..., H]``, fp32 or bf16; ``weight [H]`` of its dtype or fp32. Raises
    ContractError for anything else; differentiable once."""
    if x.is_cuda:
        return gpu_wide.rmsnorm_wide(x, weight, eps)
    covering(CONTRACTS, x)
    shapes = x.dim() > 0 and weight.shape == x.shape[-1:]
    if not shapes or weight.dtype not in (x.dtype, torch.float32) or not weight.is_cpu:
        raise ContractError(
            f"weight is {weight.dtype} {tuple(weight.shape)} on {weight.device} for x {x.dtype} "
            f"{tuple(x.shape)}; pass one weight per column, in x's dtype or float32"
        )
    rows, weight = x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous()
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNormWide.apply(rows, weight, eps).view(x.shape)
    return choose(CONTRACTS[x.dtype].id).run(rows, weight, eps).view(x.shape)


class _RMSNormWide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return choose(CONTRACTS[x.dtype].id).run(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        chain = chain_of(weight, "rmsnorm") if ctx.needs_input_grad[1] else None
        run = choose(GRADIENTS[x.dtype].id).run
        dx, dw = run(grads[0].contiguous(), x, weight, ctx.eps, None, chain)
        if chain is not None:
            chain.copy_(dw)
        return dx, dw.to(weight.dtype) if chain is None else None, None
