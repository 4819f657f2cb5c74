"""The causal depthwise convolution on the CPU: contracts and implementations, forward, gradient."""

from typing import Any

import torch
from torch import Tensor

from ..cpu.load import core
from ..cpu.register import is_bf16, register_core
from ..dispatch import choose
from ..row_operator import RowOperator

_REFERENCE = "zeromismatch.kernels.reference.convolution:"
_FIELDS: dict[str, Any] = {"functions": "fma, exp.cpu.v1, IEEE division", "gradient_rtol": 1e-5}


def _convolution(
    variant: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    pages: Tensor,
    query_start: Tensor,
    length: Tensor,
    table: Tensor,
) -> Tensor:
    y = torch.empty_like(x)
    core(variant).call(
        "convolution", x, weight, bias, pages, query_start, length, table, y, *table.shape,
        pages.shape[1], *weight.shape, silu, is_bf16(x), torch.get_num_threads(),
    )  # fmt: skip
    return y


def _convolution_grad(
    variant: str,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    query_start: Tensor,
    initial_weight: Tensor | None = None,
    initial_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    dz, dx = torch.empty_like(x), torch.empty_like(x)
    by_tap = torch.zeros(weight.shape[::-1])
    if initial_weight is not None:
        by_tap = initial_weight.t().contiguous().clone()
    db = None
    if bias is not None:
        db = torch.zeros(bias.shape) if initial_bias is None else initial_bias.clone()
    core(variant).call(
        "convolution_grad", dy, x, weight, bias, query_start, dz, dx, by_tap, db,
        query_start.numel() - 1, *weight.shape, silu, is_bf16(x), torch.get_num_threads(),
    )  # fmt: skip
    return dx, by_tap.t().contiguous(), db


CONTRACTS = register_core(
    _convolution,
    name="convolution.taps",
    op="convolution",
    formula="y_t = act(bias + sum over taps w_i x_(t-W+1+i)), zeros before a request",
    order="one FMA chain per element from the bias or 0, oldest tap first",
    rounding="operands widened exactly, the sum rounded, then its silu",
    reference=f"{_REFERENCE}convolution",
    **_FIELDS,
)
GRADIENTS = register_core(
    _convolution_grad,
    name="convolution_grad.taps",
    op="convolution_grad",
    formula="dx_t = sum over later rows w_i dz; dw_i = sum over rows x dz; db = sum over rows dz",
    order="dx: the row itself first; dw, db: rows ascending",
    rounding="dz rounded to storage, fp32 inside, dx rounded once, dw and db stay fp32",
    reference=f"{_REFERENCE}convolution_grad",
    **_FIELDS,
)


def _whole_requests(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, start: Tensor
) -> Tensor:
    """The forward where every request begins at 0: no pages."""
    length = start.diff()
    table = torch.zeros(length.numel(), 0, dtype=torch.int32)
    pages = x.new_empty(0, 1, x.shape[1])
    run = choose(CONTRACTS[x.dtype].id).run
    return run(x, weight, bias, silu, pages, start, length, table)


PACKED = RowOperator(
    name="convolution",
    tensors=3,
    parameters=(1, 2),
    forward=CONTRACTS,
    gradient=GRADIENTS,
    served=_whole_requests,
)
