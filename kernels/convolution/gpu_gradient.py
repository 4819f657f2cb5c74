"""The convolution's gradient on the GPU, in torch's elementwise operations.

Contract ``convolution_grad.wide.<dtype>.sm90.v1``: the CPU's formulas; fp64 inside, sums over rows
as :mod:`..gpu.row_gradient` has them. A row's dx depends on its request's rows alone. The reference
takes one request at a time.

Legend: T rows, B requests, D channels, W taps.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ..gpu.register import register_gpu
from ..gpu.row_gradient import chained, listed, sigmoid64, wide
from ..recurrence.pages import owners

Gradients = tuple[Tensor, Tensor, Tensor | None]


def _rows(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, start: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """dx, dz as stored, and the rows x_(t-W+1+i) of every tap i, fp64, zeros before a request."""
    width, count = weight.shape[1], len(x)
    owner, row = owners(start, count).long(), torch.arange(count, device=x.device)
    before, after = row - start[owner], start[owner + 1] - 1 - row

    def moved(rows: Tensor, by: int) -> Tensor:
        """Row t - by at t, zeros where that is another request's."""
        there = before >= by if by >= 0 else after >= -by
        return torch.where(there[:, None], wide(rows[(row - by).clamp(0, count - 1)]), 0.0)

    earlier = [moved(x, width - 1 - tap) for tap in range(width)]
    dz = dy
    if silu:
        z = torch.zeros_like(earlier[0]) if bias is None else wide(bias).expand(x.shape).clone()
        for tap in range(width):
            z = z + earlier[tap] * wide(weight[:, tap])
        z = wide(z.to(x.dtype))
        sig = sigmoid64(z)
        dz = (wide(dy) * sig * (1.0 + z * (1.0 - sig))).to(x.dtype)
    dx = torch.zeros_like(earlier[0])
    for later in range(width):
        dx = dx + moved(dz, -later) * wide(weight[:, width - 1 - later])
    return dx.to(x.dtype), dz, earlier


def gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    query_start: Tensor,
    initial_weight: Tensor | None = None,
    initial_bias: Tensor | None = None,
) -> Gradients:
    """``(dx like x, dw fp32 [D, W], db fp32 [D] or None)`` of whole requests back to back."""
    dx, dz, earlier = _rows(dy, x, weight, bias, silu, query_start)
    return dx, *_sums(chained, dz, earlier, bias, initial_weight, initial_bias)


def reference(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    query_start: Tensor,
    initial_weight: Tensor | None = None,
    initial_bias: Tensor | None = None,
) -> Gradients:
    """The definition: request by request, rows added in a list."""
    found: list[tuple[Tensor, ...]] = []
    at = query_start.tolist()
    for first, last in pairwise(at):
        if last > first:
            start = query_start.new_tensor([0, last - first])
            dx, dz, earlier = _rows(dy[first:last], x[first:last], weight, bias, silu, start)
            found.append((dx, dz, *earlier))
    dx, dz, *earlier = (torch.cat(each) for each in zip(*found, strict=True))
    return dx, *_sums(listed, dz, earlier, bias, initial_weight, initial_bias)


def _sums(
    add: Callable[[Tensor, Tensor | None], Tensor], dz: Tensor, earlier: list[Tensor],
    bias: Tensor | None, initial_weight: Tensor | None, initial_bias: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    taps = [
        add(rows * wide(dz), None if initial_weight is None else initial_weight[:, tap])
        for tap, rows in enumerate(earlier)
    ]
    return torch.stack(taps, dim=1), None if bias is None else add(wide(dz), initial_bias)


GRADIENTS = register_gpu(
    {"torch": gradient},
    name="convolution_grad.wide",
    storages=("float32", "bfloat16"),
    op="convolution_grad",
    formula="dx_t = sum over later rows w_i dz; dw_i = sum over rows x dz; db = sum over rows dz",
    order="dx: the row itself first; dw, db: blocks of 8,192 rows, halves by index, then ascending",
    rounding="fp64 inside; dz and dx rounded to storage; dw and db to fp32 per block of rows",
    functions="exp of CUDA in fp64",
    reference="zeromismatch.kernels.convolution.gpu_gradient:reference",
)
