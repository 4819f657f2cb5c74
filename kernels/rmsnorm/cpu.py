"""RMSNorm on the CPU core: contracts and implementations, forward and gradient."""

import torch
from torch import Tensor

from ..cpu.load import core
from ..cpu.register import is_bf16, register_core


def _run(
    variant: str,
    x: Tensor,
    weight: Tensor,
    eps: float,
    unit_offset: bool = False,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    s = None if residual is None else torch.empty_like(x)
    core(variant).call(
        "rmsnorm", x, residual, weight, y, s, *x.shape, float(eps), unit_offset, is_bf16(x),
        torch.get_num_threads(),
    )
    return y if s is None else (y, s)


CONTRACTS = register_core(
    _run,
    name="rmsnorm.lanes16",
    op="rmsnorm",
    formula="y = s r w (unit_offset: s r (1 + w)), r = 1 / sqrt(mean(s^2) + eps), "
    "s = x or round(x + residual)",
    order="sum of squares in 16 lanes, column c in lane c % 16, ascending, then lanes16.tree.v1",
    rounding="s r rounded to storage, then its product with w; unit_offset: once at the end",
    functions="correctly rounded square root and division",
    reference="zeromismatch.kernels.reference.rmsnorm:rmsnorm",
    gradient_rtol=1e-5,
)


def _grad(
    variant: str,
    dy: Tensor,
    s: Tensor,
    weight: Tensor,
    eps: float,
    unit_offset: bool = False,
    ds: Tensor | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(s)
    dw = torch.zeros(s.shape[1], dtype=torch.float32) if initial is None else initial.clone()
    rstd = torch.empty(s.shape[0], dtype=torch.float32)
    core(variant).call(
        "rmsnorm_backward", dy, s, weight, ds, dx, dw, rstd, *s.shape, float(eps), unit_offset,
        is_bf16(s), torch.get_num_threads(),
    )
    return dx, dw


GRADIENTS = register_core(
    _grad,
    name="rmsnorm_grad.lanes16",
    op="rmsnorm_grad",
    formula="dx = ds + r (g - s sum(g s) r r / H), g = dy w; dw = sum over rows of dy round(s r)",
    order="row sums in 16 lanes as in the forward; dw one FMA chain over rows, ascending",
    rounding="fp32 inside, dx once to storage, dw stays fp32",
    functions="correctly rounded square root and division",
    reference="zeromismatch.kernels.reference.rmsnorm:rmsnorm_grad",
    gradient_rtol=1e-5,
)
