"""What the paged engine passes into a forward: cache, page tables, and attention over them.

One forward is one row of tokens ``[1, T]``. Each slice of a step is one entry of the batch;
padding rows form one more entry over reserved pages, so that they never touch a request's page. The
batch travels as a keyword to the registered attention function, which calls
:meth:`PagedBatch.attend` with q and k already rotated, and to recurrent mixers
(``recurrent_batch.py``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.attention import (
    PAGE,
    AttentionBatch,
    KVCache,
    new_cache,
    paged_attention,
    read_kv,
    read_slots,
    write_kv,
)
from ...kernels.recurrence import RowBatch
from ...model_recipes.apply import Instrument
from ...model_recipes.models import LoadedModel
from .base import Step
from .pages import Pages, Pools, pages_for
from .recurrent_batch import LayerPages, PagedState, chunk_bytes
from .stock_attention import stock_attention

# T rows, H query heads, K key heads, D head size


def head_shape(config: Any) -> tuple[int, int]:
    """(key heads, head size) of a transformers config."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention: keys and values are expanded
        return heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, head_dim


def attention_layers(instrument: Instrument) -> list[int]:
    """Indices of the layers that keep keys."""
    modules = (
        instrument.module.get_submodule(site.path)
        for site in instrument.sites
        if site.op_class == "attention"
    )
    return [int(getattr(module, "layer_idx")) for module in modules]  # noqa: B009


def page_bytes(loaded: LoadedModel, instrument: Instrument) -> int:
    """Bytes of one page of keys over all layers, and of the states of as many positions."""
    key_heads, head_dim = head_shape(loaded.config)
    keys = 2 * PAGE * key_heads * head_dim * loaded.dtype.itemsize
    states = (chunk_bytes(layer, loaded.dtype) * PAGE // layer.chunk
              for layer in instrument.recurrent.values())  # fmt: skip
    return len(attention_layers(instrument)) * keys + sum(states)


class Caches:
    """What all layers keep, for pools of a size: keys and values, or recurrent states."""

    def __init__(self, loaded: LoadedModel, instrument: Instrument, pools: Pools) -> None:
        self.sizes = {size: pages.num_pages for size, pages in pools.by_size.items()}
        key_heads, head_dim = head_shape(loaded.config)
        place: dict[str, Any] = {"dtype": loaded.dtype, "device": loaded.device}
        self.attention = {
            index: new_cache(self.sizes[PAGE], key_heads, head_dim, **place)
            for index in attention_layers(instrument)
        }
        self.recurrent = {
            index: LayerPages(layer, self.sizes[layer.chunk], **place)
            for index, layer in instrument.recurrent.items()
        }

    def hold(self, pools: Pools) -> bool:
        """Whether these caches have all pages of ``pools``."""
        wanted = {size: pages.num_pages for size, pages in pools.by_size.items()}
        return all(wanted[size] <= self.sizes.get(size, 0) for size in wanted)


@dataclass(frozen=True, slots=True)
class PagedBatch(PagedState):
    """The context of one step."""

    caches: Mapping[int, KVCache] | Sequence[KVCache]
    batch: AttentionBatch

    def attend(
        self,
        layer_idx: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        /,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        attention: str,
    ) -> Tensor:
        """Write k and v into the cache, then attend over what the cache holds: [T, H, D]."""
        cache = self.caches[layer_idx]
        write_kv(cache, k_TKD, v_TKD, self.batch.slot)
        options: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "sinks": sinks,
        }
        if attention != "stock":
            return paged_attention(q_THD, cache, self.batch, contract=attention, **options)
        return torch.cat([
            stock_attention(q_THD[first:last], *read_kv(cache, pages, length), **options)
            for first, last, pages, length in self._entries()
        ])  # fmt: skip

    def stored(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """This step's k and v [T, HK, D], as read back from the cache."""
        return read_slots(self.caches[layer_idx], self.batch.slot)

    def _entries(self) -> Iterator[tuple[int, int, Tensor, int]]:
        """First row, last row, page table and length of each request in the batch."""
        starts, lengths = self.batch.query_start.tolist(), self.batch.kv_len.tolist()
        return zip(starts[:-1], starts[1:], self.batch.block_table, lengths, strict=True)


def paged_batch(step: Step, pools: Pools, caches: Caches, device: torch.device) -> PagedBatch:
    """The context of a step whose pages were taken."""
    rows = {
        size: RowBatch(*_indices(step, pages, device))
        for size, pages in pools.by_size.items()
        if caches.recurrent
    }
    keys = AttentionBatch(*_indices(step, pools.by_size[PAGE], device))
    return PagedBatch(caches.recurrent, rows, caches.attention, keys)


def _indices(
    step: Step, pages: Pages, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query rows, lengths, page tables and slots of a step."""
    size = pages.size
    ends = [piece.stop for piece in step.slices]
    counts = [piece.stop - piece.start for piece in step.slices]
    tables = [pages.tables[p.request][: pages_for(p.stop, size)] for p in step.slices]
    slots = [s for p in step.slices for s in pages.slots(p.request, p.start, p.stop)]
    if step.padded_rows:
        assert pages_for(step.padded_rows, size) <= pages.reserved
        ends.append(step.padded_rows)
        counts.append(step.padded_rows)
        tables.append(list(range(pages_for(step.padded_rows, size))))
        slots += range(step.padded_rows)
    widest = max(map(len, tables))
    rows = [table + [0] * (widest - len(table)) for table in tables]
    return (
        torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32),
        torch.tensor(ends, dtype=torch.int32, device=device),
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor(slots, dtype=torch.int64, device=device),
    )
