"""Every schedule on the paged engine gives the packed trainer's bits; the stock plan does not."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from zeromismatch.kernels.errors import CapabilityError, ScheduleError, UsageError
from zeromismatch.model_recipes.sites import SiteCall
from zeromismatch.trainer.engines.base import (
    Evict,
    Hit,
    Layout,
    Policy,
    Request,
    Scenario,
    Schedule,
    Setting,
    Slice,
    Step,
)
from zeromismatch.trainer.engines.build import make_engine

SCHEDULES = (
    "alone",
    "mixed",
    "decode",
    "chunk:7",
    "prefix-hit",
    "preempt",
    "packed",
    *(f"fuzz:{seed}" for seed in range(6)),
)


@pytest.fixture(scope="module")
def truth(pairs: Any, requests: Any, scenario: Any, bits_of: Any) -> Any:
    """``truth(plan, dtype)``: the packed forward's bits."""
    known: dict[tuple[str, str], Any] = {}

    def get(plan: str, dtype: str) -> Any:
        if (plan, dtype) not in known:
            packed = pairs(plan, dtype).packed
            run = packed.run(scenario(packed.schedule("packed", requests), requests))
            known[plan, dtype] = bits_of(run)
        return known[plan, dtype]

    return get


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_equals_the_packed_forward(
    name: str, dtype: str, pairs: Any, requests: Any, scenario: Any, bits_of: Any, truth: Any
) -> None:
    paged = pairs("aligned", dtype).paged
    run = paged.run(scenario(paged.schedule(name, requests), requests))
    got, expected = bits_of(run), truth("aligned", dtype)
    computed = {
        (piece.request, row + 1)
        for event in run.executed.events
        if isinstance(event, Step)
        for piece in event.slices
        for row in range(piece.start, piece.stop)
    }
    assert got.keys() == computed & expected.keys()
    assert len(got) > 150
    assert {token: bits for token, bits in expected.items() if token in got} == got


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stock_plan_is_red(
    dtype: str, pairs: Any, requests: Any, scenario: Any, bits_of: Any, truth: Any
) -> None:
    paged = pairs("stock", dtype).paged
    got = bits_of(paged.run(scenario(paged.schedule("chunk:7", requests), requests)))
    expected = truth("stock", dtype)
    assert got.keys() == expected.keys()
    assert sum(got[token] != expected[token] for token in got) > 10


def test_stock_decode_attends_over_what_the_cache_holds(
    pairs: Any, requests: Any, scenario: Any
) -> None:
    """Red by rounding only: the stock paged engine is the same model."""
    stock, aligned = pairs("stock", "float32").paged, pairs("aligned", "float32").paged
    schedule = stock.schedule("fuzz:1", requests)
    runs = [engine.run(scenario(schedule, requests)).samples for engine in (stock, aligned)]
    values = [
        torch.tensor([s.logprob_bits for s in run], dtype=torch.int32).view(torch.float32)
        for run in runs
    ]
    assert float((values[0] - values[1]).abs().max()) < 1e-3


def test_cache_left_dirty_by_another_run_changes_nothing(
    pairs: Any, requests: Any, scenario: Any, bits_of: Any
) -> None:
    paged = pairs("aligned", "float32").paged
    schedule = scenario(paged.schedule("fuzz:3", requests), requests)
    first = paged.run(schedule).samples
    assert paged._caches is not None
    for cache in paged._caches.attention.values():
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("inf"))
    assert paged.run(schedule).samples == first


class Watcher:
    """Collects what an observer is told."""

    def __init__(self) -> None:
        self.groups: list[tuple[int, list[tuple[str, int]]]] = []
        self.calls: list[tuple[int, str, int]] = []

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        self.groups.append((step, list(rows)))

    def on_site(self, call: SiteCall, /) -> None:
        self.calls.append((len(self.groups) - 1, call.site.op_class, call.output.shape[0]))


