"""C1's recurrent layers: a row's bits, whole, in chunks, decoded, alone and among others.

As for attention (``attention.py``): the trainer's forward is run with a context that keeps what
each recurrence and each convolution got. Each kind of call is repeated as it was, by request alone,
with the requests in another order, with other values in every other request, under one to three
threads, and over pages filled with NaN and scattered, in steps of one row up to one more than a
chunk: what a step writes, the next one reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...kernels.recurrence import RowBatch
from ...kernels.trial import THREADS
from ...model_recipes.recurrent import RecurrentLayer, WholeRequests
from ...trainer.engines.recurrent_batch import LayerPages, PagedState

if TYPE_CHECKING:
    from .operators import Tally

Compute = Callable[[Any, Sequence["Tensor | None"]], Tensor]
"""The call on a context, with other rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One call of a recurrent layer. rows: its tensors [T, ...]; ``compute`` repeats it."""

    layer: RecurrentLayer
    op_class: str
    rows: tuple[Tensor | None, ...]
    compute: Compute
    output: Tensor

    @property
    def site(self) -> str:
        """What a report calls it."""
        return f"{self.op_class} of {self.layer.path}"


class Keeper:
    """What a spy keeps of recurrent layers; ``inner`` computes."""

    def __init__(self, inner: WholeRequests) -> None:
        self.inner = inner
        self.recurred: list[Kept] = []

    def convolve(
        self, layer: RecurrentLayer, x: Tensor, weight: Tensor, bias: Tensor | None,
        activation: str | None,
    ) -> Tensor:  # fmt: skip
        """Pass on and keep."""

        def compute(context: Any, rows: Sequence[Tensor | None]) -> Tensor:
            return context.convolve(layer, rows[0], weight, bias, activation)

        return self._keep(layer, "convolution", compute, (x,))

    def recur(self, layer: RecurrentLayer, *rows: Tensor | None) -> Tensor:
        """Pass on and keep."""

        def compute(context: Any, given: Sequence[Tensor | None]) -> Tensor:
            return context.recur(layer, *given)

        return self._keep(layer, f"recurrence_{layer.kind}", compute, rows)

    def carry(self, *arguments: Any) -> Tensor:
        """Stock: nothing to sweep."""
        return self.inner.carry(*arguments)

    def _keep(
        self, layer: RecurrentLayer, op_class: str, compute: Compute, rows: Sequence[Tensor | None]
    ) -> Tensor:
        output = compute(self.inner, rows)
        kept = tuple(None if each is None else each.detach().clone() for each in rows)
        self.recurred.append(
            Kept(layer=layer, op_class=op_class, rows=kept, compute=compute,
                 output=output.detach().clone())
        )  # fmt: skip
        return output


def sweep_recurrence(
    calls: Sequence[Kept], start: Tensor, tally: "Tally", backward: "Tally", *, quick: bool
) -> None:
    """All calls of one forward over requests that begin at ``start``; the first of a kind fully."""
    swept: set[object] = set()
    for call in calls:
        chunk = call.layer.chunk
        sizes = [chunk + 1] if quick else [1, 5, chunk - 1, chunk, chunk + 1]
        shapes = tuple(None if each is None else tuple(each.shape[1:]) for each in call.rows)
        if (call.op_class, shapes) not in swept:
            swept.add((call.op_class, shapes))
            _packed(call, start, tally)
            _gradients(call, start, backward)
            for size in sizes:
                _paged(call, start, tally, f"paged, chunks of {size}", size)
        _paged(call, start, tally, "paged, decode", None)


def moves(start: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """(what, rows in their new order, new query_start): each request alone, then all reversed."""
    bounds = list(zip(start[:-1].tolist(), start[1:].tolist(), strict=True))
    found = [
        (
            f"request {index} alone",
            torch.arange(a, b),
            torch.tensor([0, b - a], dtype=torch.int32, device=start.device),
        )
        for index, (a, b) in enumerate(bounds)
    ]
    order = torch.cat([torch.arange(a, b) for a, b in reversed(bounds)])
    sizes = torch.tensor([0, *(b - a for a, b in reversed(bounds))])
    turned = sizes.cumsum(0).to(start.device, torch.int32)
    return [*found, ("requests reversed", order, turned)]


def _rows(call: Kept, index: Tensor) -> list[Tensor | None]:
    return [None if each is None else each[index] for each in call.rows]


def _others(call: Kept, healthy: int) -> list[Tensor | None]:
    """Other values in all rows but the first request's; log decays stay below 0."""
    moved = (None if each is None else each * 0.375 for each in call.rows)
    changed = list(moved)
    for each, own in zip(changed, call.rows, strict=True):
        if each is not None and own is not None:
            each[:healthy] = own[:healthy]
    return changed


