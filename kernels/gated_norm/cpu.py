"""Gated RMSNorm and the L2 norm on the CPU: contracts and implementations, forward and gradient."""

from typing import Any

from ..cpu.register import register_core
from ..reference import gated_norm as reference
from ..row_operator import RowOperator

_REFERENCE = "zeromismatch.kernels.reference.gated_norm:"
_LANES = "sums over columns in 16 lanes, column c in lane c % 16, ascending, then lanes16.tree.v1"
_FIELDS: dict[str, Any] = {"gradient_rtol": 1e-5}


def _plain(function: Any) -> Any:
    def run(variant: str, *arguments: Any) -> Any:
        return function(*arguments)

    return run


GATED_RMSNORM = RowOperator(
    name="gated_rmsnorm",
    tensors=3,
    parameters=(2,),
    forward=register_core(
        _plain(reference.gated_rmsnorm),
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
        _plain(reference.gated_rmsnorm_grad),
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
        _plain(reference.l2norm),
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
        _plain(reference.l2norm_grad),
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
