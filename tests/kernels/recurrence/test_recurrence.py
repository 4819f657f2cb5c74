"""Decode repeats prefill: one set of bits for every cut, hit, eviction and company; refusals."""

import random

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.dispatch import substituted
from zeromismatch.kernels.errors import ContractError, NonFiniteError
from zeromismatch.kernels.recurrence import (
    KINDS,
    cpu,
    new_recurrence_cache,
    packed_recurrence,
    paged_recurrence,
    stepwise_recurrence,
)  # fmt: skip
from zeromismatch.kernels.reference import recurrence as reference

CHUNK, SIZES = 8, (2, 4, 12, 20)  # the kit's: rows per chunk; HK, HV, K, V
LENGTHS = tuple(chunks * CHUNK + extra for chunks in (1, 2, 3) for extra in (-1, 0, 1))


def starts(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def whole(kind, rows):
    return packed_recurrence(kind, *rows, starts(len(rows[0])), CHUNK)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_cut_of_a_request_gives_the_bits_of_the_whole(kit, kind, length):
    rows = kit.inputs(kind, length, seed=length)
    wanted = whole(kind, rows)
    cuts = {
        "whole": lambda done: length,
        "decode": lambda done: 1,
        "threes": lambda done: 3,
        "chunk + 1": lambda done: CHUNK + 1,
        "prefill, then decode": lambda done: 1 if done else length - 2,
    }
    for name, cut in cuts.items():
        got = kit.run_alone(kit.Engine(kind), kit.Served(rows), cut)
        assert bits.equal(got, wanted), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [1, 2, 3])
