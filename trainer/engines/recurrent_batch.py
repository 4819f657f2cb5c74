"""Recurrent layers of the paged engine: pages of one chunk beside the pages of keys.

A layer's page holds the rows of one chunk of one request and, once they are all there, the state at
the chunk's end, written once. So a prefix hit on a chunk's boundary shares full pages, as with
keys; preemption and eviction drop them, and a resumed request computes its rows again. Pools of
pages are in ``pages.py``; what is in a page is the kernels' business.

Under the stock plan transformers' functions run instead, and carry their own state: it is kept per
page after the last row that a step put there, so that the same schedules work (rows that cross a
chunk's boundary are cut there).

    pytest tests/trainer/engines/test_recurrent.py
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.attention import PAGE
from ...kernels.convolution import new_convolution_cache, paged_convolution
from ...kernels.recurrence import RowBatch, new_recurrence_cache, paged_recurrence
from ...model_recipes.apply import Instrument
from ...model_recipes.recurrent import RecurrentLayer, Rows, StockStep
from .base import StateSpec

# T rows, D channels, HV value heads, V value size


def page_sizes(instrument: Instrument) -> tuple[int, ...]:
    """Positions of a page, for every pool that the model needs."""
    chunks = {layer.chunk for layer in instrument.recurrent.values()}
    return (PAGE, *sorted(chunks - {PAGE}))


def state_specs(instrument: Instrument, *, granule: int) -> tuple[StateSpec, ...]:
    """What every layer keeps; granule: of keys and values.

    A recurrent state has snapshots at the ends of chunks, and can be rolled back to those alone.
    """
    keys = (
        StateSpec(site=site.path, kind="kv", granule=granule)
        for site in instrument.sites
        if site.op_class == "attention"
    )
    states = (
        StateSpec(site=layer.path, kind=kind, granule=layer.chunk, rollback=False)
        for layer in instrument.recurrent.values()
        for kind in ("recurrent", "conv")
    )
    return (*keys, *states)


def chunk_bytes(layer: RecurrentLayer, dtype: torch.dtype) -> int:
    """Bytes of one page of a layer: a chunk's rows, and the state at its end."""
    decays = layer.value_heads * (layer.key_dim if layer.per_channel else 1)
    row = layer.key_heads * layer.key_dim + layer.value_heads * layer.page_width
    state = layer.value_heads * layer.key_dim * layer.page_width
    each = row * layer.rows.itemsize + 4 * decays + layer.channels * dtype.itemsize
    return layer.chunk * each + 4 * state


class LayerPages:
    """Pages of one layer: the recurrence's, the convolution's, and what stock carries.

    carried: by part and page, transformers' state after the last row in that page.
    """

    def __init__(
        self, layer: RecurrentLayer, num_pages: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.recurrence = new_recurrence_cache(
            num_pages, layer.chunk, layer.key_heads, layer.value_heads, layer.key_dim,
            layer.page_width, per_channel=layer.per_channel, device=device, dtype=layer.rows,
        )  # fmt: skip
        self.convolution = new_convolution_cache(
            num_pages, layer.chunk, layer.channels, dtype=dtype, device=device
        )
        self.carried: dict[tuple[str, int], Tensor | None] = {}


@dataclass(frozen=True, slots=True)
class PagedState:
    """What recurrent mixers ask in one step. rows: the step's indices, by chunk size."""

    layers: Mapping[int, LayerPages]
    rows: Mapping[int, RowBatch]

    def convolve(
        self, layer: RecurrentLayer, x_TD: Tensor, weight: Tensor, bias: Tensor | None,
        activation: str | None,
    ) -> Tensor:  # fmt: skip
        """Write the rows, then convolve: [T, D]."""
        pages, rows = self.layers[layer.index].convolution, self.rows[layer.chunk]
        return paged_convolution(x_TD, weight, bias, activation, pages, rows)  # pyright: ignore[reportArgumentType]

    def recur(
        self, layer: RecurrentLayer, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
        beta: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Write the rows, and fold the chunks that they fill: fp32 [T, HV, V]."""
        pages, rows = self.layers[layer.index].recurrence, self.rows[layer.chunk]
        return paged_recurrence(layer.kind, q, k, v, g, beta, pages, rows)

    def carry(self, layer: RecurrentLayer, part: str, rows: Rows, step: StockStep) -> Tensor:
        """transformers' arithmetic for each request, on top of the state that it left."""
        carried, batch = self.layers[layer.index].carried, self.rows[layer.chunk]
        starts, ends = batch.query_start.tolist(), batch.length.tolist()
        outputs: list[Tensor] = []
        for entry, table in enumerate(batch.table.tolist()):
            row, stop = starts[entry], starts[entry + 1]
            position = ends[entry] - (stop - row)
            state = carried.get((part, table[(position - 1) // layer.chunk])) if position else None
            decode = position > 0 and stop - row == 1
            while row < stop:
                page, offset = divmod(position, layer.chunk)
                count = min(layer.chunk - offset, stop - row)
                output, state = step(tuple(x[None, row : row + count] for x in rows), state, decode)
                carried[part, table[page]] = state
                outputs.append(output[0])
                row, position = row + count, position + count
        return torch.cat(outputs)
