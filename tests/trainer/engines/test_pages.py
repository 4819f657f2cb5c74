"""Pages are shared by count, prefixes found by chained keys, and the scheduler always gets done."""

import random
from collections import Counter

import pytest

from zeromismatch.kernels.attention import PAGE
from zeromismatch.kernels.errors import CapabilityError
from zeromismatch.trainer.engines.base import (
    Event,
    Evict,
    Hit,
    Policy,
    Preempt,
    Publish,
    Request,
    Sampling,
    Schedule,
    Slice,
    StateSpec,
    Step,
)
from zeromismatch.trainer.engines.legal import legal
from zeromismatch.trainer.engines.pages import Pages, Pools, pages_for, peak_pages
from zeromismatch.trainer.engines.prefixes import Prefixes, extend_keys
from zeromismatch.trainer.engines.scheduler import Scheduler

KV = (StateSpec(site="attn", kind="kv", granule=16),)


def run(request: str, start: int, stop: int, keep: int | None = None) -> Step:
    return Step(slices=(Slice(request=request, start=start, stop=stop, keep=keep),))


def test_hit_shares_full_pages_until_the_last_holder_lets_go() -> None:
    pages = Pages(6, reserved=1)
    pages.extend("a", 40)
    pages.share("b", "a", 32)
    assert pages.tables == {"a": [1, 2, 3], "b": [1, 2]}
    assert pages.taken == 3
    pages.extend("b", 33)
    assert pages.tables["b"] == [1, 2, 4]
    pages.drop("a")
    assert pages.taken == 3
    assert pages.released_by({"b"}, keeping=[2]) == 2
    pages.drop("b")
    assert pages.taken == 0
    assert 0 not in pages.free


def test_rollback_releases_pages_and_a_full_pool_is_an_error() -> None:
    pages = Pages(3)
    pages.extend("a", 48)
    with pytest.raises(CapabilityError, match="needs one more"):
        pages.extend("b", 1)
    pages.truncate("a", 33)
    assert len(pages.tables["a"]) == 3
    pages.truncate("a", 32)
    assert len(pages.tables["a"]) == 2
    assert pages.slots("a", 15, 18) == [15, 16, 17]


def test_peak_counts_shared_pages_once_and_forgets_what_was_dropped() -> None:
    hit = Hit(request="b", source="a", upto=32)
    assert peak_pages([run("a", 0, 40), hit, run("b", 32, 40)], 10) == 4
    assert peak_pages([run("a", 0, 40), Evict(request="a"), run("b", 0, 40)], 10) == 3
    publish = Publish(version=1, digest="x")
    assert peak_pages([run("a", 0, 40), publish, run("b", 0, 40)], 10) == 3
    assert peak_pages([run("a", 0, 40, keep=1), run("b", 0, 40)], 10) == 4


def keys(tokens: list[int], version: int = 0, adapter: str | None = None) -> list[bytes]:
    out: list[bytes] = []
    extend_keys(out, tokens, PAGE, version=version, adapter=adapter)
    return out


def test_page_keys_cover_everything_before_them() -> None:
    tokens = list(range(64))
    assert len(keys(tokens)) == 4
    assert keys(tokens[:63]) == keys(tokens)[:3]
    assert keys([9, *tokens[1:]])[3] != keys(tokens)[3]
    assert keys(tokens, version=1)[0] != keys(tokens)[0]
    assert keys(tokens, adapter="x")[0] != keys(tokens)[0]
    assert keys([1, 23])[:0] == []
    grown = keys(tokens[:40])
    extend_keys(grown, tokens, PAGE, version=0, adapter=None)
    assert grown == keys(tokens)


def test_prefixes_name_a_holder_until_it_drops() -> None:
    prefixes, chain = Prefixes(), keys(list(range(48)))
    prefixes.promise("a", chain)
    assert prefixes.is_promised(chain[0])
    prefixes.hold("a", chain[:2])
    assert not prefixes.is_promised(chain[0])
    assert prefixes.is_promised(chain[2])
    prefixes.hold("b", chain[:1])
    assert prefixes.longest(chain) == (2, "a")
    prefixes.drop("a")
    assert prefixes.longest(chain) == (1, "b")
    assert not prefixes.is_promised(chain[2])


