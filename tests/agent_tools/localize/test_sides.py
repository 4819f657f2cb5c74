"""Sides: how they are written, and how a schedule is cut down to some requests."""

import pytest

from zeromismatch.agent_tools.sides import Side, closure, restrict
from zeromismatch.kernels.errors import UsageError
from zeromismatch.trainer.engines.base import Evict, Hit, Schedule, Slice, Step


@pytest.mark.parametrize(
    ("text", "engine", "settings", "schedule"),
    [
        ("paged:fuzz:1", "paged", {}, "fuzz:1"),
        ("transformers", "transformers", {}, "alone"),
        ("packed", "packed", {}, "packed"),
        ("paged", "paged", {}, "mixed"),
        ("paged+num_pages=9+stock:chunk:7", "paged", {"num_pages": 9}, "chunk:7"),
        ("paged:/tmp/a.json", "paged", {}, "/tmp/a.json"),
    ],
)
def test_a_side_is_engine_settings_and_schedule(
    text: str, engine: str, settings: dict[str, object], schedule: str
) -> None:
    side = Side.parse(text)
    assert (side.engine, side.engine_settings, side.schedule) == (engine, settings, schedule)
    assert Side.parse(str(side)) == side


def test_a_side_may_choose_its_own_plan() -> None:
    assert Side.parse("paged+stock:decode").plan == "stock"
    assert Side.parse("paged:decode").plan is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "names engine ''"),
        ("pagged:mixed", "use one of transformers, packed, paged"),
        ("paged+:mixed", "empty or repeated setting"),
        ("paged+stock+stock", "empty or repeated setting"),
        ("paged+stock+aligned", "empty or repeated setting"),
        ("paged:", "ends with a colon"),
    ],
)
def test_a_side_that_cannot_be_read_says_why(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint.replace("+", r"\+")):
        Side.parse(text)


SCHEDULE = Schedule(
    events=(
        Step(slices=(Slice(request="a", start=0, stop=32), Slice(request="c", start=0, stop=9))),
        Hit(request="b", source="a", upto=16),
        Hit(request="d", source="b", upto=16),
        Step(slices=(Slice(request="b", start=16, stop=20),), padded_rows=2),
        Evict(request="c"),
    )
)


def test_a_restricted_schedule_keeps_order_padding_and_whole_requests() -> None:
    assert restrict(SCHEDULE, frozenset("ab")).events == (
        Step(slices=(Slice(request="a", start=0, stop=32),)),
        Hit(request="b", source="a", upto=16),
        Step(slices=(Slice(request="b", start=16, stop=20),), padded_rows=2),
    )


def test_the_closure_follows_hits_of_hits() -> None:
    assert closure([SCHEDULE], ["d"]) == ["d", "b", "a"]
    assert closure([SCHEDULE], ["c"]) == ["c"]
