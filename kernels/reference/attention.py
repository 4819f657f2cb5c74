"""The definition of ``attention.pages16``: causal attention over pages of 16 keys.

One query row at absolute position t sees keys j with max(0, t - window + 1) <= j <= t. It walks
the pages of absolute positions 16 b .. 16 b + 15 in ascending order, from state m = -inf, l = 16
lanes of 0, acc = 0 (with a finite sink: m = sink, l = (1, 0, ... 0)):

    s   = (one FMA chain over d, ascending, from 0) * scale          lane = key position % 16
    s   = cap * tanh(s / cap)                                        with softcap
    if the largest visible s exceeds m: it becomes m', l and acc are multiplied by exp(m - m')
    p   = exp(s - m), 0 in invisible lanes;  l = l + p
    acc = one FMA chain over the page's visible keys, ascending: acc + p * V; others are skipped
    o   = round(acc / sum_lanes(l))

exp is exp.cpu.v1, tanh is tanh.cpu.v1, all arithmetic fp32, K and V widened exactly from storage.
Query head h reads kv head h // (H // HK). m and sum_lanes(l) are returned for the backward.
Frozen.
"""

import torch
from torch import Tensor

from .exp import LANES, exp32, sum_lanes
from .fma import fma32

PAGE = LANES
_TANH = (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


def attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_start: Tensor,
    kv_len: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``out [T, H, D]``, final ``m`` and sum ``[T, H]`` for ``q [T, H, D]`` over CPU pages.

    k_pages [P, HK, D, 16] and v_pages [P, HK, 16, D]; int32 query_start [B + 1], kv_len [B],
    block_table [B, max_pages]. Request b's rows are the last ones of its kv_len[b] positions.
    """
    out = torch.zeros_like(q)
    peak, total = (torch.zeros(q.shape[:2], dtype=torch.float32) for _ in range(2))
    for b in range(kv_len.numel()):
        rows = slice(int(query_start[b]), int(query_start[b + 1]))
        count, length = rows.stop - rows.start, int(kv_len[b])
        if count == 0:
            continue
        table = block_table[b, : -(-length // PAGE)].long()
        position = torch.arange(length - count, length)
        one = _Request(position, scale, window, softcap, sinks)
        keys, values = k_pages[table].float(), v_pages[table].float()
        result, peak[rows], total[rows] = one.attend(q[rows].float(), keys, values)
        out[rows] = result.to(q.dtype)
    return out, peak, total


class _Request:
    """One request's rows ``[N, H, D]`` against its own pages, in page order."""

    def __init__(
        self, position: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None
    ) -> None:
        self.position, self.window, self.sinks = position, window, sinks
        self.scale = torch.tensor(scale, dtype=torch.float32)
        self.softcap = torch.tensor(softcap, dtype=torch.float32)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        m = torch.full(q.shape[:2], -torch.inf)
        lanes = torch.zeros(*q.shape[:2], LANES)
        acc = torch.zeros_like(q)
        if self.sinks is not None:
            m = self.sinks.expand_as(m)
            lanes[..., 0] = torch.where(m > -torch.inf, 1.0, 0.0)
        for page in range(k.shape[0]):
            m, lanes, acc = self.page(page, q, k[page], v[page], m, lanes, acc)
        total = sum_lanes(lanes)
        return acc / total[..., None], m, total

    def page(
        self, page: int, q: Tensor, k: Tensor, v: Tensor, m: Tensor, lanes: Tensor, acc: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        seen = self.visible(page)[:, None, :].expand(*q.shape[:2], LANES)
        s = torch.zeros(*q.shape[:2], LANES)
        for d in range(q.shape[2]):
            s = fma32(q[..., d : d + 1], k[None, :, d], s)
        s = torch.where(seen, self.scored(s), -torch.inf)
        grown = torch.maximum(m, s.amax(dim=-1))
        shrink = torch.where((grown > m) & (m > -torch.inf), exp32(m - grown), 1.0)[..., None]
        any_seen = seen.any(dim=-1)[..., None]
        p = torch.where(seen, exp32(s - grown[..., None]), 0.0)
        lanes = torch.where(any_seen, lanes * shrink + p, lanes)
        acc = acc * shrink
        for key in range(LANES):
            step = fma32(p[..., key : key + 1], v[None, :, key], acc)
            acc = torch.where(seen[..., key : key + 1], step, acc)
        return grown, lanes, acc

    def visible(self, page: int) -> Tensor:
        key = torch.arange(page * PAGE, (page + 1) * PAGE)[None, :]
        seen = key <= self.position[:, None]
        return seen & (key > self.position[:, None] - self.window) if self.window else seen

    def scored(self, s: Tensor) -> Tensor:
        s = s * self.scale
        return self.softcap * tanh32(s / self.softcap) if self.softcap else s


def tanh32(x: Tensor) -> Tensor:
    """tanh.cpu.v1: an odd polynomial below 0.625 (Cephes' tanhf), else 1 - 2 / (exp(2 |x|) + 1)."""
    size, z = x.abs(), x * x
    p = torch.tensor(-5.70498872745e-3)
    for coefficient in _TANH:
        p = fma32(p, z, torch.tensor(coefficient))
    small = fma32(p * z, x, x)
    large = 1.0 - 2.0 / (exp32(size + size) + 1.0)
    return torch.where(size < 0.625, small, torch.where(x < 0, -large, large))
