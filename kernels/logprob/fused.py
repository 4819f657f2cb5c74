"""LM head and logprob in one function that never holds the logits of all rows.

Rows are independent, so blocks of rows are schedule: the bits are those of ``logprob(lm_head(h))``.
Forward keeps two numbers per row, the maximum and the log of the sum, and the logits of the first
blocks, up to KEPT_FLOATS of them. Backward computes the other blocks' logits again, turns each
block's into their gradient in place, and adds to dH (row by row) and to dW and db (one chain over
all tokens, ascending: each block continues where the one before stopped).

A block holds at most BLOCK_FLOATS logits, and at most MOST_ROWS rows. Measured on 2 cores at
V = 49152, H = 576, 512 rows: forward and backward with 128 or 256 rows a block take about 0.9 of
the time with 64, since every block reads and writes all of dW once.

Legend: T rows, V vocabulary, H width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..accumulation import chain_of
from ..dispatch import choose
from ..errors import ContractError
from ..linear import check as check_linear
from ..linear import contract_id, grad_bias, grad_input, grad_weight, scoped
from . import gpu_head
from .rows import grad_rows, logprob_rows, targets_and_temperature

BLOCK_FLOATS = 1 << 24
MOST_ROWS, LEAST_ROWS = 256, 16
KEPT_FLOATS = 1 << 22
"""16 MiB: a whole update of a small model, a few rows of a large one."""


def lm_head_logprob(
    h_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    bias_V: Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """fp32 ``[T]``: bit-equal to ``logprob(lm_head(h, weight, bias), targets, temperature)``.

    h, weight, bias: fp32 or bf16 CPU tensors of one dtype. Differentiable once in all three; the
    gradients are rounded once to their dtype. Raises ContractError as the two functions do.
    """
    if h_TH.is_cuda:
        return gpu_head.lm_head_logprob(h_TH, weight_VH, targets_T, bias_V, temperature)
    check_linear(h_TH, weight_VH, bias_V, torch.float32)
    if h_TH.dim() != 2:
        raise ContractError(
            f"h must be [T, H], not {tuple(h_TH.shape)}; flatten the leading axes first"
        )
    rows, vocabulary = h_TH.shape[0], weight_VH.shape[0]
    targets_T, temperature_T = targets_and_temperature(targets_T, temperature, rows, vocabulary)
    wants_grad = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (h_TH, weight_VH, bias_V)
    )
    if wants_grad:
        return _LmHeadLogprob.apply(h_TH, weight_VH, bias_V, targets_T, temperature_T)
    return _forward(h_TH.contiguous(), weight_VH, bias_V, targets_T, temperature_T, [], 0)[0]


def _blocks(rows: int, vocabulary: int) -> Iterator[slice]:
    size = max(LEAST_ROWS, min(MOST_ROWS, BLOCK_FLOATS // max(1, vocabulary)))
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def _forward(
    h_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    temperature_T: Tensor,
    kept: list[Tensor],
    most_kept: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob, maximum and log of the sum of each row; first blocks' logits are put into kept."""
    head = choose(contract_id("lm_head", h_TH.dtype)).run
    lp_T, row_max_T, log_sum_T = (torch.empty(h_TH.shape[0], dtype=torch.float32) for _ in range(3))
    for block in _blocks(h_TH.shape[0], weight_VH.shape[0]):
        logits = head(h_TH[block], weight_VH, bias_V)
        lp_T[block], row_max_T[block], log_sum_T[block] = logprob_rows(
            logits, targets_T[block], temperature_T[block]
        )
        most_kept -= logits.numel()
        if most_kept >= 0:
            kept.append(logits)
    return lp_T, row_max_T, log_sum_T


class _LmHeadLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        temperature_T: Tensor,
    ) -> Tensor:
        h_TH = h_TH.contiguous()
        ctx.kept = []
        with scoped(weight_VH, trains=ctx.needs_input_grad[1]):
            lp_T, row_max_T, log_sum_T = _forward(
                h_TH, weight_VH, bias_V, targets_T, temperature_T, ctx.kept, KEPT_FLOATS
            )
        ctx.save_for_backward(
            h_TH, weight_VH, bias_V, targets_T, temperature_T, row_max_T, log_sum_T
        )
        return lp_T

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_T: Tensor
    ) -> tuple[Tensor | None, ...]:
        h_TH, weight_VH, bias_V, *row_tensors = ctx.saved_tensors
        wants_h, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_h = torch.empty_like(h_TH) if wants_h else None
        d_weight, own_weight = _start(weight_VH, wants_weight)
        d_bias, own_bias = _start(bias_V, wants_bias)
        head = choose(contract_id("lm_head", h_TH.dtype)).run
        grad_T = grad_T.contiguous()
        kept, ctx.kept = iter(ctx.kept), []  # they are overwritten: a second backward has none
        with scoped(weight_VH, trains=wants_weight):
            for block in _blocks(h_TH.shape[0], weight_VH.shape[0]):
                logits = next(kept, None)
                if logits is None:
                    logits = head(h_TH[block], weight_VH, bias_V)
                rows = (each[block] for each in row_tensors)
                d_logits = grad_rows(logits, *rows, grad_T=grad_T[block], out_TV=logits)
                if d_h is not None:
                    d_h[block] = grad_input(d_logits, weight_VH)
                if d_weight is not None:
                    grad_weight(d_logits, h_TH[block], accumulate_into=d_weight)
                if d_bias is not None:
                    grad_bias(d_logits, accumulate_into=d_bias)
        return (
            d_h,
            d_weight.to(weight_VH.dtype) if d_weight is not None and own_weight else None,
            None if d_bias is None or bias_V is None or not own_bias else d_bias.to(bias_V.dtype),
            None,
            None,
        )


def _start(weight: Tensor | None, wanted: bool) -> tuple[Tensor | None, bool]:
    """Where a gradient is summed, and whether autograd gets it: not if micro-batches share it."""
    if weight is None or not wanted:
        return None, False
    chain = chain_of(weight, "lm_head")
    if chain is not None:
        return chain, False
    return torch.zeros(weight.shape, dtype=torch.float32), True
