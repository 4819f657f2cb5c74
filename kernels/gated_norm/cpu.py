"""Gated RMSNorm and the L2 norm on the CPU: contracts and implementations, forward and gradient."""

from typing import Any

import torch
from torch import Tensor

from ..cpu.load import core
from ..cpu.register import is_bf16, register_core
from ..row_operator import RowOperator

_REFERENCE = "zeromismatch.kernels.reference.gated_norm:"
_LANES = "sums over columns in 16 lanes, column c in lane c % 16, ascending, then lanes16.tree.v1"
_FIELDS: dict[str, Any] = {"gradient_rtol": 1e-5}


_ORDERS = ("silu_after", "sigmoid_after", "silu_before")  # as numbered in cpu/gated_norm.h


def _storage(x: Tensor, gate: Tensor, weight: Tensor) -> tuple[bool, bool, bool]:
    return is_bf16(x), gate.dtype == torch.float32, weight.dtype == torch.float32


def _gated_rmsnorm(
    variant: str, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, order: str
) -> Tensor:
    wide = torch.promote_types(x.dtype, weight.dtype)
    y = torch.empty(x.shape, dtype=wide if order == "silu_before" else x.dtype)
    core(variant).call(
        "gated_rmsnorm", x, gate, weight, y, *x.shape, group, eps, _ORDERS.index(order),
        *_storage(x, gate, weight), torch.get_num_threads(),
    )  # fmt: skip
    return y


def _gated_rmsnorm_grad(
    variant: str,
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    group: int,
    order: str,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    dw = torch.zeros(weight.shape) if initial is None else initial.clone()
    scratch = torch.empty(2, *x.shape)
    core(variant).call(
        "gated_rmsnorm_grad", dy, x, gate, weight, dx, dgate, dw, scratch, *x.shape, group, eps,
        _ORDERS.index(order), *_storage(x, gate, weight), torch.get_num_threads(),
    )  # fmt: skip
    return dx, dgate, dw


def _l2norm(variant: str, x: Tensor, eps: float, divide: bool, scale: float) -> Tensor:
    y = torch.empty(x.shape)
    core(variant).call(
        "l2norm", None, x, y, None, *x.shape, eps, divide, scale, is_bf16(x),
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def _l2norm_grad(
    variant: str, dy: Tensor, x: Tensor, eps: float, divide: bool, scale: float
) -> tuple[Tensor]:
    dx = torch.empty_like(x)
    core(variant).call(
        "l2norm", dy, x, None, dx, *x.shape, eps, divide, scale, is_bf16(x),
        torch.get_num_threads(),
    )  # fmt: skip
    return (dx,)


GATED_RMSNORM = RowOperator(
    name="gated_rmsnorm",
    tensors=3,
    parameters=(2,),
    forward=register_core(
        _gated_rmsnorm,
        name="gated_rmsnorm.lanes16",
        op="gated_rmsnorm",
        formula="silu_after: round(round(w round(x r)) silu(gate)); sigmoid_after: "
        "round((w x r) sigmoid(gate)); silu_before: round(w round(h r)), h = x silu(gate); "
        "r = 1 / sqrt(mean(h^2) + eps) per group",
        order=_LANES,
        rounding="where written: to x's dtype, the weighted one to the wider of x's and w's",
        functions="exp.cpu.v1, correctly rounded square root and division",
        reference=f"{_REFERENCE}gated_rmsnorm",
        **_FIELDS,
    ),
    gradient=register_core(
        _gated_rmsnorm_grad,
        name="gated_rmsnorm_grad.lanes16",
        op="gated_rmsnorm_grad",
        formula="dh = r fma(-h, c, dn), dn = w dm, c = sum(dn h) r r / G; dw = sum dm n; "
        "dgate = dact slope",
        order=f"{_LANES}; dw one FMA chain over rows, ascending",
        rounding="fp32 inside, rows rounded once, dw stays fp32",
        functions="exp.cpu.v1, correctly rounded square root and division",
        reference=f"{_REFERENCE}gated_rmsnorm_grad",
        **_FIELDS,
    ),
)
L2NORM = RowOperator(
    name="l2norm",
    tensors=1,
    forward=register_core(
        _l2norm,
        name="l2norm.lanes16",
        op="l2norm",
        formula="y = (x / s) scale or (x (1 / s)) scale, s = sqrt(sum(x^2) + eps), fp32",
        order=_LANES,
        rounding="x widened exactly, fp32 throughout",
        functions="correctly rounded square root and division",
        reference=f"{_REFERENCE}l2norm",
        **_FIELDS,
    ),
    gradient=register_core(
        _l2norm_grad,
        name="l2norm_grad.lanes16",
        op="l2norm_grad",
        formula="dx = (scale / s) fma(-x, c, dy), c = sum(dy x) / s / s",
        order=_LANES,
        rounding="fp32 inside, once to x's dtype",
        functions="correctly rounded square root and division",
        reference=f"{_REFERENCE}l2norm_grad",
        **_FIELDS,
    ),
)