@torch.no_grad()
def _packed(call: Kept, start: Tensor, tally: "Tally") -> None:
    before = torch.get_num_threads()
    for threads in THREADS:
        torch.set_num_threads(threads)
        try:
            got = call.compute(WholeRequests(start), call.rows)
        finally:
            torch.set_num_threads(before)
        tally.add(call.op_class, call.site, f"{threads} threads", call.output, got)
    for how, index, new_start in moves(start):
        got = call.compute(WholeRequests(new_start), _rows(call, index))
        tally.add(call.op_class, call.site, how, call.output[index], got)
    healthy = int(start[1])
    got = call.compute(WholeRequests(start), _others(call, healthy))
    tally.add(call.op_class, call.site, "other values in the other requests",
              call.output[:healthy], got[:healthy])  # fmt: skip


def _gradients(call: Kept, start: Tensor, tally: "Tally") -> None:
    generator = torch.Generator().manual_seed(call.layer.index)
    upstream = torch.randn(call.output.shape, generator=generator).to(call.output)

    def grads(at: Tensor, rows: Sequence[Tensor | None], up: Tensor) -> tuple[Tensor, ...]:
        inputs = [None if x is None else x.detach().clone().requires_grad_() for x in rows]
        with torch.enable_grad():
            output = call.compute(WholeRequests(at), inputs)
            return torch.autograd.grad(output, [x for x in inputs if x is not None], up)

    wanted = grads(start, call.rows, upstream)
    everything = torch.arange(len(call.output))
    for how, index, new_start in (("again", everything, start), *moves(start)):
        got = grads(new_start, _rows(call, index), upstream[index])
        for whole, part in zip(wanted, got, strict=True):
            tally.add(call.op_class, call.site, how, whole[index], part)


@torch.no_grad()
def _paged(call: Kept, start: Tensor, tally: "Tally", how: str, size: int | None) -> None:
    """Every request over scattered pages, ``size`` rows a step; None: decoded round each chunk's
    end, whole in between."""
    chunk = call.layer.chunk
    for first, last in zip(start[:-1].tolist(), start[1:].tolist(), strict=True):
        length = last - first
        cuts = range(0, length, size) if size else _round_ends(length, chunk)
        bounds = [*sorted({0, *cuts}), length]
        pages, table = _scattered(call, -(-length // chunk))
        parts: list[Tensor] = []
        for at, stop in pairwise(bounds):
            positions = torch.arange(at, stop)
            index = (
                torch.tensor([0, stop - at], dtype=torch.int32),
                torch.tensor([stop], dtype=torch.int32),
                table[None, : -(-stop // chunk)].contiguous(),
                table.long()[positions // chunk] * chunk + positions % chunk,
            )
            starts, lengths, tables, slots = (each.to(call.output.device) for each in index)
            batch = RowBatch(starts, lengths, tables, slots)
            context = PagedState({call.layer.index: pages}, {chunk: batch})
            parts.append(call.compute(context, _rows(call, torch.arange(first + at, first + stop))))
        tally.add(call.op_class, call.site, how, call.output[first:last], torch.cat(parts))


def _round_ends(length: int, chunk: int) -> list[int]:
    """Steps of one row from two before each chunk's end to two after it."""
    ends = range(chunk, length, chunk)
    return [at for end in ends for at in range(end - 2, end + 3) if 0 < at < length]


def _scattered(call: Kept, pages: int) -> tuple[LayerPages, Tensor]:
    """Pages full of NaN and a table that uses every second one, backwards."""
    x = next(each for each in call.rows if each is not None)
    kept = LayerPages(call.layer, 2 * pages, dtype=x.dtype, device=x.device)
    stores = (kept.recurrence.k, kept.recurrence.u, kept.recurrence.decay, kept.recurrence.end)
    for store in (*stores, kept.convolution.rows):
        store.fill_(float("nan"))
    return kept, torch.arange(2 * pages - 1, 0, -2, dtype=torch.int32)
