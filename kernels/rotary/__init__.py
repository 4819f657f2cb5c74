"""Rotary position embedding: one fp32 table made in fp64, and the rotation, forward and backward.

The table's angle, sine and cosine are computed per position in fp64 with plain arithmetic and
rounded once, so a position has the same entries in every batch and on every machine, far beyond
the positions where fp32 phases or bf16 tables go wrong. The rotation uses two products and one
sum without FMA: in fp32 it equals torch's ``x * cos + rotate_half(x) * sin`` bit for bit. Its
gradient is the rotation by the opposite angle, by the same kernel. Columns past the table's width
(partial rotary) pass through. CUDA tensors go to :mod:`.gpu`; the table is made on the CPU.

``kernels/reference/rotary.py`` is the definition; ``pytest tests/kernels/rotary`` exercises it.

Legend: T tokens, D head size, R rotated columns (even, at most D).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..cpu.register import covering
from ..dispatch import choose
from ..errors import ContractError
from . import cpu, gpu
from . import gpu_fused as gpu_fused  # registers its own

__all__ = ["apply_rotary", "rotary_table"]

MAX_ANGLE = math.pi / 2 * 2**20


def rotary_table(
    inv_freq: Tensor, positions: Tensor, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """``cos, sin`` fp32 ``[T, R]`` from fp64 ``inv_freq [R / 2]`` and integer ``positions [T]``."""
    if positions.is_cuda:
        cos, sin = rotary_table(inv_freq.cpu(), positions.cpu(), scaling)
        return cos.to(positions.device), sin.to(positions.device)
    if inv_freq.dtype != torch.float64 or inv_freq.dim() != 1 or inv_freq.device.type != "cpu":
        raise ContractError(
            f"inv_freq is {inv_freq.dtype} {tuple(inv_freq.shape)} on {inv_freq.device.type}; "
            "compute it in fp64 as one CPU vector"
        )
    if positions.dim() != 1 or positions.is_floating_point() or positions.device.type != "cpu":
        raise ContractError(
            f"positions are {positions.dtype} {tuple(positions.shape)} on {positions.device.type}; "
            "pass one integer CPU vector, one entry per token"
        )
    positions = positions.to(torch.int64).contiguous()
    if positions.numel() and inv_freq.numel():
        largest = float(positions.abs().max()) * float(inv_freq.abs().max())
        if not largest < MAX_ANGLE:
            raise ContractError(
                f"an angle of {largest:.4g} is beyond 2**20 quarter turns; use smaller positions"
            )
    run = choose(cpu.TABLE[torch.float32].id).run
    return run(inv_freq.detach().contiguous(), positions, float(scaling))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of ``x [T, heads, D]`` (fp32 or bf16) by fp32 ``cos, sin [T, R]``."""
    if x.is_cuda:
        return gpu.apply_rotary(x, cos, sin)
    covering(cpu.ROTARY, x)
    fits = x.dim() == 3 and cos.dim() == 2 and cos.shape == sin.shape and cos.shape[0] == x.shape[0]
    if not fits or cos.shape[1] % 2 or cos.shape[1] > x.shape[2]:
        raise ContractError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit x {tuple(x.shape)}; "
            "pass x [T, heads, D] and tables [T, R] with R even and at most D"
        )
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ContractError(
            f"tables are {cos.dtype} and {sin.dtype}; keep them in fp32 (rotary_table makes them), "
            "bf16 tables are wrong by up to 2 at long positions"
        )
    x, cos, sin = x.contiguous(), cos.detach().contiguous(), sin.detach().contiguous()
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotary.apply(x, cos, sin)
    return _rotate(x, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return choose(covering(cpu.ROTARY, x).id).run(x.detach(), cos, sin)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        cos, sin = ctx.saved_tensors
        first, second = sin.chunk(2, dim=1)
        back = -torch.cat((second, first), dim=1)  # the transposed rotation; -sin when halves agree
        return _rotate(grads[0].contiguous(), cos, back), None, None