def simulate(
    requests: list[Request], policy: Policy, num_pages: int
) -> tuple[Schedule, list[Request]]:
    """Run the scheduler with made-up tokens; the executed schedule and the finished requests."""
    pages, executed = Pools({PAGE: num_pages}), list[Event]()
    tokens = {r.id: list(r.tokens) for r in requests}

    def emit(event: Event) -> None:
        executed.append(event)
        pages.begin(event)

    scheduler = Scheduler(requests, tokens, policy, pages, version=0, emit=emit)
    while step := scheduler.next_step():
        emit(step)
        drawn = {name: 7 + len(tokens[name]) % 3 for name in scheduler.draws(step)}
        scheduler.advance(step, drawn)
    finished = [Request(id=r.id, tokens=tuple(tokens[r.id])) for r in requests]
    return Schedule(events=tuple(executed)), finished


def test_scheduler_finishes_within_any_memory_and_leaves_a_legal_schedule() -> None:
    rng = random.Random(0)
    seen: Counter[str] = Counter()
    for trial in range(60):
        group = [rng.randrange(50) for _ in range(40)]
        requests = [
            Request(
                id=f"r{i}",
                tokens=(
                    *(group[: rng.randrange(41)]),
                    *(rng.randrange(50, 99) for _ in range(rng.randrange(1, 50))),
                ),
                sampling=Sampling(max_new_tokens=rng.randrange(1, 40)),
            )
            for i in range(rng.randrange(1, 9))
        ]
        least = max(pages_for(len(r.tokens) + r.sampling.max_new_tokens - 1) for r in requests)
        policy = Policy(
            max_step_tokens=rng.choice((1, 7, 64)),
            max_running=rng.choice((1, 3, 64)),
            prefix_cache=rng.random() < 0.7,
        )
        num_pages = least + rng.choice((0, 1, 5, 100))
        schedule, finished = simulate(requests, policy, num_pages)
        assert not legal(schedule, KV, finished), trial
        assert peak_pages(schedule.events, num_pages) <= num_pages
        for before, after in zip(requests, finished, strict=True):
            assert len(after.tokens) == len(before.tokens) + before.sampling.max_new_tokens
        for event in schedule.events:
            seen[type(event).__name__] += 1
            if isinstance(event, Step):
                rows = sum(piece.stop - piece.start for piece in event.slices)
                assert rows <= policy.max_step_tokens
                assert len(event.slices) <= policy.max_running
    assert seen["Hit"] > 10
    assert seen["Evict"] > 10
    assert seen["Preempt"] == seen["Resume"] > 10


def test_group_with_one_prompt_computes_it_once() -> None:
    prompt = tuple(range(70))
    group = [
        Request(id=f"g{i}", tokens=prompt, sampling=Sampling(max_new_tokens=4)) for i in range(4)
    ]
    schedule, _ = simulate(group, Policy(), 100)
    hits = [event for event in schedule.events if isinstance(event, Hit)]
    assert hits == [Hit(request=f"g{i}", source="g0", upto=64) for i in (1, 2, 3)]


def test_stop_token_ends_a_request() -> None:
    request = Request(id="a", tokens=(1, 2, 3), sampling=Sampling(max_new_tokens=9, stop_ids=(8,)))
    _, (finished,) = simulate([request], Policy(), 10)
    assert finished.tokens == (1, 2, 3, 7, 8)


def test_latest_request_is_preempted_first() -> None:
    requests = [
        Request(id=name, tokens=tuple(range(n, n + 30)), sampling=Sampling(max_new_tokens=30))
        for n, name in ((0, "old"), (100, "young"))
    ]
    schedule, _ = simulate(requests, Policy(), 6)
    assert {e.request for e in schedule.events if isinstance(e, Preempt)} == {"young"}
