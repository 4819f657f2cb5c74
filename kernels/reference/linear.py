"""The definition of ``linear.chain.*.cpu.v1`` and of its three gradients, in plain torch.

Every output element of y and dX is a sum of short chains: exact fp32 FMAs (:func:`.fma.fma32`) over
128 values of the reduced axis ascending, each chain from +0, the finished chains added ascending.
dW and db, whose reduced axis is tokens, are one unbroken chain instead, from +0 or from a given
accumulator. A bias is added to the finished sum in fp32, then the result is rounded once. bf16
operands are widened exactly. The Python loop over the reduced axis is the order; everything else is
elementwise.

Frozen: what the fast kernels must equal bit for bit.

Legend: T rows, K inputs, N outputs.
"""

import torch
from torch import Tensor

from .fma import fma32

SHORT = 128


def chain(a_MK: Tensor, b_KN: Tensor, initial_MN: Tensor | None = None) -> Tensor:
    """fp32 [M, N]: one ascending FMA chain over K per element."""
    a_MK, b_KN = a_MK.float(), b_KN.float()
    if initial_MN is None:
        total = torch.zeros(a_MK.shape[0], b_KN.shape[1], dtype=torch.float32, device=a_MK.device)
    else:
        total = initial_MN.clone()
    for k in range(a_MK.shape[1]):
        total = fma32(a_MK[:, k, None], b_KN[None, k], total)
    return total


def short_chains(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """fp32 [M, N]: chains over 128 values of K each, added in ascending order."""
    total = chain(a_MK[:, :SHORT], b_KN[:SHORT])
    for k in range(SHORT, a_MK.shape[1], SHORT):
        total = total + chain(a_MK[:, k : k + SHORT], b_KN[k : k + SHORT])
    return total


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[T, N] in ``out_dtype`` (the dtype of x by default)."""
    total = short_chains(x_TK, weight_NK.t())
    if bias_N is not None:
        total = total + bias_N.float()
    return total.to(out_dtype or x_TK.dtype)


def grad_input(grad_TN: Tensor, weight_NK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """dX [T, K]: short chains over N, in ``out_dtype`` (the weight's by default)."""
    return short_chains(grad_TN, weight_NK).to(out_dtype or weight_NK.dtype)


def grad_weight(
    grad_TN: Tensor,
    x_TK: Tensor,
    initial_NK: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_NK: Tensor | None = None,
) -> Tensor:
    """dW [N, K]: chains over tokens from ``initial`` (fp32), into ``out`` if given; else fp32."""
    total = chain(grad_TN.t(), x_TK, initial_NK).to(out_dtype or torch.float32)
    return total if out_NK is None else out_NK.copy_(total)


def grad_bias(
    grad_TN: Tensor,
    initial_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_N: Tensor | None = None,
) -> Tensor:
    """db [N]: chains over tokens from ``initial`` (fp32), into ``out`` if given; else fp32."""
    ones = torch.ones(1, grad_TN.shape[0], dtype=torch.float32, device=grad_TN.device)
    start = None if initial_N is None else initial_N[None]
    total = chain(ones, grad_TN, start)[0].to(out_dtype or torch.float32)
    return total if out_N is None else out_N.copy_(total)
