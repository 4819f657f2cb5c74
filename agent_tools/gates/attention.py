"""C1's attention: the same query row, whole, in chunks, decoded, alone and among others.

The forward of the trainer is run with a context that keeps what each attention call got, options
included (window, softcap, sinks). Each kind of call is then repeated: as it was, by request alone,
with the requests in another order, with NaN in every other request, under one to three threads,
and over a paged cache filled with NaN whose pages are scattered, in chunks down to one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...kernels.attention import PAGE, AttentionBatch, KVCache, new_cache
from ...kernels.trial import THREADS
from ...model_recipes.plan import STOCK
from ...trainer.engines.base import Request
from ...trainer.engines.packed import PackedBatch
from ...trainer.engines.paged_batch import PagedBatch
from ...trainer.engines.rows import base_model
from .recurrence import Keeper, moves, sweep_recurrence

if TYPE_CHECKING:
    from .bench import Engines
    from .operators import Tally

CHUNKS = (1, 5, PAGE + 1)
CLASS = "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """What one attention call got, and gave: q, k, v, options."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    output: Tensor

    @property
    def kind(self) -> tuple[object, ...]:
        """Calls of one kind share shapes and options."""
        shapes = tuple(self.q.shape[1:]), tuple(self.k.shape[1:])
        return (*shapes, *(repr(self.options[n]) for n in ("scale", "window", "softcap")))


class Spy(Keeper):
    """A context that keeps what it is asked."""

    def __init__(self, inner: PackedBatch) -> None:
        super().__init__(inner)
        self.attention = inner
        self.calls: list[Attended] = []

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> Tensor:
        """Pass on and keep."""
        output = self.attention.attend(layer_idx, q, k, v, **options)
        kept = (each.detach().clone() for each in (q, k, v, output))
        q, k, v, out = kept
        self.calls.append(Attended(layer=layer_idx, q=q, k=k, v=v, options=options, output=out))
        return output


def sweep_attention(
    engines: "Engines",
    requests: Sequence[Request],
    tally: "Tally",
    backward: "Tally",
    stock: "Tally",
    *,
    quick: bool,
) -> int:
    """All calls of one forward that read a cache; returns how many there were.

    stock: gets stock attention on the same inputs, against itself: the red control.
    """
    lengths = [len(request.tokens) for request in requests]
    device = engines.packed.loaded.device
    start = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    spy = Spy(PackedBatch(start))
    with torch.no_grad():
        base_model(engines.packed.instrument)(
            input_ids=torch.tensor([[t for r in requests for t in r.tokens]], device=device),
            position_ids=torch.tensor([[p for n in lengths for p in range(n)]], device=device),
            use_cache=False,
            batch=spy,
        )
    kinds = {call.kind for call in spy.calls}
    for call in spy.calls:
        site = f"attention of layer {call.layer}"
        if call.kind in kinds:
            kinds.remove(call.kind)
            _packed(call, start, tally, site)
            _gradients(call, start, backward, site)
            _paged(as_stock(call, start), start, CHUNKS[1], stock, site)
            for size in CHUNKS[1:] if quick else CHUNKS:
                _paged(call, start, size, tally, site)
        _decode_last(call, start, tally, site)
    sweep_recurrence(spy.recurred, start, tally, backward, quick=quick)
    return len(spy.calls) + len(spy.recurred)


def as_stock(call: Attended, start: Tensor) -> Attended:
    """The call as stock attention answers it."""
    stock = replace(call, options=call.options | {"attention": STOCK})
    with torch.no_grad():
        return replace(stock, output=_attend(stock, start, call.q, call.k, call.v))


