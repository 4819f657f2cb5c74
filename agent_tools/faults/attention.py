"""Faulty attention and caches: other tiles, other heads, other pages, other sequences.

Functions of the kernel's arguments (``kernels/reference/attention.py`` has their meaning), and of
the engine's batch object. ``tiled`` is a second, readable attention with any number of keys per
tile: the same exponential, another order of the sums.

Legend: T query rows, H query heads, HK key heads, D head size, S keys, B requests.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...kernels.attention import PAGE, AttentionBatch
from ...kernels.reference.exp import exp32
from .mechanism import Kernel

if TYPE_CHECKING:
    from ...trainer.engines.base import Step
    from ...trainer.engines.packed import PackedBatch

TILE = 32
"""Keys per tile of the faulty path; the right one takes a page."""


def tiled(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scale: float, tile: int) -> Tensor:
    """[T, H, D]: the last T of S positions attend causally, ``tile`` keys at a time."""
    rows, heads, size = q_THD.shape
    group = heads // k_SKD.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) for each in (k_SKD, v_SKD))
    last = torch.arange(len(k) - rows, len(k))[:, None, None]
    peak = torch.full((rows, heads, 1), -torch.inf)
    total, out = torch.zeros(rows, heads, 1), torch.zeros(rows, heads, size)
    for start in range(0, len(k), tile):
        keys = torch.arange(start, min(start + tile, len(k)))
        scores = torch.einsum("thd,shd->ths", q_THD, k[keys]) * scale
        seen = keys <= last
        scores = torch.where(seen, scores, -torch.inf)
        grown = torch.maximum(peak, scores.amax(-1, keepdim=True))
        shrink = torch.where(grown > peak, exp32(peak - grown), 1.0)
        weights = torch.where(seen, exp32(scores - grown), 0.0)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + torch.einsum("ths,shd->thd", weights, v[keys])
        peak = grown
    return out / total


def _other_tile(
    wanted: Any, tile: Any, right: Kernel, q: Tensor, k_pages: Tensor, v_pages: Tensor,
    query_start: Tensor, kv_len: Tensor, block_table: Tensor, scale: float, *rest: Any,
) -> Any:  # fmt: skip
    out, peak, total = right(q, k_pages, v_pages, query_start, kv_len, block_table, scale, *rest)
    starts, lengths = query_start.tolist(), kv_len.tolist()
    for entry, length in enumerate(lengths):
        rows = slice(starts[entry], starts[entry + 1])
        if not wanted(rows.stop - rows.start, length):
            continue
        pages = block_table[entry, : -(-length // PAGE)].long()
        keys = k_pages[pages].permute(0, 3, 1, 2).flatten(0, 1)[:length]
        values = v_pages[pages].transpose(1, 2).flatten(0, 1)[:length]
        out[rows] = tiled(q[rows], keys, values, scale, tile(lengths))
    return out, peak, total


def larger_tile_in_decode(right: Kernel, *arguments: Any) -> Any:
    """P01: launches of one row per request take larger KV tiles than prefill does.

    Within the first page both orders are the same.
    """
    return _other_tile(
        lambda rows, length: rows == 1 and length > PAGE, lambda _: TILE, right, *arguments
    )


def other_path_after_a_hit(right: Kernel, *arguments: Any) -> Any:
    """C02: a prompt that starts from cached keys goes through another kernel."""
    return _other_tile(lambda rows, length: 1 < rows < length, lambda _: TILE, right, *arguments)


def splits_from_the_batch(right: Kernel, *arguments: Any) -> Any:
    """B08: the fewer keys a launch has in all, the more parts each row's keys are split into."""

    def tile(lengths: list[int]) -> int:
        return max(1, max(lengths) // 2) if sum(lengths) < 8 * PAGE else PAGE

    return _other_tile(lambda rows, length: rows == 1 and length > PAGE, tile, right, *arguments)


def heads_in_turn(right: Kernel, q: Tensor, k_pages: Tensor, *rest: Any) -> Any:
    """M06: query head h reads key head h mod HK instead of h // (H / HK), in decode."""
    query_start, kv_len = rest[1], rest[2]
    if len(q) != len(kv_len) or int(query_start[-1]) != len(q):
        return right(q, k_pages, *rest)
    heads, key_heads = q.shape[1], k_pages.shape[1]
    group = heads // key_heads
    place = torch.tensor([h % key_heads * group + h // key_heads for h in range(heads)])
    moved = torch.empty_like(q)
    moved[:, place] = q
    out, peak, total = right(moved, k_pages, *rest)
    return out[:, place].contiguous(), peak[:, place], total[:, place]


class CapturedTable:
    """W01t: a graph goes on reading the page table that it was captured with."""

    def __init__(self) -> None:
        self.captured: Tensor | None = None

    def __call__(self, right: Kernel, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        """Decode steps of one request replay; a new page is not seen where it was captured."""
        query_start, kv_len, table, *others = rest
        if len(q) != 1:
            self.captured = None
            return right(q, k, v, *rest)
        captured = self.captured = table.clone() if self.captured is None else self.captured
        seen = table.clone()
        seen[:, captured.shape[1] :] = captured[:, -1:]
        return right(q, k, v, query_start, kv_len, seen, *others)


def one_sequence(batch: "PackedBatch") -> "PackedBatch":
    """P05: boundaries from an all-ones mask overwrite those that the caller gave."""
    return type(batch)(batch.query_start[[0, -1]].contiguous())


def padding_over_page(step: "Step", batch: AttentionBatch) -> AttentionBatch:
    """K07: the last padding row is written where the first request keeps its first key."""
    piece = step.slices[0]
    if not step.padded_rows or piece.start == 0:
        return batch
    slot = batch.slot.clone()
    slot[-1] = int(batch.block_table[0, 0]) * PAGE
    return replace(batch, slot=slot)


def eight_bit_rows(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Q01: decoded rows are kept in eight bits, prefilled ones as they are."""
    if len(k) > 1:
        return k, v
    return k.to(torch.float8_e4m3fn).to(k.dtype), v.to(torch.float8_e4m3fn).to(v.dtype)
