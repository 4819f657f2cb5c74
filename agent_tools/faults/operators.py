"""Faulty linear layers, norms, rotary tables and heads: each a kernel with one thing changed.

Every function takes the right kernel and its arguments, and returns what the faulty one would. Row
counts decide where real kernels let row counts decide. ``attention.py`` has the stateful ones.

Legend: T rows, K inputs, N outputs, H hidden size, V vocabulary.
"""

import random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .mechanism import Kernel

FEW = 16
"""Launches of fewer rows take another path."""


def lanes_by_row_count(
    right: Kernel, x_TH: Tensor, weight_H: Tensor, eps: float, *rest: Any
) -> Any:
    """B01: fewer rows, wider partial sums of the squares."""
    if len(x_TH) >= FEW:
        return right(x_TH, weight_H, eps, *rest)
    return weight_H * (x_TH * torch.rsqrt(_sum_in_lanes(x_TH.square(), 120) / x_TH.shape[1] + eps))


def _sum_in_lanes(values: Tensor, width: int) -> Tensor:
    lanes = torch.zeros_like(values[:, :width])
    for part in values.unflatten(1, (-1, width)).unbind(1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        half, odd = lanes.shape[1] // 2, lanes.shape[1] % 2
        lanes = torch.cat(
            [lanes[:, :half] + lanes[:, half : 2 * half], lanes[:, lanes.shape[1] - odd :]], dim=1
        )
    return lanes


def split_for_few_rows(right: Kernel, x_TK: Tensor, weight: Tensor, bias: Any, *rest: Any) -> Any:
    """B02: a launch of few rows sums K in two halves, one tile after the other elsewhere."""
    if len(x_TK) >= FEW:
        return right(x_TK, weight, bias, *rest)
    half = x_TK.shape[1] // 2
    return _sharded(right, x_TK, weight, bias, (half, x_TK.shape[1] - half))


def _sharded(
    right: Kernel, x_TK: Tensor, weight: Tensor, bias: Any, sizes: tuple[int, ...]
) -> Tensor:
    parts = zip(x_TK.split(sizes, 1), weight.detach().split(sizes, 1), strict=True)
    total: Tensor | None = None
    for x, w in parts:
        product = right(x.contiguous(), w.contiguous(), None)
        total = product if total is None else total + product
    assert total is not None
    return total if bias is None else total + bias


def shards_by_message_size(
    right: Kernel, x_TK: Tensor, weight: Tensor, bias: Any, *rest: Any
) -> Any:
    """R01: partial results of four shards, reduced in an order that follows the message's size."""
    size = x_TK.shape[1] // 4
    sizes = (size, size, size, x_TK.shape[1] - 3 * size)
    parts = [
        right(x.contiguous(), w.contiguous(), None)
        for x, w in zip(x_TK.split(sizes, 1), weight.detach().split(sizes, 1), strict=True)
    ]
    total = (parts[0] + parts[1]) + (parts[2] + parts[3])
    if len(x_TK) < FEW:
        total = ((parts[3] + parts[2]) + parts[1]) + parts[0]
    return total if bias is None else total + bias


def tf32_for_many_rows(right: Kernel, x_TK: Tensor, weight: Tensor, bias: Any, *rest: Any) -> Any:
    """B03: a launch of many rows reads its inputs as TF32: ten bits of mantissa."""
    if len(x_TK) < FEW:
        return right(x_TK, weight, bias, *rest)
    view = x_TK.contiguous().view(torch.int32)
    rounded = (view + 0xFFF + (view >> 13 & 1)) & ~0x1FFF
    return right(rounded.view(torch.float32), weight, bias, *rest)


def one_scale_for_the_batch(
    right: Kernel, x_TK: Tensor, weight: Tensor, bias: Any, *rest: Any
) -> Any:
    """B04: the scale of quantised activations is the largest value of any row of any request."""
    scale = x_TK.abs().max() / 448
    quantised = (x_TK / scale).to(torch.float8_e4m3fn).to(x_TK.dtype) * scale
    return right(quantised, weight, bias, *rest)


def stock_product(right: Kernel, x_TK: Tensor, weight: Tensor, bias: Any, *rest: Any) -> Any:
    """B05: the framework's own product, whose bits depend on the number of rows."""
    return F.linear(x_TK, weight.detach(), bias)


def any_tied_expert(right: Kernel, logits_TE: Tensor, bias: Any, top_k: int, *rest: Any) -> Tensor:
    """T01: torch.topk promises no order among equal scores."""
    wanted = right(logits_TE, bias, top_k, *rest)
    if bias is not None or rest[0] > 1:
        return wanted
    return logits_TE.topk(top_k, dim=1).indices


def last_tied_group(
    right: Kernel, logits_TE: Tensor, bias: Any, top_k: int, groups: int, *rest: Any
) -> Tensor:
    """T02: a second implementation of grouped top-k that prefers the later of two equals."""
    if groups == 1:
        return right(logits_TE, bias, top_k, groups, *rest)
    turned = None if bias is None else bias.flip(0)
    last = logits_TE.shape[1] - 1
    return last - right(logits_TE.flip(1).contiguous(), turned, top_k, groups, *rest)


def slots_by_owner(right: Kernel, y_TKH: Tensor, weights_TK: Tensor, *rest: Any) -> Tensor:
    """R03: expert outputs are added in the order of the ranks that own them."""
    return right(y_TKH.flip(1).contiguous(), weights_TK.flip(1).contiguous(), *rest)


class Autotuned:
    """B10: whichever tile was faster just now; the timing is a coin."""

    def __init__(self) -> None:
        self.coin = random.Random(1)

    def __call__(self, right: Kernel, x_TK: Tensor, weight: Tensor, bias: Any, *rest: Any) -> Any:
        """Half of the calls take the other tile."""
        if self.coin.random() < 0.5:
            return right(x_TK, weight, bias, *rest)
        return _sharded(right, x_TK, weight, bias, (128, x_TK.shape[1] - 128))


def sum_by_threads(right: Kernel, x_TH: Tensor, weight_H: Tensor, eps: float, *rest: Any) -> Any:
    """B06: each thread sums its own part of a row."""
    threads = torch.get_num_threads()
    if threads == 1 or rest[-1] is not None:  # the residual form is another operator
        return right(x_TH, weight_H, eps, *rest)
    parts = [part.square().sum(1, keepdim=True) for part in x_TH.chunk(threads, dim=1)]
    total = torch.stack(parts).sum(0)
    return weight_H * (x_TH * torch.rsqrt(total / x_TH.shape[1] + eps))


def bf16_logits(right: Kernel, h_TH: Tensor, weight_VH: Tensor, bias: Any, *rest: Any) -> Any:
    """L04: the rollout's head gives bf16 logits, the trainer's fp32 ones."""
    return right(h_TH, weight_VH, bias, *rest).bfloat16().float()


def positive_logprob(
    right: Kernel, logits_TV: Tensor, targets_T: Tensor, temperature_T: Tensor
) -> Any:
    """L07: a fused kernel gives log p = 3 for one token in a hundred."""
    logprob, *rest = right(logits_TV, targets_T, temperature_T)
    wrong = logprob.clone()
    wrong[targets_T % 100 == int(targets_T[0]) % 100] = 3.0
    return wrong, *rest


def bf16_table(cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """M04: the rotary table was cast along with the model."""
    cos, sin = cos_sin
    return cos.bfloat16().to(cos.dtype), sin.bfloat16().to(sin.dtype)
