"""The causal depthwise convolution on the CPU: contracts and implementations, forward, gradient."""

from typing import Any

import torch
from torch import Tensor

from ..cpu.register import register_core
from ..reference import convolution as reference
from ..row_operator import RowOperator

_REFERENCE = "zeromismatch.kernels.reference.convolution:"
_FIELDS: dict[str, Any] = {"functions": "fma, exp.cpu.v1, IEEE division", "gradient_rtol": 1e-5}


def _plain(function: Any) -> Any:
    def run(variant: str, *arguments: Any) -> Any:
        return function(*arguments)

    return run


CONTRACTS = register_core(
    _plain(reference.convolution),
    name="convolution.taps",
    op="convolution",
    formula="y_t = act(bias + sum over taps w_i x_(t-W+1+i)), zeros before a request",
    order="one FMA chain per element from the bias or 0, oldest tap first",
    rounding="operands widened exactly, the sum rounded, then its silu",
    reference=f"{_REFERENCE}convolution",
    **_FIELDS,
)
GRADIENTS = register_core(
    _plain(reference.convolution_grad),
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
) -> tuple[Any, ...]:
    """The forward's arguments where every request begins at 0: no pages."""
    length = start.diff()
    table = torch.zeros(length.numel(), 0, dtype=torch.int32)
    return x, weight, bias, silu, x.new_empty(0, 1, x.shape[1]), start, length, table


PACKED = RowOperator(
    name="convolution",
    tensors=3,
    parameters=(1, 2),
    forward=CONTRACTS,
    gradient=GRADIENTS,
    adapted=_whole_requests,
)
