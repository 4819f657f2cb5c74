"""RMSNorm on the GPU whose weight is applied in fp32 before the one rounding: gpt_oss.

The kernels of :mod:`.gpu` with y = round((x r) w); the weight may be fp32 beside 16-bit rows.

Legend: M rows, H columns.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import choose
from ..errors import ContractError
from ..gpu.device import require
from ..gpu.operator import gpu_operator
from ..gpu.register import register_gpu, serving
from ..taps import tapped
from . import gpu


def _forward(
    run: Any, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Any:
    return run(x, weight, eps, False, residual, wide=True)


def _backward(
    run: Any,
    dy: Tensor,
    s: Tensor,
    weight: Tensor,
    eps: float,
    ds: Tensor | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return run(dy, s, weight, eps, False, ds, initial, wide=True)


reference = partial(_forward, gpu.reference)
reference_grad = partial(_backward, gpu.reference_grad)


@gpu_operator("zeromismatch::rmsnorm_wide")
def rmsnorm_wide_op(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y of [M, H]."""
    run = choose(serving(CONTRACTS, "rmsnorm_wide", x.dtype)).run
    return tapped("rmsnorm_wide", run(x, weight, eps))


@rmsnorm_wide_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@gpu_operator("zeromismatch::rmsnorm_wide_grad")
def rmsnorm_wide_grad_op(
    dy: Tensor, s: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(dx [M, H], dw [H]); dw is rounded in here, since a compiler may leave a rounding out."""
    dx, dw = choose(serving(GRADIENTS, "rmsnorm_wide_grad", s.dtype)).run(dy, s, weight, eps)
    return dx, dw.to(weight.dtype)


@rmsnorm_wide_grad_op.register_fake
def _(dy: Tensor, s: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape), s.new_empty(s.shape[1], dtype=weight.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _grad(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx, dw = rmsnorm_wide_grad_op(dy, x, weight, ctx.eps)
    return dx, dw, None


rmsnorm_wide_op.register_autograd(_grad, setup_context=_keep)


def rmsnorm_wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised ``x[..., H]`` times ``weight[H]`` of its dtype or fp32; differentiable once."""
    require("rmsnorm_wide", x, weight)
    fits = x.dim() > 0 and weight.shape == x.shape[-1:]
    if not fits or weight.dtype not in (x.dtype, torch.float32):
        raise ContractError(
            f"weight is {weight.dtype} {tuple(weight.shape)} for x {x.dtype} {tuple(x.shape)}; "
            "pass one weight per column, in x's dtype or float32"
        )
    return rmsnorm_wide_op(x.reshape(-1, x.shape[-1]), weight, float(eps)).view(x.shape)


CONTRACTS = register_gpu(
    {"triton": partial(_forward, gpu.forward)},
    name="rmsnorm_wide.lanes",
    op="rmsnorm_wide",
    formula="y = round(s r w), r = 1 / sqrt(mean(s s) + eps); s = x or round(x + residual)",
    order="as rmsnorm.lanes",
    rounding="weight widened exactly, fp32 inside, one rounding at the end; no FMA",
    functions="IEEE division and square root",
    reference="zeromismatch.kernels.rmsnorm.gpu_wide:reference",
)
GRADIENTS = register_gpu(
    {"triton": partial(_backward, gpu.backward)},
    name="rmsnorm_wide_grad.lanes",
    version="v2",
    op="rmsnorm_wide_grad",
    formula="dx = ds + r (g - s mean(g s) r r), g = dy w; dw = sum over rows of dy s r",
    order="as rmsnorm_grad.lanes",
    rounding="fp32 inside, dx once to storage, dw stays fp32; no FMA",
    functions="IEEE division and square root",
    reference="zeromismatch.kernels.rmsnorm.gpu_wide:reference_grad",
)
