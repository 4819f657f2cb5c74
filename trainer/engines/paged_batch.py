"""What the paged engine passes into a forward: cache, page tables, and attention over them.

One forward is one row of tokens ``[1, T]``. Each slice of a step is one entry of the batch;
padding rows form one more entry over reserved pages, so that they never touch a request's page. The
batch travels as a keyword to the registered attention function, which calls
:meth:`PagedBatch.attend` with q and k already rotated.
"""

from collections.abc import Iterator, Sequence
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
from .base import Step
from .pages import Pages, pages_for
from .stock_attention import stock_attention

# T rows, H query heads, K key heads, D head size


def head_shape(config: Any) -> tuple[int, int]:
    """(key heads, head size) of a transformers config."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention: keys and values are expanded
        return heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, head_dim


def page_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    key_heads, head_dim = head_shape(config)
    return 2 * config.num_hidden_layers * PAGE * key_heads * head_dim * dtype.itemsize


def new_caches(
    config: Any, num_pages: int, *, dtype: torch.dtype, device: torch.device
) -> list[KVCache]:
    """One cache per layer."""
    key_heads, head_dim = head_shape(config)
    return [
        new_cache(num_pages, key_heads, head_dim, dtype=dtype, device=device)
        for _ in range(config.num_hidden_layers)
    ]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The attention context of one step."""

    caches: Sequence[KVCache]
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
            return paged_attention(q_THD, cache, self.batch, **options)
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


def attention_batch(step: Step, pages: Pages, device: torch.device) -> AttentionBatch:
    """Query rows, lengths, page tables and slots of a step whose pages were taken."""
    ends = [piece.stop for piece in step.slices]
    counts = [piece.stop - piece.start for piece in step.slices]
    tables = [pages.tables[p.request][: pages_for(p.stop)] for p in step.slices]
    slots = [s for p in step.slices for s in pages.slots(p.request, p.start, p.stop)]
    if step.padded_rows:
        assert pages_for(step.padded_rows) <= pages.reserved
        ends.append(step.padded_rows)
        counts.append(step.padded_rows)
        tables.append(list(range(pages_for(step.padded_rows))))
        slots += range(step.padded_rows)
    widest = max(map(len, tables))
    return AttentionBatch(
        query_start=torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32),
        kv_len=torch.tensor(ends, dtype=torch.int32, device=device),
        block_table=torch.tensor(
            [table + [0] * (widest - len(table)) for table in tables],
            dtype=torch.int32,
            device=device,
        ),
        slot=torch.tensor(slots, dtype=torch.int64, device=device),
    )
