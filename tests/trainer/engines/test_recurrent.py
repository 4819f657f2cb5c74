"""Recurrent layers in the paged engine: one set of bits round every chunk's end, hits only there.

Nemotron-H's reduced model has the smallest chunk (32); the other two families run one schedule of
everything at once.
"""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from zeromismatch.kernels.errors import ScheduleError
from zeromismatch.model_recipes.models import DTypeName, LoadedModel, load_model
from zeromismatch.trainer.engines.base import (
    Evict,
    Hit,
    Policy,
    Publish,
    Request,
    Run,
    Sampling,
    Scenario,
    Schedule,
    Slice,
    Step,
)
from zeromismatch.trainer.engines.build import make_engine
from zeromismatch.trainer.engines.legal import granule, legal
from zeromismatch.trainer.engines.packed import PackedEngine
from zeromismatch.trainer.engines.paged import PagedEngine, replay

from .conftest import Pair

CHUNK = 32
LENGTHS = tuple(n * CHUNK + off for n in (1, 2, 3) for off in (-1, 0, 1))


def some(lengths: tuple[int, ...], shared: int = 0) -> tuple[Request, ...]:
    """Requests of these lengths; all but the second begin with ``shared`` common tokens."""
    rng = random.Random(3)
    prefix = [rng.randrange(3, 3000) for _ in range(shared)]
    made: list[Request] = []
    for index, length in enumerate(lengths):
        tokens = prefix[:length] if index != 1 else []
        tokens = [*tokens, *(rng.randrange(3, 3000) for _ in range(length - len(tokens)))]
        mask = (False,) * (length - 5) + (True,) * 5
        made.append(Request(id=f"r{index}", tokens=tuple(tokens), sampled_mask=mask))
    return tuple(made)


@pytest.fixture(scope="module")
def built() -> Iterator[Callable[[str, DTypeName, str], Pair]]:
    """``built(spec, dtype, plan)``: both engines on one model."""
    pairs: dict[tuple[str, ...], Pair] = {}

    def get(spec: str, dtype: DTypeName = "float32", plan: str = "aligned") -> Pair:
        if (spec, dtype, plan) not in pairs:
            loaded = load_model(spec, dtype=dtype)
            packed = make_engine("packed", loaded, plan)
            assert isinstance(packed, PackedEngine)
            paged = make_engine("paged", loaded, plan, instrument=packed.instrument)
            assert isinstance(paged, PagedEngine)
            pairs[spec, dtype, plan] = Pair(packed, paged)
        return pairs[spec, dtype, plan]

    yield get
    for pair in pairs.values():
        pair.packed.close()


def run(engine: Any, schedule: Schedule | str, requests: tuple[Request, ...]) -> Run:
    if isinstance(schedule, str):
        schedule = engine.schedule(schedule, requests)
    return engine.run(Scenario(model="", plan="", requests=requests, schedule=schedule))


def differing(left: Run, right: Run) -> int:
    """Tokens of ``left`` that have other bits on the right; all of them must be there."""
    wanted = {(s.request, s.position): s.logprob_bits for s in right.samples}
    assert left.samples
    return sum(wanted[s.request, s.position] != s.logprob_bits for s in left.samples)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["alone", f"chunk:{CHUNK - 1}", f"chunk:{CHUNK + 1}", "mixed"])
def test_lengths_round_chunk_ends_have_the_trainers_bits(
    built: Any, dtype: DTypeName, name: str
) -> None:
    pair, requests = built("tiny:nemotron_h", dtype), some(LENGTHS)
    assert differing(run(pair.paged, name, requests), run(pair.packed, "packed", requests)) == 0


def test_tokens_one_by_one_across_every_chunk_end(built: Any) -> None:
    pair, requests = built("tiny:nemotron_h"), some((3 * CHUNK + 3,))
    cuts = [at for end in (CHUNK, 2 * CHUNK, 3 * CHUNK) for at in range(end - 2, end + 3)]
    bounds = [0, *cuts, 3 * CHUNK + 3]
    steps = [
        Step(slices=(Slice(request="r0", start=a, stop=b),), padded_rows=a % 3)
        for a, b in pairwise(bounds)
    ]
    one_by_one = run(pair.paged, Schedule(events=tuple(steps)), requests)
    assert differing(one_by_one, run(pair.packed, "packed", requests)) == 0


def test_a_hit_at_each_chunk_end_with_evictions_between(built: Any) -> None:
    pair = built("tiny:nemotron_h")
    requests = some((3 * CHUNK + 9, 20, 3 * CHUNK + 2), shared=3 * CHUNK + 1)
    source, _, other = requests
    whole = Step(slices=(Slice(request="r0", start=0, stop=len(source.tokens)),))
    events: list[Any] = [whole]
    for upto in (CHUNK, 2 * CHUNK, 3 * CHUNK):
        rest = Slice(request="r2", start=upto, stop=len(other.tokens))
        events += [Hit(request="r2", source="r0", upto=upto), Step(slices=(rest,))]
        events.append(Evict(request="r2"))
    events += [Hit(request="r0", source="r0", upto=2 * CHUNK)]
    events += [Step(slices=(Slice(request="r0", start=2 * CHUNK, stop=len(source.tokens)),))]
    events += [Evict(request="r0"), Step(slices=whole.slices, padded_rows=3)]
    again = run(pair.paged, Schedule(events=tuple(events)), (source, other))
    assert differing(again, run(pair.packed, "packed", (source, other))) == 0


