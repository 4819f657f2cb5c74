"""The causal convolution on the GPU: contracts, launch, and the operator that steps a cache.

Contract ``convolution.taps.<dtype>.sm90.v1``: the CPU contract's order (one FMA chain, oldest tap
first, rounded, then silu) with exp2. A row's work depends on its own rows alone; negative slots
are padding. Certified on an H200 (``benchmarks/recurrent.md``). :mod:`.gpu_gradient` has the
gradient. Legend: as in :mod:`.gpu_kernels`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import first_admitted
from ..gpu.device import aligned, programs, require
from ..gpu.register import register_gpu, serving
from ..recurrence.pages import owners, packed_rows, slots_of
from ..row_operator import RowOperator
from .gpu_gradient import GRADIENTS

MAX_TAPS = 4
_COLUMNS = 512


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    pages: Tensor,
    query_start: Tensor,
    length: Tensor,
    table: Tensor,
    slot: Tensor,
    *,
    columns: int = _COLUMNS,
) -> Tensor:
    """``y [T, D]``; the pages take the rows. slot int64 [T]."""
    gpu_kernels = programs(__package__, "gpu_kernels")

    x, weight = aligned(x), aligned(weight)
    (tokens, channels), y = x.shape, torch.empty_like(x)
    if not tokens:
        return y
    owner = owners(query_start, tokens)
    gpu_kernels.convolution_kernel[(tokens, -(-channels // columns))](
        x, weight, x if bias is None else bias, pages, slot, owner, query_start, length, table, y,
        table.shape[1], channels, pages.shape[1], W=weight.shape[1], HAS_BIAS=bias is not None,
        SILU=silu, BD=columns, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def functional(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    pages: Tensor,
    query_start: Tensor,
    length: Tensor,
    table: Tensor,
    **shape: int,
) -> Tensor:
    """``y`` as the CPU's contract gives it, from a copy of the pages: to be proved."""
    slot = slots_of(query_start, length, table, pages.shape[1])
    index = (query_start, length, table, slot)
    return launch(x, weight, bias, silu, pages.clone(), *index, **shape)


reference = partial(functional, columns=64)

CONTRACTS = register_gpu(
    {"triton": functional},
    name="convolution.taps",
    op="convolution",
    formula="y_t = act(bias + sum over taps w_i x_(t-W+1+i)), zeros before a request",
    order="one FMA chain per element from the bias or 0, oldest tap first",
    rounding="operands widened exactly, the sum rounded, then its silu",
    functions="fma, ex2.approx, div.rn",
    reference="zeromismatch.kernels.convolution.gpu:reference",
)


@torch.library.custom_op("zeromismatch::convolution_step", mutates_args=("pages",))
def step_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    pages: Tensor,
    query_start: Tensor,
    length: Tensor,
    table: Tensor,
    slot: Tensor,
) -> Tensor:
    """``y [T, D]``."""
    first_admitted(serving(CONTRACTS, "convolution", x.dtype), "triton")
    return launch(x, weight, bias, silu, pages, query_start, length, table, slot)


@step_op.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def check(*tensors: Tensor | None) -> None:
    """CUDA tensors of one device, on a GPU with proved contracts."""
    require("convolution", *tensors)


def _whole_requests(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, start: Tensor
) -> Tensor:
    """The step of whole requests over pages that are dropped again."""
    batch = packed_rows(start, MAX_TAPS)
    pages = int(batch.table.max()) + 1 if batch.table.numel() else 0
    store = x.new_empty(pages, MAX_TAPS, x.shape[1])
    index = (batch.query_start, batch.length, batch.table, batch.slot)
    return step_op(x, weight, bias, silu, store, *index)


_PACKED = RowOperator(
    name="convolution",
    tensors=3,
    parameters=(1, 2),
    forward=CONTRACTS,
    gradient=GRADIENTS,
    served=_whole_requests,
)


def packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, start: Tensor
) -> Tensor:
    """``y [T, D]`` of whole requests; differentiable in x, weight and bias."""
    check(x, weight, bias)
    return _PACKED.recorded(x, weight, bias, silu, start)