def test_observer_is_told_whose_rows_each_site_sees(
    pairs: Any, requests: Any, scenario: Any
) -> None:
    paged = pairs("aligned", "float32").paged
    first, second = requests[0], requests[1]
    step = Step(
        slices=(
            Slice(request=second.id, start=0, stop=4),
            Slice(request=first.id, start=0, stop=len(first.tokens)),
        ),
        padded_rows=2,
    )
    watcher = Watcher()
    plain = paged.run(scenario(Schedule(events=(step,)), requests))
    run = paged.run(scenario(Schedule(events=(step,)), requests), watcher)
    assert run.samples == plain.samples
    forward, head = watcher.groups
    assert forward[1][:5] == [(second.id, p) for p in range(4)] + [(first.id, 0)]
    assert forward[1][-3:] == [(first.id, len(first.tokens) - 1), ("", -1), ("", -1)]
    assert (first.id, len(first.tokens) - 1) not in head[1]
    assert len(head[1]) == len(run.samples) == 4 + len(first.tokens) - 1
    for group, op_class, rows in watcher.calls:
        assert rows == len(watcher.groups[group][1])
        assert (op_class in ("lm_head", "logprob")) == (group == 1)
    assert paged.instrument.listener is None


def test_state_is_gone_after_the_event_that_drops_it(
    pairs: Any, requests: Any, scenario: Any
) -> None:
    paged = pairs("aligned", "float32").paged
    whole = Step(slices=(Slice(request="r0", start=0, stop=52),))
    hit = Hit(request="r2", source="r0", upto=32)
    events = (whole, Evict(request="r0"), hit)
    with pytest.raises(ScheduleError, match=r"event 2 \(Hit\).*has state for \[0, 0\)"):
        paged.run(scenario(Schedule(events=events), requests))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokens": ()}, UsageError, "empty prompt"),
        ({"tokens": (1,) * 2049}, ScheduleError, "limit is 2048"),
        ({"tokens": (1, 3011)}, UsageError, "outside the vocabulary"),
        ({"adapter": "lora"}, CapabilityError, "no adapters"),
        ({"forced": {"experts": 1}}, CapabilityError, "forces choices at experts"),
        ({"id": ""}, UsageError, "empty id"),
    ],
)
def test_unusable_request_is_refused_before_any_work(
    changes: dict[str, Any], error: type[Exception], message: str, pairs: Any, scenario: Any
) -> None:
    request = Request(**({"id": "x", "tokens": (1, 2)} | changes))
    paged = pairs("aligned", "float32").paged
    with pytest.raises(error, match=message):
        paged.run(scenario(Schedule(events=()), (request,)), ExplodingObserver())
    if "adapter" not in changes and "forced" not in changes:
        with pytest.raises(error, match=message):
            paged.generate([request])


class ExplodingObserver(Watcher):
    """Proves that no forward pass began."""

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        raise AssertionError("work began")


def test_unusable_scenario_is_refused(pairs: Any, requests: Any) -> None:
    paged = pairs("aligned", "float32").paged
    schedule = paged.schedule("alone", requests)
    common = {"model": "", "plan": "", "requests": requests}
    with pytest.raises(UsageError, match="no schedule"):
        paged.run(Scenario(**common))
    with pytest.raises(UsageError, match="exactly one"):
        paged.run(Scenario(**common, schedule=schedule, policy=Policy()))
    with pytest.raises(CapabilityError, match="one rank"):
        paged.run(Scenario(**common, schedule=schedule, layout=Layout(tp=2)))
    settings = {"turbo": Setting(value=1, effect_proven=False)}
    with pytest.raises(CapabilityError, match="no setting turbo"):
        paged.run(Scenario(**common, schedule=schedule, settings=settings))
    graph = Step(slices=(Slice(request="r0", start=0, stop=4),), mode="graph")
    with pytest.raises(CapabilityError, match="mode 'graph'"):
        paged.run(Scenario(**common, schedule=Schedule(events=(graph,))))


def test_schedule_that_needs_more_pages_than_there_are_is_refused_at_once(
    pairs: Any, requests: Any, scenario: Any
) -> None:
    pair = pairs("aligned", "float32")
    small = make_engine(
        "paged", pair.paged.loaded, "aligned", num_pages=5, instrument=pair.packed.instrument
    )
    alone = scenario(small.schedule("alone", requests), requests)
    with pytest.raises(ScheduleError, match="holds 22 cache pages at once"):
        small.run(alone, ExplodingObserver())
    events: list[Any] = []
    for event in alone.schedule.events:
        events += [event, Evict(request=event.slices[0].request)]
    fits = scenario(Schedule(events=tuple(events)), requests)
    assert small.run(fits).samples == pair.paged.run(alone).samples
