"""What vLLM executed, told in our events; adoption and padding. No vLLM is needed here."""

from collections.abc import Sequence

import pytest

from zeromismatch.kernels.errors import InconclusiveError, RecipeError
from zeromismatch.model_recipes.plan import aligned_plan
from zeromismatch.trainer.engines.base import (
    Event,
    Evict,
    Hit,
    Preempt,
    Publish,
    Request,
    Resume,
    Slice,
    Step,
)
from zeromismatch.trainer.engines.vllm.adoption import adopted, adoption
from zeromismatch.trainer.engines.vllm.operators import padded_rows
from zeromismatch.trainer.engines.vllm.parameters import as_bits
from zeromismatch.trainer.engines.vllm.record import Formed, executed

REQUESTS = (
    Request(id="a", tokens=tuple(range(40))),
    Request(id="b", tokens=(*range(32), 90, 91)),
)
NAMES = {"v1": "a", "v2": "b", "v3": "a"}


def told(*steps: tuple[tuple[str, int, int], ...], versions: Sequence[int] = ()) -> list[Event]:
    formed = [
        Formed(pieces=pieces, version=versions[index] if versions else 0)
        for index, pieces in enumerate(steps)
    ]
    return list(executed(formed, NAMES, REQUESTS, "eager")[0].events)


def step(*slices: tuple[str, int, int]) -> Step:
    return Step(slices=tuple(Slice(request=n, start=a, stop=b) for n, a, b in slices))


def test_chunks_and_mixed_steps_are_steps() -> None:
    events = told((("v1", 0, 16),), (("v1", 16, 24), ("v2", 0, 34)))
    assert events == [step(("a", 0, 16)), step(("a", 16, 40), ("b", 0, 34))]


def test_a_start_above_zero_is_a_hit_on_who_computed_that_prefix() -> None:
    events = told((("v1", 0, 40),), (("v2", 32, 2),))
    assert events[1] == Hit(request="b", source="a", upto=32)


def test_a_hit_on_what_nobody_computed_is_refused() -> None:
    with pytest.raises(InconclusiveError, match="no request of this run computed its prefix"):
        told((("v2", 32, 2),))


def test_beginning_again_is_a_preemption() -> None:
    events = told((("v1", 0, 16),), (("v1", 0, 40),))
    assert events[1:3] == [Preempt(request="a"), Resume(request="a")]


def test_sent_again_is_no_preemption() -> None:
    assert told((("v1", 0, 40),), (("v3", 0, 40),))[1] == Evict(request="a")
    assert told((("v1", 0, 40),), (("v3", 32, 8),))[1] == Hit(request="a", source="a", upto=32)


def test_a_step_in_flight_past_the_end_is_left_out() -> None:
    assert told((("v1", 0, 40),), (("v1", 40, 1),)) == [step(("a", 0, 40))]


def test_state_that_outlives_a_publication_is_refused() -> None:
    with pytest.raises(InconclusiveError, match="no request of this run computed its prefix"):
        told((("v1", 0, 16),), (("v1", 16, 24),), versions=(0, 2))


def test_a_publication_makes_running_requests_begin_again() -> None:
    """The cached state is gone with its version; what was drawn before keeps that version."""
    formed = [
        Formed(pieces=(("v1", 0, 16),), version=0),
        Formed(pieces=(("v1", 0, 20),), version=1),
    ]
    schedule, versions = executed(formed, NAMES, REQUESTS, "eager")
    assert schedule.events[1:] == (Publish(version=1, digest=""), step(("a", 0, 20)))
    assert [versions["a", position] for position in (0, 15, 16)] == [0, 0, 1]


def test_an_engine_without_the_key_adopts_nothing() -> None:
    assert adopted({}) is None
    assert adopted({"other": 1}) is None


def test_a_plan_survives_the_way_through_additional_config() -> None:
    plan = aligned_plan("float32", "cpu")
    found = adopted(adoption(plan))
    assert found is not None
    assert found.plan == plan


@pytest.mark.parametrize("value", [3, {"plans": {}}, "no/such/recipe"])
def test_what_is_no_recipe_is_refused(value: object) -> None:
    with pytest.raises(RecipeError):
        adopted({"zero_mismatch": value})


def test_rows_are_padded_to_a_grid() -> None:
    assert [padded_rows(n) for n in (1, 7, 8, 9, 255, 256, 257, 512, 513, 8192)] == [
        1, 7, 8, 16, 256, 256, 264, 512, 640, 8192,
    ]  # fmt: skip


def test_logprobs_become_bits_again() -> None:
    assert as_bits(-1.5) == -1077936128
    assert as_bits(-0.0) != as_bits(0.0)