def test_a_hit_off_a_chunks_end_is_refused(built: Any) -> None:
    paged = built("tiny:nemotron_h").paged
    requests = some((3 * CHUNK, 20, 3 * CHUNK), shared=2 * CHUNK + 20)
    assert granule(paged.state_specs()) == CHUNK
    events = (
        Step(slices=(Slice(request="r0", start=0, stop=3 * CHUNK),)),
        Hit(request="r2", source="r0", upto=CHUNK + 16),  # the end of a page of keys
    )
    with pytest.raises(ScheduleError, match=r"off the granule 32 of .*\(recurrent\)"):
        run(paged, Schedule(events=events), requests)


def test_a_state_from_other_weights_is_refused(built: Any) -> None:
    loaded = load_model("tiny:nemotron_h")
    paged = make_engine("paged", loaded, "aligned")
    assert isinstance(paged, PagedEngine)
    (request,) = some((2 * CHUNK + 5,))
    part = Step(slices=(Slice(request="r0", start=0, stop=CHUNK),))
    other = {name: tensor * 1.5 for name, tensor in _weights(loaded).items()}
    event = paged.stage(other, 1)
    stale = (part, event, Hit(request="r0", source="r0", upto=CHUNK))
    with pytest.raises(ScheduleError, match="has state for"):
        run(paged, Schedule(events=stale), (request,))
    whole = Step(slices=(Slice(request="r0", start=0, stop=len(request.tokens)),))
    after = run(paged, Schedule(events=(part, Publish(version=1, digest=event.digest), whole)),
                (request,))  # fmt: skip
    assert differing(after, run(paged, "alone", (request,))) == 0
    paged.close()


def _weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    from zeromismatch.model_recipes.state import named_state

    return {name: tensor.clone() for name, tensor in named_state(loaded.module).items()}


def test_rejected_drafts_go_back_to_a_chunks_end_and_nowhere_else(built: Any) -> None:
    pair, requests = built("tiny:nemotron_h"), some((2 * CHUNK + 9,))
    first = Slice(request="r0", start=0, stop=CHUNK + 6, keep=CHUNK)
    rest = Slice(request="r0", start=CHUNK, stop=2 * CHUNK + 9)
    drafted = Schedule(events=(Step(slices=(first,)), Step(slices=(rest,))))
    assert differing(run(pair.paged, drafted, requests), run(pair.packed, "packed", requests)) == 0
    inside = Step(slices=(Slice(request="r0", start=0, stop=CHUNK + 6, keep=CHUNK + 2),))
    complaints = legal(Schedule(events=(inside,)), pair.paged.state_specs(), requests)
    assert any("only to its snapshots" in each for each in complaints)


def test_sampling_with_few_pages_preempts_hits_and_replays(built: Any) -> None:
    pair = built("tiny:nemotron_h")
    prompts = [
        Request(id=r.id, tokens=r.tokens, sampling=Sampling(max_new_tokens=9, seed=i))
        for i, r in enumerate(some((79, 78, 79, 90), shared=CHUNK + 5))
    ]
    sampled = pair.paged.generate(prompts, Policy(max_step_tokens=48, num_pages=11))
    kinds = {type(event).__name__ for event in sampled.executed.events}
    assert {"Hit", "Preempt", "Resume"} <= kinds
    assert all(e.upto % CHUNK == 0 for e in sampled.executed.events if isinstance(e, Hit))
    assert differing(sampled, run(pair.packed, "packed", sampled.requests)) == 0
    again = pair.paged.run(replay(sampled))
    assert differing(sampled, again) == 0


def test_a_state_that_is_damaged_is_seen_by_later_tokens(built: Any) -> None:
    """What the first chunk left really enters the third: equality here is not vacuous."""
    pair, requests = built("tiny:nemotron_h"), some((3 * CHUNK,))
    pieces = [
        Step(slices=(Slice(request="r0", start=a, stop=a + CHUNK),)) for a in (0, CHUNK, 2 * CHUNK)
    ]
    scenario = Scenario(model="", plan="", requests=requests, schedule=Schedule(events=(*pieces,)))
    whole = pair.paged.run(scenario)

    class Damage:
        """Changes one number of a state between two steps."""

        def begin_rows(self, step: int, rows: Any) -> None:
            if rows[0][1] == 2 * CHUNK and step:
                pages = pair.paged._caches.recurrent[0].recurrence
                pages.end[pages.end.isfinite().all(-1).all(-1).all(-1)] *= 1.5

        def on_site(self, call: Any, /) -> None:
            return None

    assert differing(pair.paged.run(scenario, Damage()), whole) > 0
    assert differing(pair.paged.run(scenario), whole) == 0


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["tiny:qwen3_next", "tiny:kimi_linear"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_other_families_cut_chunks_of_64(built: Any, spec: str, dtype: DTypeName) -> None:
    pair, requests = built(spec, dtype), some((63, 64, 129, 150), shared=70)
    assert granule(pair.paged.state_specs()) == 64
    packed = run(pair.packed, "packed", requests)
    for name in ("mixed", "prefix-hit", "chunk:65"):
        assert differing(run(pair.paged, name, requests), packed) == 0


def test_under_stock_decode_differs_and_everything_still_runs(built: Any) -> None:
    pair, requests = built("tiny:nemotron_h", "float32", "stock"), some((40, 50, 70), shared=35)
    alone = run(pair.paged, "alone", requests)
    assert differing(run(pair.paged, "decode", requests), alone) > 0
    for name in ("prefix-hit", "preempt", "fuzz:2"):
        assert run(pair.paged, name, requests).samples
