"""Schedule fuzzing: what it draws is legal, what it finds is small, what it keeps is read."""

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zeromismatch.agent_tools.fuzzing import Failure, event_kinds, fuzz, fuzz_requests
from zeromismatch.agent_tools.moves import Advance, Drop, Start, schedule_of
from zeromismatch.kernels.attention import PAGE, AttentionBatch, KVCache
from zeromismatch.kernels.errors import CapabilityError, ScheduleError
from zeromismatch.model_recipes.models import load_model
from zeromismatch.trainer.engines import paged_batch
from zeromismatch.trainer.engines.base import Evict, Hit, Preempt, Resume, Slice, StateSpec, Step
from zeromismatch.trainer.engines.legal import legal
from zeromismatch.trainer.engines.schedule_file import load_schedule

SPECS = (StateSpec(site="a", kind="kv", granule=PAGE),)
REQUESTS = fuzz_requests(3011)
TILE_ROWS = 5
AttentionRun = Callable[..., Tensor]


def chunk_dependent(real: AttentionRun, bad: Callable[[int, int], bool]) -> AttentionRun:
    """Attention whose last row of a slice has one flipped bit where ``bad(start, rows)``."""

    def attend(q: Tensor, cache: KVCache, batch: AttentionBatch, **options: Any) -> Tensor:
        out = real(q, cache, batch, **options).clone()
        ends = batch.query_start.tolist()
        for first, last, length in zip(ends, ends[1:], batch.kv_len.tolist(), strict=False):
            if bad(length - (last - first), last - first):
                out.view(torch.int32)[last - 1, 0, 0] ^= 1 << 14
        return out

    return attend


def off_the_page_border(start: int, rows: int) -> bool:
    return rows > TILE_ROWS and start % PAGE != 0


def many_rows(_start: int, rows: int) -> bool:
    return rows > TILE_ROWS


@pytest.mark.parametrize("bad", [off_the_page_border, many_rows])
def test_a_chunk_dependent_tile_is_found_and_shrunk(
    bad: Callable[[int, int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = paged_batch.paged_attention
    monkeypatch.setattr(paged_batch, "paged_attention", chunk_dependent(real, bad))
    failure = fuzz(load_model("tiny:llama"), examples=100).failure
    assert failure is not None
    assert failure.shrunk
    assert failure.steps <= 2
    assert len(failure.requests) == 1
    assert len(failure.schedule.events) == failure.steps
    assert any(
        bad(piece.start, piece.stop - piece.start)
        for event in failure.schedule.events
        if isinstance(event, Step)
        for piece in event.slices
    )


def test_rollouts_are_forced_again_and_a_decode_that_differs_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model("tiny:llama")
    healthy = fuzz(model, examples=1, rollouts=4)
    assert (healthy.failure, healthy.rollouts) == (None, 4)
    assert {"hit", "mixed", "decode"} <= set(healthy.kinds)
    real = paged_batch.paged_attention
    bad = chunk_dependent(real, lambda start, rows: start >= 2 * PAGE + 8 and rows == 1)
    monkeypatch.setattr(paged_batch, "paged_attention", bad)
    failure = fuzz(model, examples=1, rollouts=4).failure
    assert failure is not None
    assert failure.source.startswith("rollout 0 under Policy(")
    assert all(position > 2 * PAGE + 8 for _, position in failure.tokens)


def test_a_kept_failure_is_replayed_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model("tiny:llama")
    schedule = schedule_of((Advance(pieces=((0, 3, 0),)), Advance(pieces=((0, 9, 0),))),
                           REQUESTS, SPECS)  # fmt: skip
    kept = Failure(schedule=schedule, tokens=(), shrunk=True, source="").save(tmp_path / "corpus")
    assert load_schedule(kept) == schedule
    healthy = fuzz(model, examples=1, corpus=kept.parent)
    assert (healthy.failure, healthy.replayed) == (None, 1)
    monkeypatch.setattr(
        paged_batch,
        "paged_attention",
        chunk_dependent(paged_batch.paged_attention, lambda start, rows: (start, rows) == (3, 9)),
    )
    report = fuzz(model, examples=1, corpus=kept.parent)
    assert report.failure is not None
    assert report.failure.source == str(kept)
    assert report.distinct == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "entry.json: not a schedule document"),
        (
            '{"schema_version": 1, "events": [{"event": "step", "slices": '
            '[{"request": "zz", "start": 0, "stop": 3}]}]}',
            "entry.json: illegal schedule.*delete or rewrite",
        ),
    ],
)
def test_an_unusable_corpus_entry_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "entry.json").write_text(text)
    with pytest.raises(ScheduleError, match=f"(?s){message}"):
        fuzz(load_model("tiny:llama"), examples=1, corpus=tmp_path)


def test_moves_become_legal_events_and_impossible_ones_are_left_out() -> None:
    moves = (
        Drop(request=1),  # nothing to drop
        Start(request=1, source=0, granules=2),  # nothing to hit
        Advance(pieces=((0, 40, 0), (1, 6, 2)), padded_rows=3),
        Start(request=1, source=0, granules=9),  # A after B: drops its own state first
        Drop(request=0, preempt=True),
        Advance(pieces=((0, 5, 0), (1, 1, 0))),  # request 0 may not run
        Drop(request=0),
        Start(request=1, source=1, granules=1),
    )
    schedule = schedule_of(moves, REQUESTS, SPECS)
    assert not legal(schedule, SPECS, REQUESTS)
    assert schedule.events == (
        Step(
            slices=(
                Slice(request="r0", start=0, stop=40),
                Slice(request="r1", start=0, stop=6, keep=4),
            ),
            padded_rows=3,
        ),
        Evict(request="r1"),
        Hit(request="r1", source="r0", upto=32),
        Preempt(request="r0"),
        Step(slices=(Slice(request="r1", start=32, stop=33),)),
        Resume(request="r0"),
        Hit(request="r1", source="r1", upto=16),
    )
    assert {"mixed", "padded", "draft", "decode", "again", "resume"} <= set(event_kinds(schedule))


def test_without_hypothesis_the_way_to_get_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.partition(".")[0] == "hypothesis":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(CapabilityError, match="pip install hypothesis"):
        fuzz(load_model("tiny:llama"), examples=1)