def test_a_hit_at_each_boundary_shares_pages_and_gives_the_same_bits(kit, kind, shared):
    prefix = kit.inputs(kind, 3 * CHUNK + 2, seed=1)
    engine, first = kit.Engine(kind), kit.Served(prefix)
    kit.run_alone(engine, first, lambda done: 5)
    kept = [each.clone() for each in (engine.cache.k, engine.cache.u, engine.cache.end)]
    index = torch.arange(shared * CHUNK)
    tail = kit.inputs(kind, CHUNK + 3, seed=2)
    rows = kit.joined([tuple(None if x is None else x[index] for x in prefix), tail])
    second = kit.Served(rows, pages=first.pages[:shared], done=shared * CHUNK)
    kit.run_alone(engine, second, lambda done: 4)
    assert bits.equal(second.out[shared * CHUNK :], whole(kind, rows)[shared * CHUNK :])
    for page in first.pages[:shared]:  # a full page never changes, its state neither
        for before, after in zip(kept, (engine.cache.k, engine.cache.u, engine.cache.end),
                                 strict=True):  # fmt: skip
            assert bits.equal(before[page], after[page])


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_batches_with_preemption_give_the_bits_of_the_packed_forward(kit, kind):
    lengths = (19, 1, 25, 8, 16, 3)
    given = [kit.inputs(kind, length, seed=10 + at) for at, length in enumerate(lengths)]
    wanted = packed_recurrence(kind, *kit.joined(given), starts(*lengths), CHUNK).split(lengths)
    engine, chance = kit.Engine(kind, seed=4), random.Random(3)
    requests, dropped = [kit.Served(rows) for rows in given], 0
    while any(each.done < each.length for each in requests):
        going = [each for each in requests if each.done < each.length and chance.random() < 0.7]
        if not going:
            continue
        engine.step([
            (each, min(chance.choice((1, 1, 2, 5, 9)), each.length - each.done)) for each in going
        ])  # fmt: skip
        inside = [each for each in requests if each.done < each.length and each.done % CHUNK]
        if inside and chance.random() < 0.4:
            victim = chance.choice(inside)
            engine.drop(victim, keep=victim.done // CHUNK)  # what was sampled is computed again
            dropped += 1
    assert dropped >= 2
    for request, out in zip(requests, wanted, strict=True):
        assert bits.equal(request.out, out)


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_state_is_written_once_when_its_chunk_fills(kit, kind):
    engine, request = kit.Engine(kind), kit.Served(kit.inputs(kind, 2 * CHUNK + 1))
    seen: dict[int, torch.Tensor] = {}
    while request.done < request.length:
        engine.step([(request, 1)])
        for place, page in enumerate(request.pages):
            full = request.done >= (place + 1) * CHUNK
            assert bool(torch.isfinite(engine.cache.end[page]).all()) == full
            if full:
                assert bits.equal(seen.setdefault(page, engine.cache.end[page].clone()),
                                  engine.cache.end[page])  # fmt: skip
    assert len(seen) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_fold_at_another_place_is_other_bits(kit, kind):
    rows = kit.inputs(kind, 3 * CHUNK)
    other = packed_recurrence(kind, *rows, starts(3 * CHUNK), CHUNK // 2)
    difference = bits.first_difference(whole(kind, rows)[CHUNK // 2 :], other[CHUNK // 2 :])
    assert difference is not None
    step, _ = stepwise_recurrence(
        kind, *rows, torch.zeros(1, *kit.state), starts(3 * CHUNK)
    )
    assert not bits.equal(step, other)
    assert float((step - other).abs().max()) < 1e-5  # the same numbers but for their last bits


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_keeps_the_state_of_decode_is_caught(kit, kind):
    """The red control: a decode that updates a state instead of repeating prefill's row."""
    rows = kit.inputs(kind, 2 * CHUNK + 3, seed=3)
    wanted, engine = whole(kind, rows), kit.Engine(kind)

    def recurrent(q, k, v, g, beta, k_pages, u_pages, g_pages, end_pages, start, length, table):
        out = reference.recurrence(
            q, k, v, g, beta, k_pages, u_pages, g_pages, end_pages, start, length, table
        )
        if len(q) > 1:
            return out
        done = slice(0, int(length[0]))
        states = torch.zeros(1, *kit.state)
        past = tuple(None if x is None else x[done] for x in rows)
        return reference.stepwise(*past, states, starts(done.stop))[0][-1:], *out[1:]

    with substituted(cpu.CONTRACTS[kind].id, recurrent):
        got = kit.run_alone(engine, kit.Served(rows), lambda done: 1)
    assert not bits.equal(got, wanted)
    assert float((got - wanted).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_stepwise_gives_the_same_bits_for_every_cut(kit, kind):
    rows, zero = kit.inputs(kind, 21), torch.zeros(1, *kit.state)
    wanted, end = stepwise_recurrence(kind, *rows, zero, starts(21))
    state, parts = zero, []
    for part in (slice(0, 1), slice(1, 13), slice(13, 21)):
        cut = tuple(None if x is None else x[part] for x in rows)
        out, state = stepwise_recurrence(kind, *cut, state, starts(part.stop - part.start))
        parts.append(out)
    assert bits.equal(torch.cat(parts), wanted)
    assert bits.equal(state, end)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_rows_are_widened_exactly(kit, kind):
    rows = kit.inputs(kind, 11, dtype=torch.bfloat16)
    widened = tuple(None if x is None else x.float() for x in rows)
    assert bits.equal(whole(kind, rows), whole(kind, widened))


@pytest.mark.parametrize("place", range(5), ids=["q", "k", "v", "g", "beta"])
def test_what_is_no_number_is_named_and_nothing_is_written(kit, place):
    engine, request = kit.Engine("gated_delta"), kit.Served(kit.inputs("gated_delta", 12))
    engine.step([(request, 7)])
    spoiled = kit.Served(kit.inputs("gated_delta", 9, seed=5))
    value = spoiled.rows[place]
    assert value is not None
    value[4, 1] = float("nan")
    before = engine.cache.k.clone()
    with pytest.raises(NonFiniteError, match="row 4 of request 1"):
        engine.step([(request, 5), (spoiled, 9)])
    assert bits.equal(before, engine.cache.k)
    engine.step([(request, 5)])  # the same step without it


def test_a_hit_off_the_boundary_is_refused(kit):
    engine, first = kit.Engine("ssd"), kit.Served(kit.inputs("ssd", 2 * CHUNK + 4))
    kit.run_alone(engine, first, lambda done: 6)
    rows = kit.inputs("ssd", 2 * CHUNK)
    inside = kit.Served(rows, pages=[first.pages[0], engine.free.pop()], done=CHUNK + 3)
    with pytest.raises(ContractError, match="0 rows are there; a prefix hit ends on a chunk's"):
        engine.step([(inside, 1)])
    reopened = kit.Served(rows, pages=first.pages[:1], done=CHUNK - 2)
    with pytest.raises(ContractError, match="no row is written twice"):
        engine.step([(reopened, 1)])
    half = kit.Served(rows, pages=[first.pages[2], engine.free.pop()], done=CHUNK)
    with pytest.raises(ContractError, match="holds 4 of 8 rows and so no state"):
        engine.step([(half, 1)])


def cached(chunk=CHUNK, pages=4):
    return new_recurrence_cache(pages, chunk, *SIZES)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(0, 3, [9])], "page 9 of request 0 does not exist"),
        ([(0, 2, [1]), (0, 2, [1])], "page 1 is written twice"),
    ],
)
def test_pages_that_cannot_serve_a_step_are_refused(kit, parts, message):
    rows = kit.inputs("ssd", sum(count for _, count, _ in parts))
    with pytest.raises(ContractError, match=message):
        paged_recurrence("ssd", *rows, cached(), kit.batch_of(parts))


def test_another_chunk_size_is_refused(kit):
    rows, batch = kit.inputs("ssd", 12), kit.batch_of([(0, 12, [0, 1])])
    with pytest.raises(ContractError, match="make slots of the cache's own chunk size"):
        paged_recurrence("ssd", *rows, cached(chunk=4, pages=8), batch)
    with pytest.raises(ContractError, match="chunks of 0 rows have no contract"):
        packed_recurrence("ssd", *rows, starts(12), 0)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("ssd", {4: torch.rand(6, 4)}, "beta None"),
        ("kda", {3: -torch.rand(6, 4)}, r"g \[T, HV, K\]"),
        ("gated_delta", {2: torch.rand(6, 3, 20)}, "check which layer"),
        ("gated_delta", {3: torch.rand(6, 4)}, "the state would grow"),
    ],
)
def test_rows_that_do_not_belong_together_are_refused(kit, kind, change, message):
    rows = [change.get(place, x) for place, x in enumerate(kit.inputs(kind, 6))]
    with pytest.raises(ContractError, match=message):
        packed_recurrence(kind, *rows, starts(6), CHUNK)


def test_rows_of_another_layer_and_unknown_kinds_are_refused(kit):
    rows = kit.inputs("ssd", 3)
    with pytest.raises(ContractError, match="take one of ssd, gated_delta, kda"):
        packed_recurrence("mamba", *rows, starts(3), CHUNK)
    other = new_recurrence_cache(4, CHUNK, *SIZES[:3], SIZES[3] + 1)
    with pytest.raises(ContractError, match="make the cache for this layer"):
        paged_recurrence("ssd", *rows, other, kit.batch_of([(0, 3, [0])]))
    with pytest.raises(ContractError, match="does not ascend from 0 to the 3 rows"):
        packed_recurrence("ssd", *rows, starts(2), CHUNK)
