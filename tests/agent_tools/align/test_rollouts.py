"""Reading runs: bits decide, nothing compared is never equal, schedules give preconditions."""

import struct

import pytest

from zeromismatch.agent_tools.rollouts import batching_facts, compare_tokens, logprob_digest
from zeromismatch.kernels.errors import InconclusiveError, MisalignedError
from zeromismatch.trainer.engines.base import (
    Hit,
    Preempt,
    Request,
    Run,
    Sample,
    Scenario,
    Schedule,
    Slice,
    Step,
)


def bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


def run(values: dict[int, float], tokens: tuple[int, ...] = (1, 2, 3, 4)) -> Run:
    request = Request(id="a", tokens=tokens, sampled_mask=(False, False, True, True))
    schedule = Schedule(events=(Step(slices=(Slice(request="a", start=0, stop=len(tokens)),)),))
    return Run(
        scenario=Scenario(model="m", plan="p", requests=(request,), schedule=schedule),
        executed=schedule,
        requests=(request,),
        samples=tuple(
            Sample(
                request="a",
                position=at,
                token=tokens[at],
                logprob_bits=bits(value),
                version=0,
                temperature=1.0,
            )
            for at, value in values.items()
        ),
        engine="test",
    )


def test_one_bit_in_one_sampled_token_is_counted() -> None:
    left = run({1: -9.0, 2: -1.0, 3: -2.0})
    count = compare_tokens(left, run({1: -8.0, 2: -1.0, 3: -2.0000002}))
    assert (count.compared, count.differing, count.first) == (2, 1, ("a", 3))
    assert compare_tokens(left, run({1: -8.0, 2: -1.0, 3: -2.0})).equal
    assert logprob_digest(left) != logprob_digest(run({2: -1.0, 3: -2.0000002}))


def test_signed_zero_is_a_difference() -> None:
    assert compare_tokens(run({2: 0.0, 3: -1.0}), run({2: -0.0, 3: -1.0})).differing == 1


def test_other_tokens_are_misaligned_and_half_scored_runs_inconclusive() -> None:
    left = run({2: -1.0, 3: -2.0})
    with pytest.raises(MisalignedError, match="other tokens"):
        compare_tokens(left, run({2: -1.0, 3: -2.0}, tokens=(1, 2, 3, 5)))
    with pytest.raises(InconclusiveError, match="one run only"):
        compare_tokens(left, run({2: -1.0}))


def test_nothing_compared_is_not_equal() -> None:
    assert not compare_tokens(run({}), run({})).equal


def test_preconditions_are_read_from_the_executed_schedule() -> None:
    requests = [
        Request(id=name, tokens=tuple(range(50)), sampled_mask=(False,) * 40 + (True,) * 10)
        for name in "ab"
    ]
    events = (
        Step(slices=(Slice(request="a", start=0, stop=24),)),
        Step(slices=(Slice(request="a", start=24, stop=40),)),
        Hit(request="b", source="a", upto=16),
        Step(
            slices=(
                Slice(request="a", start=40, stop=41),
                Slice(request="b", start=16, stop=40),
            )
        ),
        Preempt(request="a"),
    )
    facts = batching_facts(Schedule(events=events), requests)
    assert (facts.steps, facts.mixed_steps, facts.chunked_prompts) == (3, 1, 1)
    assert (facts.hits, facts.preemptions, facts.shortest, facts.tiles) == (1, 1, 50, 4)
    assert facts.missing() == []
    bare = batching_facts(Schedule(events=events[:1]), requests)
    assert bare.missing() == [
        "no step mixed prompt and decode rows",
        "no prompt was chunked",
        "no prefix hit occurred",
    ]
