"""Rows of recurrent layers, and a small engine that serves requests in pieces: fixture ``kit``.

The engine keeps pages as the real ones do: one per request and chunk, freed pages taken again in
another order, whole chunks shared by prefix.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from zeromismatch.kernels.recurrence import Kind, RowBatch, new_recurrence_cache, paged_recurrence

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
CHUNK, KEY_HEADS, VALUE_HEADS, KEY, VALUE = 8, 2, 4, 12, 20


def inputs(kind: Kind, rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k = (
        torch.nn.functional.normalize(drawn(rows, KEY_HEADS, KEY), dim=-1).to(dtype)
        for _ in range(2)
    )
    v = drawn(rows, VALUE_HEADS, VALUE).to(dtype)
    gates = (rows, VALUE_HEADS, KEY) if kind == "kda" else (rows, VALUE_HEADS)
    g = -(drawn(*gates) * 1.5).square()
    return q, k, v, g, None if kind == "ssd" else drawn(rows, VALUE_HEADS).sigmoid()


def taken(given: Inputs, index: Tensor) -> Inputs:
    q, k, v, g, beta = given
    return q[index], k[index], v[index], g[index], None if beta is None else beta[index]


def joined(parts: Sequence[Inputs]) -> Inputs:
    q, k, v, g = (torch.cat([part[place] for part in parts]) for place in range(4))
    betas = [part[4] for part in parts if part[4] is not None]
    return q, k, v, g, torch.cat(betas) if betas else None


def batch_of(
    parts: Sequence[tuple[int, int, list[int]]], chunk: int = CHUNK, widest: int = 6
) -> RowBatch:
    """Requests as (positions before, new rows, pages)."""
    start, length, table, slot = [0], [], [], []
    for before, count, pages in parts:
        start.append(start[-1] + count)
        length.append(before + count)
        table.append((pages + [10**6] * widest)[:widest])
        slot += [pages[p // chunk] * chunk + p % chunk for p in range(before, before + count)]
    ints = (torch.tensor(each, dtype=torch.int32) for each in (start, length, table))
    return RowBatch(*ints, torch.tensor(slot, dtype=torch.int64))


@dataclass
class Engine:
    """Pages of one layer; everything in them is NaN until it is written."""

    kind: Kind
    pages: int = 24
    seed: int = 0
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = new_recurrence_cache(
            self.pages, CHUNK, KEY_HEADS, VALUE_HEADS, KEY, VALUE,
            per_channel=self.kind == "kda",
        )  # fmt: skip
        for store in (self.cache.k, self.cache.u, self.cache.decay, self.cache.end):
            store.fill_(float("nan"))
        self.free = list(range(self.pages))
        random.Random(self.seed).shuffle(self.free)

    def step(self, requests: Sequence[tuple["Served", int]]) -> None:
        """One forward: (request, new rows) each."""
        given, parts = [], []
        for request, count in requests:
            while len(request.pages) * CHUNK < request.done + count:
                request.pages.append(self.free.pop())
            rows = torch.arange(request.done, request.done + count)
            given.append(taken(request.rows, rows))
            parts.append((request.done, count, request.pages))
        out = paged_recurrence(self.kind, *joined(given), self.cache, batch_of(parts))
        split = out.split([count for _, count in requests])
        for (request, count), got in zip(requests, split, strict=True):
            request.out[request.done : request.done + count] = got
            request.done += count

    def drop(self, request: "Served", keep: int = 0) -> None:
        """Preempt: only the first ``keep`` chunks stay, which are whole."""
        self.free += request.pages[keep:]
        request.pages, request.done = request.pages[:keep], keep * CHUNK


@dataclass
class Served:
    """A request on its way: its rows, the pages it holds, what came out so far."""

    rows: Inputs
    pages: list[int] = field(default_factory=list)
    done: int = 0

    def __post_init__(self) -> None:
        self.out = torch.full(self.rows[2].shape, float("nan"))

    @property
    def length(self) -> int:
        return len(self.rows[0])


def run_alone(engine: Engine, request: Served, cuts: Callable[[int], int]) -> Tensor:
    """A request in pieces: ``cuts(done)`` new rows at a time."""
    while request.done < request.length:
        engine.step([(request, min(cuts(request.done), request.length - request.done))])
    return request.out


@pytest.fixture
def kit() -> SimpleNamespace:
    return SimpleNamespace(
        Engine=Engine, Served=Served, batch_of=batch_of, inputs=inputs, joined=joined,
        run_alone=run_alone, chunk=CHUNK, state=(VALUE_HEADS, KEY, VALUE), heads=VALUE_HEADS,
        sizes=(KEY_HEADS, VALUE_HEADS, KEY, VALUE),
    )  # fmt: skip
