"""The causal depthwise convolution in front of a recurrence, over the same pages.

    y = paged_convolution(x, weight, bias, "silu", cache, batch)        # writes its rows
    y = packed_convolution(x, weight, bias, "silu", query_start)        # differentiable

A row reads itself and the W - 1 rows before it: of this call, of its chunk's page, or of the page
before. Taps are added in one order, oldest first, so every cut of a request gives the same bits; a
page keeps its rows as they came, in the model's dtype. The sum is rounded, then its silu, as the
two steps of transformers' code. The gradient of the weight is one chain over rows in the order of
the call. ``kernels/reference/convolution.py`` is the definition;
``pytest tests/kernels/convolution`` exercises it. CUDA tensors go to :mod:`.gpu`.

Legend: T rows, B requests, P pages, C rows per chunk, D channels, W taps (at most 4).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..cpu.register import covering
from ..dispatch import choose
from ..errors import ContractError
from ..gpu.device import require_no_gradient
from ..recurrence.pages import Filled, RowBatch, packed_start
from . import cpu, gpu
from .gpu import MAX_TAPS

__all__ = [
    "ConvolutionCache", "new_convolution_cache", "packed_convolution", "paged_convolution",
]  # fmt: skip

Activation = Literal["silu"] | None


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionCache:
    """``rows [P, C, D]`` of one layer in the model's dtype; ``filled``: its ledger on a CPU."""

    chunk: int
    rows: Tensor
    filled: Filled

    @property
    def num_pages(self) -> int:
        return self.rows.shape[0]


def new_convolution_cache(
    pages: int,
    chunk: int,
    channels: int,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
) -> ConvolutionCache:
    """An uninitialised cache whose chunks are the recurrence's."""
    if chunk < MAX_TAPS - 1:
        raise ContractError(
            f"a chunk of {chunk} rows is shorter than a convolution's {MAX_TAPS - 1} earlier rows; "
            f"take at least {MAX_TAPS - 1}"
        )
    rows = torch.empty(pages, chunk, channels, dtype=dtype, device=device)
    return ConvolutionCache(chunk, rows, Filled(pages, chunk))


def paged_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    cache: ConvolutionCache,
    batch: RowBatch,
) -> Tensor:
    """``y [T, D]`` of new rows ``x [T, D]``, which are written to their pages; no autograd.

    weight ``[D, W]``, bias ``[D]`` or None, all of the cache's dtype. Raises ContractError for what
    does not fit and for pages that cannot serve the step.
    """
    silu = _check(x, weight, bias, activation)
    if cache.rows.dtype != x.dtype or cache.rows.shape[2] != x.shape[1]:
        raise ContractError(
            f"rows {x.dtype} [T, {x.shape[1]}] do not fit a cache of {cache.rows.dtype} "
            f"[P, C, {cache.rows.shape[2]}]; make the cache for this layer"
        )
    x, weight = x.contiguous(), weight.contiguous()
    if x.is_cuda:
        gpu.check(x, weight, bias)
        require_no_gradient("paged convolution", x, weight, bias)
        index = (batch.query_start, batch.length, batch.table, batch.slot)
        return gpu.step_op(x, weight, bias, silu, cache.rows, *index)
    cache.filled.admit(batch)
    run = choose(covering(cpu.CONTRACTS, x).id).run
    index = (batch.query_start, batch.length, batch.table)
    y = run(x, weight, bias, silu, cache.rows, *index)
    cache.rows.flatten(0, 1)[batch.slot] = x
    cache.filled.note(batch)
    return y


def packed_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    query_start: Tensor,
) -> Tensor:
    """``y [T, D]`` of whole requests back to back; differentiable in x, weight and bias."""
    silu = _check(x, weight, bias, activation)
    start = packed_start(query_start, len(x))
    if x.is_cuda:
        return gpu.packed(x, weight, bias, silu, start)
    return cpu.PACKED(x, weight, bias, silu, start)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> bool:
    if not x.is_cuda:
        covering(cpu.CONTRACTS, x)
    fits = x.dim() == 2 and weight.dim() == 2 and len(weight) == x.shape[1]
    alike = all(each is None or each.dtype == x.dtype for each in (weight, bias))
    if not fits or not alike or not 1 <= weight.shape[1] <= MAX_TAPS:
        raise ContractError(
            f"a convolution takes x [T, D], weight [D, 1 to {MAX_TAPS} taps] and bias [D] of one "
            f"dtype, not {x.dtype} {tuple(x.shape)} and {weight.dtype} {tuple(weight.shape)}; drop "
            "the weight's middle dimension, and check which layer it belongs to"
        )
    if bias is not None and bias.shape != x.shape[1:]:
        raise ContractError(f"the bias is {tuple(bias.shape)}; pass one per channel")
    if activation not in (None, "silu"):
        raise ContractError(f"no contract for the activation {activation!r}; take 'silu' or None")
    return activation == "silu"
