"""Rotary table and rotation on the CPU core: contracts and implementations."""

import torch
from torch import Tensor

from ..cpu.load import core
from ..cpu.register import is_bf16, register_core


def _table(
    variant: str, inv_freq: Tensor, positions: Tensor, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    half = inv_freq.numel()
    cos, sin = (torch.empty(positions.numel(), 2 * half, dtype=torch.float32) for _ in range(2))
    factor = torch.tensor([scaling], dtype=torch.float64)
    core(variant).call(
        "rotary_table", inv_freq, positions, factor, cos, sin, positions.numel(), half,
        torch.get_num_threads(),
    )
    return cos, sin


def _rotate(variant: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.empty_like(x)
    core(variant).call(
        "rotary", x, cos, sin, y, *x.shape, cos.shape[1], is_bf16(x), torch.get_num_threads()
    )
    return y


TABLE = register_core(
    _table,
    name="rotary_table.fp64",
    storages=("float32",),
    op="rotary_table",
    formula="cos and sin of position * inv_freq, times scaling, both halves alike",
    order="none: elementwise",
    rounding="fp64 without FMA, once to fp32",
    functions="sincos64.v1 (three-piece reduction by pi/2, fdlibm polynomials)",
    reference="zeromismatch.kernels.reference.rotary:rotary_table",
    gradient_rtol=0.0,
)
ROTARY = register_core(
    _rotate,
    name="rotary.half",
    op="rotary",
    formula="(a, b) -> (a cos - b sin, b cos + a sin) for the two halves of the table's width",
    order="none: two products and one sum, no FMA",
    rounding="fp32 inside, once to storage",
    functions="none",
    reference="zeromismatch.kernels.reference.rotary:apply_rotary",
    gradient_rtol=1e-5,
)
