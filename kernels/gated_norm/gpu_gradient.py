"""Gradients of the gated norms and of the L2 norm on the GPU: the CPU's formulas.

Contracts ``gated_rmsnorm_grad.wide.<dtype>.sm90.v1`` and ``l2norm_grad.wide...``: see
:mod:`..gpu.row_gradient`. What the forward rounded before it was weighted is rounded here too.

Legend: T rows, H columns, G columns of a group.
"""

from functools import partial

import torch
from torch import Tensor

from ..gpu.row_gradient import register_gradient, row_by_row, sigmoid64, tree_sum, wide


def gated_rmsnorm(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, order: str
) -> tuple[Tensor, ...]:
    """dx, dgate; dw [T, H] by row."""
    after, z, w, up = order != "silu_before", wide(gate), wide(weight), wide(dy)
    sig = sigmoid64(z)
    act, slope = z * sig, sig * (1.0 + z * (1.0 - sig))
    if order == "sigmoid_after":
        act, slope = sig, sig * (1.0 - sig)
    h = (wide(x) if after else wide(x) * act).unflatten(1, (-1, group))
    r = (1.0 / torch.sqrt(tree_sum(h * h) / group + eps))[..., None]
    n = (h * r).flatten(1)
    if order != "sigmoid_after":
        n = wide(n.to(x.dtype))
    d_m = up * act if after else up
    d_n = (w * d_m).unflatten(1, (-1, group))
    c = tree_sum(d_n * h)[..., None] * r * r / group
    d_h = (r * (d_n - h * c)).flatten(1)
    m = w * n
    if order == "silu_after":
        m = wide(m.to(torch.promote_types(x.dtype, weight.dtype)))
    d_act = up * m if after else d_h * wide(x)
    d_x = d_h if after else d_h * act
    return d_x.to(x.dtype), (d_act * slope).to(gate.dtype), d_m * n


def l2norm(dy: Tensor, x: Tensor, eps: float, divide: bool, scale: float) -> tuple[Tensor]:
    """dx; the same for both forms."""
    h, up = wide(x), wide(dy)
    square = tree_sum(h * h)[:, None] + eps
    c = tree_sum(up * h)[:, None] / square
    return ((scale / torch.sqrt(square) * (up - h * c)).to(x.dtype),)


reference_gated_rmsnorm = partial(row_by_row, gated_rmsnorm, 3, 1)
reference_l2norm = partial(row_by_row, l2norm, 2, 0)

GRADIENTS = {
    op: register_gradient(
        formula,
        name=f"{op}_grad.wide",
        rows=rows,
        chains=chains,
        text=f"as {op}_grad.lanes16.<dtype>.cpu.v1",
        reference=f"zeromismatch.kernels.gated_norm.gpu_gradient:reference_{op}",
    )
    for op, formula, rows, chains in (
        ("gated_rmsnorm", gated_rmsnorm, 3, 1),
        ("l2norm", l2norm, 2, 0),
    )
}
