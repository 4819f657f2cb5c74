"""Norms of recurrent layers: gated RMSNorm in three orders, and the L2 norm of q and k.

    silu_after     round(round(w round(x r)) silu(gate))     Qwen3-Next: norm before gate
    sigmoid_after  round((w x r) sigmoid(gate))              Kimi-Linear: fp32 until the end
    silu_before    round(w round(h r)), h = x silu(gate)     Zamba2, Nemotron-H: in groups

Rounding points are those of transformers' code. x, gate and weight may each be fp32 or bf16: in a
bf16 Nemotron-H the state's output is fp32 beside a bf16 gate. Means in 16 fixed lanes and one
tree; square roots and divisions correctly rounded. ``kernels/reference/gated_norm.py`` is the
definition; ``pytest tests/kernels/gated_norm`` exercises it. CUDA tensors go to :mod:`.gpu`, whose
contracts have another order.

Legend: T rows, H columns.
"""

import torch
from torch import Tensor

from ..errors import ContractError
from ..reference.gated_norm import Order
from . import cpu, gpu

__all__ = ["Order", "gated_rmsnorm", "l2norm"]


def gated_rmsnorm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, order: Order, group: int | None = None
) -> Tensor:
    """Normalise and gate the last dimension of ``x [..., H]``, gate of its shape, weight ``[H]``.

    group: columns that share a mean (silu_before), H by default. The output has x's dtype;
    silu_before gives the wider of x's and the weight's, as transformers' code does.
    """
    width = x.shape[-1] if x.dim() else 0
    group = group or width
    if gate.shape != x.shape or weight.shape != (width,) or width % group:
        raise ContractError(
            f"gated_rmsnorm takes x and gate of one shape and a weight per column in whole groups, "
            f"not {tuple(x.shape)}, {tuple(gate.shape)}, {tuple(weight.shape)} in groups of "
            f"{group}; check which layer they belong to"
        )
    if order != "silu_before" and group != width:
        raise ContractError(f"{order} has no groups; leave group out")
    rows, gates = (each.reshape(-1, width) for each in (x, gate))
    given = (rows, gates, weight, float(eps), group, order)
    y = gpu.serve("gated_rmsnorm", *given) if x.is_cuda else cpu.GATED_RMSNORM(*given)
    return y.view(x.shape)


def l2norm(x: Tensor, eps: float, *, divide: bool, scale: float = 1.0) -> Tensor:
    """fp32 ``(x / s) scale``, ``s = sqrt(sum(x ** 2) + eps)`` over the last dimension.

    divide: by s (Kimi-Linear), else times 1 / s (Qwen3-Next). scale: a last factor, q's.
    """
    if x.dim() == 0 or x.dtype not in (torch.float32, torch.bfloat16):
        raise ContractError(f"l2norm takes rows of float32 or bfloat16, not {x.dtype}; convert")
    given = (x.reshape(-1, x.shape[-1]), float(eps), divide, float(scale))
    return (gpu.serve("l2norm", *given) if x.is_cuda else cpu.L2NORM(*given)).view(x.shape)