def _attend(call: Attended, start: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return PackedBatch(start).attend(call.layer, q, k, v, **call.options)


def _spoiled(x: Tensor, healthy: Tensor) -> Tensor:
    spoiled = torch.full_like(x, float("nan"))
    spoiled[healthy] = x[healthy]
    return spoiled


@torch.no_grad()
def _packed(call: Attended, start: Tensor, tally: "Tally", site: str) -> None:
    tensors = (call.q, call.k, call.v)
    before = torch.get_num_threads()
    for threads in THREADS:
        torch.set_num_threads(threads)
        try:
            got = _attend(call, start, *tensors)
        finally:
            torch.set_num_threads(before)
        tally.add(CLASS, site, f"{threads} threads", call.output, got)
    for how, rows, new_start in moves(start):
        got = _attend(call, new_start, *(each[rows] for each in tensors))
        tally.add(CLASS, site, how, call.output[rows], got)
    healthy = torch.arange(int(start[1]))
    got = _attend(call, start, *(_spoiled(each, healthy) for each in tensors))
    tally.add(CLASS, site, "NaN in the other requests", call.output[healthy], got[healthy])


def _gradients(call: Attended, start: Tensor, tally: "Tally", site: str) -> None:
    generator = torch.Generator().manual_seed(call.layer)
    upstream = torch.randn(call.output.shape, generator=generator).to(call.output)

    def grads(at: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        *inputs, up = given
        inputs = [each.detach().clone().requires_grad_() for each in inputs]
        with torch.enable_grad():
            return torch.autograd.grad(_attend(call, at, *inputs), inputs, up)

    tensors = (call.q, call.k, call.v, upstream)
    wanted = grads(start, *tensors)
    everything = torch.arange(call.q.shape[0])
    for how, rows, new_start in (("again", everything, start), *moves(start)):
        for whole, part in zip(wanted, grads(new_start, *(t[rows] for t in tensors)), strict=True):
            tally.add(CLASS, site, how, whole[rows], part)
    healthy = torch.arange(int(start[1]))
    spoiled = grads(start, *(_spoiled(each, healthy) for each in tensors))
    for whole, part in zip(wanted, spoiled, strict=True):
        tally.add(CLASS, site, "NaN in the other requests", whole[healthy], part[healthy])


@torch.no_grad()
def _paged(call: Attended, start: Tensor, size: int, tally: "Tally", site: str) -> None:
    """Every request over scattered pages, ``size`` rows a step."""
    for first, last in zip(start[:-1].tolist(), start[1:].tolist(), strict=True):
        cache, table = _scattered(call, last - first)
        parts = [
            _step(call, cache, table, first, at, min(at + size, last - first))
            for at in range(0, last - first, size)
        ]
        tally.add(CLASS, site, f"paged, chunks of {size}", call.output[first:last],
                  torch.cat(parts))  # fmt: skip


@torch.no_grad()
def _decode_last(call: Attended, start: Tensor, tally: "Tally", site: str) -> None:
    """The last rows of the last request, decoded one by one after a whole prompt."""
    first, last = int(start[-2]), int(start[-1])
    length = last - first
    cache, table = _scattered(call, length)
    prompt = max(1, length - 4)
    parts = [_step(call, cache, table, first, 0, prompt)]
    parts += [_step(call, cache, table, first, at, at + 1) for at in range(prompt, length)]
    tally.add(CLASS, site, "paged, decode", call.output[first:last], torch.cat(parts))


def _scattered(call: Attended, length: int) -> tuple[KVCache, Tensor]:
    """A cache full of NaN and a page table that uses every second page, backwards."""
    pages = -(-length // PAGE)
    cache = new_cache(
        2 * pages, call.k.shape[1], call.k.shape[2], dtype=call.k.dtype, device=call.k.device
    )
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    return cache, torch.arange(2 * pages - 1, 0, -2, dtype=torch.int32, device=call.k.device)


def _step(call: Attended, cache: KVCache, table: Tensor, first: int, at: int, stop: int) -> Tensor:
    device = call.k.device
    positions = torch.arange(at, stop, device=device)
    batch = AttentionBatch(
        query_start=torch.tensor([0, stop - at], dtype=torch.int32, device=device),
        kv_len=torch.tensor([stop], dtype=torch.int32, device=device),
        block_table=table[None, : -(-stop // PAGE)].contiguous(),
        slot=table.long()[positions // PAGE] * PAGE + positions % PAGE,
    )
    rows = slice(first + at, first + stop)
    context = PagedBatch({}, {}, [cache], batch)
    return context.attend(0, call.q[rows], call.k[rows], call.v[rows], **call.options)
