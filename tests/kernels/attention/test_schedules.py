"""One set of attention bits for every schedule: decode, prefill, chunks, mixed batches, packed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zeromismatch.kernels import bits
from zeromismatch.kernels.attention import (
    PAGE,
    AttentionBatch,
    KVCache,
    new_cache,
    packed_attention,
    paged_attention,
    write_kv,
)

DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (100, 47, 16, 1, 33)
Steps = Sequence[dict[int, tuple[int, int]]]  # per step: request -> rows [start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    options: dict[str, object]

    @property
    def packed(self) -> list[Tensor]:
        start = torch.tensor([0, *torch.tensor([len(q) for q in self.q]).cumsum(0).tolist()])
        rows = packed_attention(*map(torch.cat, (self.q, self.k, self.v)), start, **self.options)
        return list(rows.split([len(q) for q in self.q]))


def make_case(
    dtype: torch.dtype = torch.float32,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 32,
    **options: object,
) -> Case:
    def draw(count: int, num: int, size: float) -> Tensor:
        return (torch.randn(count, num, dim) * size).to(dtype)

    return Case(
        q=[draw(n, heads, 3.0) for n in LENGTHS],
        k=[draw(n, kv_heads, 1.0) for n in LENGTHS],
        v=[draw(n, kv_heads, 5.0) for n in LENGTHS],
        options={"scale": dim**-0.5, **options},
    )


def scattered_tables(cache: KVCache, lengths: Sequence[int]) -> list[Tensor]:
    needed = [-(-n // PAGE) for n in lengths]
    return list(torch.randperm(cache.num_pages)[: sum(needed)].split(needed))


def run_steps(case: Case, steps: Steps, spoil: float = torch.nan) -> list[Tensor]:
    """Execute a schedule over scattered pages of a cache that is full of ``spoil``."""
    cache = new_cache(40, *case.k[0].shape[1:], dtype=case.k[0].dtype)
    cache.k.fill_(spoil)
    cache.v.fill_(spoil)
    tables = scattered_tables(cache, LENGTHS)
    out = [torch.full_like(q, torch.nan) for q in case.q]
    for step in steps:
        order = list(step)
        rows = [slice(*step[b]) for b in order]
        counts = [part.stop - part.start for part in rows]
        table = torch.full((len(order), 8), 999, dtype=torch.int32)
        for i, b in enumerate(order):
            table[i, : len(tables[b])] = tables[b]
        where = [(tables[b], torch.arange(*step[b])) for b in order]
        slot = [pages[position // PAGE] * PAGE + position % PAGE for pages, position in where]
        batch = AttentionBatch(
            query_start=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            kv_len=torch.tensor([part.stop for part in rows], dtype=torch.int32),
            block_table=table,
            slot=torch.cat(slot),
        )
        parts = list(zip(order, rows, strict=True))
        q, k, v = (torch.cat([x[b][part] for b, part in parts]) for x in (case.q, case.k, case.v))
        write_kv(cache, k, v, batch.slot)
        result = paged_attention(q, cache, batch, **case.options)
        for (b, part), piece in zip(parts, result.split(counts), strict=True):
            out[b][part] = piece
    return out


def chunks(size: int) -> Steps:
    return [
        {b: (start, min(start + size, n)) for b, n in enumerate(LENGTHS) if start < n}
        for start in range(0, max(LENGTHS), size)
    ]


def random_steps(seed: int) -> Steps:
    chance = random.Random(seed)
    done, steps = dict.fromkeys(range(len(LENGTHS)), 0), []
    while any(done[b] < n for b, n in enumerate(LENGTHS)):
        step = {}
        for b in chance.sample(range(len(LENGTHS)), k=len(LENGTHS)):
            left = LENGTHS[b] - done[b]
            if left and chance.random() < 0.6:
                count = min(left, chance.choice((1, 1, 1, 2, 7, 16, 23, 40)))
                step[b] = (done[b], done[b] + count)
                done[b] += count
        if step:
            steps.append(step)
    return steps


SCHEDULES = {
    "alone": [{b: (0, n)} for b, n in enumerate(LENGTHS)],
    "mixed": chunks(200),
    "decode": chunks(1),
    "chunk:5": chunks(5),
    "chunk:16": chunks(16),
    "chunk:33": chunks(33),
    "fuzz:1": random_steps(1),
    "fuzz:2": random_steps(2),
}
OPTIONS = {
    "plain": {},
    "window 1": {"window": 1},
    "window 15": {"window": 15},
    "window 16": {"window": 16},
    "window 17": {"window": 17},
    "window 33": {"window": 33},
    "softcap, sinks, window": {"softcap": 4.0, "sinks": torch.linspace(-3, 5, 6), "window": 40},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_schedule_gives_the_packed_bits(dtype: torch.dtype, schedule: str) -> None:
    case = make_case(dtype)
    for got, wanted in zip(run_steps(case, SCHEDULES[schedule]), case.packed, strict=True):
        assert wanted.isfinite().all()
        assert bits.equal(got, wanted)


@pytest.mark.parametrize("options", OPTIONS)
def test_options_keep_the_bits_of_every_schedule(options: str) -> None:
    case = make_case(dim=16, **OPTIONS[options])
    for schedule in ("alone", "decode", "fuzz:1"):
        for got, wanted in zip(run_steps(case, SCHEDULES[schedule]), case.packed, strict=True):
            assert wanted.isfinite().all()
            assert bits.equal(got, wanted)


LAYOUTS = [(9, 3, 64), (16, 8, 128), (4, 4, 80), (40, 1, 16), (2, 1, 256), (6, 2, 40)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_head_layouts_keep_the_bits_of_every_schedule(layout: tuple[int, int, int]) -> None:
    case = make_case(torch.float32, *layout)
    for schedule in ("mixed", "decode", "chunk:5"):
        for got, wanted in zip(run_steps(case, SCHEDULES[schedule]), case.packed, strict=True):
            assert bits.equal(got, wanted)


def test_threads_do_not_move_a_bit(threads: int) -> None:
    case = make_case()
    torch.set_num_threads(1)
    wanted = case.packed
    torch.set_num_threads(threads)
    for schedule in ("mixed", "fuzz:1"):
        assert all(map(bits.equal, run_steps(case, SCHEDULES[schedule]), wanted))
    assert all(map(bits.equal, case.packed, wanted))


@pytest.mark.parametrize("spoil", [0.0, 1e30, torch.inf, -torch.inf])
def test_what_lies_in_unused_slots_does_not_leak(spoil: float) -> None:
    case = make_case()
    for schedule in ("alone", "fuzz:2"):
        got = run_steps(case, SCHEDULES[schedule], spoil=spoil)
        assert all(map(bits.equal, got, case.packed))


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rows_that_differ(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> int:
    """Rows of a decode that differ from the same rows of a whole prefill."""
    whole = attend(q, k, v)
    decoded = [attend(q[t : t + 1], k[: t + 1], v[: t + 1]) for t in range(len(q))]
    return int((~bits.equal_rows(torch.cat(decoded), whole)).sum())


def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(*heads_first, is_causal=len(q) > 1, enable_gqa=True)
    return out[0].transpose(0, 1).contiguous()


def paged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pages = -(-len(k) // PAGE)
    cache = new_cache(pages, k.shape[1], k.shape[2], dtype=k.dtype)
    write_kv(cache, k, v, torch.arange(len(k)))
    batch = AttentionBatch(
        query_start=torch.tensor([0, len(q)], dtype=torch.int32),
        kv_len=torch.tensor([len(k)], dtype=torch.int32),
        block_table=torch.arange(pages, dtype=torch.int32)[None],
        slot=torch.arange(len(k) - len(q), len(k)),
    )
    return paged_attention(q, cache, batch, scale=q.shape[2] ** -0.5)


def test_stock_decode_differs_from_stock_prefill_and_ours_does_not() -> None:
    q, k, v = torch.randn(100, 4, 64), torch.randn(100, 2, 64), torch.randn(100, 2, 64)
    assert rows_that_differ(paged, q, k, v) == 0
    assert rows_that_differ(stock, q, k, v) > 0
    fp64 = stock(q.double(), k.double(), v.double())
    assert torch.allclose(paged(q, k, v).double(), fp64, atol=1e-5)


def test_a_kernel_that_reads_one_key_too_many_is_red() -> None:
    """Planted: rows whose context ends at offset 4 of a page see one key more."""

    def leaky(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(q) == 1 and len(k) % PAGE == 5:
            k, v = torch.cat((k, k[:1])), torch.cat((v, v[:1]))
        return paged(q, k, v)

    q, k, v = torch.randn(300, 2, 16), torch.randn(300, 1, 16), torch.randn(300, 1, 16)
    differing = rows_that_differ(leaky, q, k, v)
    assert 0 < differing <= 19
