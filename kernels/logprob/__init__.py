"""From hidden states to the log-probability of a token, with one set of bits on both sides.

    logits = h W^T + b (fp32 accumulator)     z = logit / T     lp = (z_target - max z) - log sum
    exp(z - max z)

``lm_head`` is contract ``lm_head.chain.<dtype>.cpu.v1``: the linear chain, its fp32 result not
rounded. ``logprob`` is ``logprob.lanes16.float32.cpu.v1``: exact maximum, sum in 16 lanes and a
tree, own exp and log. The division by the temperature is always performed; it is exact at 1. It
happens before the softmax and never after: a chosen token's lp cannot be converted to another
temperature. By construction lp <= 0, and a NaN logit gives NaN. ``lm_head_logprob`` is the two
composed, same bits, without ever holding the logits of all rows (:mod:`.fused`). CUDA tensors go to
:mod:`.gpu`; there an id outside the vocabulary gives NaN.

``pytest tests/kernels/logprob`` exercises it. Legend: T rows, V vocabulary, H width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import ContractError
from ..linear import apply_chain
from ..linear import check as check_linear
from . import cpu as cpu  # registers the contracts
from . import gpu
from .fused import lm_head_logprob
from .rows import grad_rows, logprob_rows, targets_and_temperature

__all__ = ["lm_head", "lm_head_logprob", "logprob"]


def lm_head(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``h[..., H]`` times ``weight[V, H]`` transposed, plus ``bias[V]``: fp32 logits ``[..., V]``.

    fp32 or bf16 CPU tensors of one dtype. Differentiable once. Raises ContractError otherwise.
    """
    if h.is_cuda:
        return gpu.lm_head(h, weight, bias)
    check_linear(h, weight, bias, torch.float32)
    return apply_chain("lm_head", h, weight, bias)


def logprob(logits_TV: Tensor, targets_T: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """fp32 ``[T]``: the log-probability of ``targets[t]`` under ``logits[t] / temperature``.

    logits: fp32 ``[T, V]``. targets: int64 ``[T]``. temperature: a number, or fp32 ``[T]``.
    Differentiable once in the logits. Raises ContractError for other dtypes, targets outside the
    vocabulary, and temperatures that are not finite and positive (a greedy token has no lp at
    temperature 0; score it at the temperature it is compared at).
    """
    if logits_TV.is_cuda:
        return gpu.logprob(logits_TV, targets_T, temperature)
    if logits_TV.dtype != torch.float32 or logits_TV.dim() != 2 or logits_TV.device.type != "cpu":
        raise ContractError(
            f"logprob takes fp32 CPU logits [T, V], not {logits_TV.dtype} {tuple(logits_TV.shape)} "
            f"on {logits_TV.device}; kernels.logprob.lm_head returns them"
        )
    rows, vocabulary = logits_TV.shape
    targets_T, temperature_T = targets_and_temperature(targets_T, temperature, rows, vocabulary)
    if torch.is_grad_enabled() and logits_TV.requires_grad:
        return _Logprob.apply(logits_TV, targets_T, temperature_T)
    return logprob_rows(logits_TV.contiguous(), targets_T, temperature_T)[0]


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, temperature_T: Tensor) -> Tensor:
        logits_TV = logits_TV.contiguous()
        lp_T, row_max_T, log_sum_T = logprob_rows(logits_TV, targets_T, temperature_T)
        ctx.save_for_backward(logits_TV, targets_T, temperature_T, row_max_T, log_sum_T)
        return lp_T

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_T: Tensor
    ) -> tuple[Tensor, None, None]:
        return grad_rows(*ctx.saved_tensors, grad_T=grad_T.contiguous()), None, None
