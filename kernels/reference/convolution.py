"""The definition of the causal depthwise convolution of recurrent layers and of its gradient.

    z_t = round(one FMA chain from the bias or 0: x_(t-W+1) w_0, ..., x_t w_(W-1))     per channel
    y_t = z_t, or round(z_t / (1 + exp(-z_t)))                                         silu
    dz  = dy, or silu's gradient, rounded
    dx_t = round(chain from 0: dz_t w_(W-1), dz_(t+1) w_(W-2), ...)     rows of the same request
    dw_i = one chain over rows ascending: x_(t-W+1+i) dz_t;  db: dz_t added, ascending

Rows before a request's first position are zeros. Earlier rows of a request lie in pages of C rows,
one page per chunk of its absolute positions; W - 1 <= C. fp32 inside, bf16 widened exactly.

Frozen. Legend: T rows, B requests, P pages, C rows per chunk, D channels, W taps.
"""

import torch
from torch import Tensor

from .fma import fma32
from .gated import silu as silu_of
from .gated import silu_grad


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    pages: Tensor,
    query_start: Tensor,
    length: Tensor,
    table: Tensor,
) -> Tensor:
    """``y [T, D]`` of new rows x [T, D]; weight [D, W], bias [D], pages [P, C, D] of one dtype.

    int32 query_start [B + 1], length [B] after this call, table [B, widest]. Pages are read only.
    """
    z = torch.empty_like(x)
    for b in range(length.numel()):
        rows = slice(int(query_start[b]), int(query_start[b + 1]))
        before = int(length[b]) - (rows.stop - rows.start)
        tail = _tail(pages, table[b], before, weight.shape[1] - 1)
        z[rows] = taps(torch.cat((tail, x[rows])), weight, bias)
    return silu_of(z) if silu else z


def _tail(pages: Tensor, table: Tensor, before: int, count: int) -> Tensor:
    """The ``count`` rows before a request's new ones, zeros before its first."""
    rows = pages.new_zeros(count, pages.shape[2])
    size = pages.shape[1]
    for place in range(count):
        position = before - count + place
        if position >= 0:
            rows[place] = pages[int(table[position // size]), position % size]
    return rows


def taps(padded: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The chains over [W - 1 + T, D] rows, rounded to their dtype."""
    width = weight.shape[1]
    count = len(padded) - width + 1
    total = torch.zeros(count, padded.shape[1])
    if bias is not None:
        total = total + bias.float()
    for tap in range(width):
        total = fma32(padded[tap : tap + count].float(), weight[:, tap].float(), total)
    return total.to(padded.dtype)


def convolution_grad(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    query_start: Tensor,
    initial_weight: Tensor | None = None,
    initial_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(dx like x, dw fp32 [D, W], db fp32 [D] or None)`` of whole requests back to back."""
    width = weight.shape[1]
    dx = torch.empty_like(x)
    dw = torch.zeros(weight.shape) if initial_weight is None else initial_weight.clone()
    db = None
    if bias is not None:
        db = torch.zeros(bias.shape) if initial_bias is None else initial_bias.clone()
    for b in range(query_start.numel() - 1):
        rows = slice(int(query_start[b]), int(query_start[b + 1]))
        padded = torch.cat((x.new_zeros(width - 1, x.shape[1]), x[rows]))
        dz = dy[rows]
        if silu:
            dz = silu_grad(dz, taps(padded, weight, bias))
        count = len(dz)
        ahead = torch.cat((dz, dz.new_zeros(width - 1, dz.shape[1]))).float()
        total = torch.zeros(count, x.shape[1])
        for later in range(width):
            tap = weight[:, width - 1 - later].float()
            total = fma32(ahead[later : later + count], tap, total)
        dx[rows] = total.to(x.dtype)
        for t in range(count):
            dw = fma32(padded[t : t + width].float().t(), dz[t].float()[:, None], dw)
            db = None if db is None else db + dz[t].float()
    return dx, dw, db
