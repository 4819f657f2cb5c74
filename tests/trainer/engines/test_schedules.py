"""Named and fuzzed schedules are legal and do what their names say; files round-trip."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeromismatch.kernels.errors import ScheduleError, UsageError
from zeromismatch.trainer.engines.base import (
    Evict,
    Hit,
    Preempt,
    Publish,
    Request,
    Resume,
    Schedule,
    Slice,
    StateSpec,
    Step,
)
from zeromismatch.trainer.engines.legal import Ledger, legal
from zeromismatch.trainer.engines.schedule_file import from_json, load_schedule, to_json
from zeromismatch.trainer.engines.schedules import STEP_TOKENS, build_schedule, prompt_length

PREFIX = tuple(range(1, 36))
REQUESTS = tuple(
    Request(
        id=name,
        tokens=(*(PREFIX if name != "b" else ()), *range(100 * i, 100 * i + 30)),
        sampled_mask=tuple(p >= 48 for p in range(65 if name != "b" else 30))
        if name != "b"
        else (),
    )
    for i, name in enumerate("abcd", start=1)
)
KV = (StateSpec(site="attn", kind="kv", granule=16),)
HYBRID = (
    *KV,
    StateSpec(site="win", kind="window", granule=16, window=24),
    StateSpec(site="rec", kind="recurrent", granule=16, rollback=False),
    StateSpec(site="comp", kind="compressed", granule=4, rollback=False),
    StateSpec(site="lat", kind="latent", granule=16),
    StateSpec(site="conv", kind="conv", granule=8, snapshot_every=16, rollback=False),
    StateSpec(site="idx", kind="indexer", granule=16),
)
NAMED = ("alone", "batched", "mixed", "decode", "chunk:7", "prefix-hit", "preempt", "packed")


def steps(schedule: Schedule) -> list[Step]:
    return [event for event in schedule.events if isinstance(event, Step)]


def kinds(schedule: Schedule) -> Counter[str]:
    return Counter(type(event).__name__ for event in schedule.events)


@pytest.mark.parametrize("name", NAMED)
def test_named_schedule_is_legal_and_runs_every_token(name: str) -> None:
    schedule = build_schedule(name, REQUESTS, KV)
    assert not legal(schedule, KV, REQUESTS)
    ends = {piece.request: piece.stop for step in steps(schedule) for piece in step.slices}
    assert ends == {request.id: len(request.tokens) for request in REQUESTS}


def test_each_name_does_what_it_says() -> None:
    alone, packed = build_schedule("alone", REQUESTS, KV), build_schedule("packed", REQUESTS, KV)
    assert [len(step.slices) for step in steps(alone)] == [1, 1, 1, 1]
    assert [len(step.slices) for step in steps(packed)] == [4]
    mixed = steps(build_schedule("mixed", REQUESTS, KV))
    assert any({s.stop - s.start > 1 for s in step.slices} == {True, False} for step in mixed)
    assert max(sum(s.stop - s.start for s in step.slices) for step in mixed) <= STEP_TOKENS
    decode = steps(build_schedule("decode", REQUESTS, KV))
    assert [s.stop - s.start for step in decode for s in step.slices].count(1) == 17 * 3 + 15
    chunks = steps(build_schedule("chunk:7", REQUESTS, KV))
    assert max(s.stop - s.start for step in chunks for s in step.slices) == 7
    preempt = kinds(build_schedule("preempt", REQUESTS, KV))
    assert preempt["Preempt"] == preempt["Resume"] == 4


def test_prefix_hit_shares_prefixes_and_sends_each_request_again() -> None:
    hits = [e for e in build_schedule("prefix-hit", REQUESTS, KV).events if isinstance(e, Hit)]
    assert Hit(request="c", source="a", upto=32) in hits
    assert Hit(request="d", source="a", upto=32) in hits
    assert [hit.request for hit in hits if hit.request == hit.source] == ["a", "b", "c", "d"]
    short = (Request(id="s", tokens=(1, 2, 3)),)
    with pytest.raises(ScheduleError, match="longer than the granule of 16"):
        build_schedule("prefix-hit", short, KV)


def test_prompt_ends_at_the_first_sampled_token_or_in_the_middle() -> None:
    assert prompt_length(REQUESTS[0]) == 48
    assert prompt_length(REQUESTS[1]) == 15
    assert prompt_length(Request(id="x", tokens=(1,))) == 1


@pytest.mark.parametrize("name", ["nonsense", "chunk", "chunk:0", "chunk:x", "fuzz:", "fuzz:-1"])
def test_unknown_or_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"use one of|whole number"):
        build_schedule(name, REQUESTS, KV)


@pytest.mark.parametrize("specs", [KV, HYBRID], ids=["kv", "hybrid"])
def test_a_hundred_fuzzed_schedules_are_legal_complete_and_round_trip(
    specs: tuple[StateSpec, ...],
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        schedule = build_schedule(f"fuzz:{seed}", REQUESTS, specs)
        assert not legal(schedule, specs, REQUESTS)
        assert from_json(to_json(schedule)) == schedule
        reached = {p.request: 0 for step in steps(schedule) for p in step.slices}
        for step in steps(schedule):
            for piece in step.slices:
                reached[piece.request] = max(reached[piece.request], piece.keep or piece.stop)
        assert reached == {request.id: len(request.tokens) for request in REQUESTS}
        seen += kinds(schedule)
        seen["draft"] += sum(p.keep is not None for s in steps(schedule) for p in s.slices)
        seen["padded"] += sum(step.padded_rows > 0 for step in steps(schedule))
        seen["again"] += sum(isinstance(e, Hit) and e.request == e.source for e in schedule.events)
    for kind in ("Hit", "Evict", "Preempt", "Resume", "padded", "again"):
        assert seen[kind] > 20, (kind, seen)
    assert seen["draft"] > 0


def test_fuzzed_schedule_depends_on_its_seed_alone() -> None:
    first, second = (build_schedule("fuzz:5", REQUESTS, KV) for _ in range(2))
    assert first == second
    assert first != build_schedule("fuzz:6", REQUESTS, KV)


def test_fuzz_refuses_requests_that_no_schedule_can_run() -> None:
    with pytest.raises(ScheduleError, match="has no tokens"):
        build_schedule("fuzz:0", (Request(id="e", tokens=()),), KV)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_legal_prefix_of_a_fuzzed_schedule_stays_legal(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 10_000))
    schedule = build_schedule(f"fuzz:{seed}", REQUESTS[:2], KV)
    cut = data.draw(st.integers(0, len(schedule.events)))
    ledger = Ledger(KV, REQUESTS[:2])
    for event in schedule.events[:cut]:
        assert ledger.check(event) == []
        assert ledger.apply(event) == []


# --- files ---------------------------------------------------------------------------------------


def test_file_with_every_event_round_trips(tmp_path: Path) -> None:
    schedule = Schedule(
        events=(
            Step(slices=(Slice(request="a", start=0, stop=20, keep=18),), padded_rows=2),
            Step(slices=(), padded_rows=1, mode="graph"),
            Hit(request="b", source="a", upto=16),
            Evict(request="a"),
            Preempt(request="b"),
            Resume(request="b"),
            Publish(version=3, digest="abc"),
        )
    )
    path = tmp_path / "schedule.json"
    path.write_text(to_json(schedule))
    assert load_schedule(path) == schedule
    assert build_schedule(str(path), REQUESTS, KV) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        ('{"events": []}', "schema_version: Field required"),
        ('{"schema_version": 2, "events": []}', "schema_version: Input should be 1"),
        ('{"schema_version": 1, "events": [{"event": "jump"}]}', "events.0"),
        (
            '{"schema_version": 1, "events": [{"event": "hit", "request": "a", "source": "b"}]}',
            "events.0.hit.upto: Field required",
        ),
        (
            '{"schema_version": 1, "events": [{"event": "evict", "request": "a", "x": 1}]}',
            "events.0.evict.x: Extra inputs",
        ),
        (
            '{"schema_version": 1, "events": [{"event": "step", "slices": '
            '[{"request": "a", "start": 0, "stop": "4"}]}]}',
            "events.0.step.slices.0.stop",
        ),
    ],
)
def test_malformed_file_is_refused_with_the_key(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ScheduleError, match="correct the keys") as error:
        load_schedule(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_missing_file_is_refused() -> None:
    with pytest.raises(ScheduleError, match="check the path"):
        build_schedule("nowhere.json", REQUESTS, KV)
