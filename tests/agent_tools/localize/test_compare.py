"""Comparing traces: who is convicted, who is not, and when nothing may be said."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from zeromismatch.agent_tools.anchor import prove_alignment
from zeromismatch.agent_tools.compare import ABSENT, Comparison
from zeromismatch.agent_tools.trace import Trace, Tracer
from zeromismatch.trainer.engines.base import (
    Event,
    Hit,
    Request,
    Run,
    Scenario,
    Schedule,
    Site,
    SiteCall,
    Slice,
    Step,
)

EMBEDDING = Site(path="embed", op_class="embedding")
PROJECTION = Site(path="proj", op_class="linear")
ATTENTION = Site(path="attn", part="attention", op_class="attention")
LENGTHS = {"a": 4, "b": 4}
REQUESTS = tuple(Request(id=name, tokens=tuple(range(n))) for name, n in LENGTHS.items())

Rows = Sequence[tuple[str, int]]
Change = Mapping[tuple[str, str, int], float]
"""(slot, request, position) -> what is added to that row of the attention site."""


def values(rows: Rows, slot: str, change: Change) -> torch.Tensor:
    x = torch.tensor([[float(position), 1.0] for _, position in rows])
    for index, (request, position) in enumerate(rows):
        x[index] += change.get((slot, request, position), 0.0)
    return x


def traced(
    steps: Sequence[Rows],
    events: Sequence[Event],
    change: Change | None = None,
    *,
    slots: Sequence[str] = ("q", "k", "v"),
    requests: tuple[Request, ...] = REQUESTS,
    weights: np.ndarray | None = None,
) -> Trace:
    """A trace of one attention site; ``change`` plants differences."""
    change, tracer = change or {}, Tracer()
    for step, rows in enumerate(steps):
        tracer.begin_rows(step, rows)
        ids = torch.tensor([[position + change.get(("ids", request, position), 0)]
                            for request, position in rows])  # fmt: skip
        tracer.on_site(
            SiteCall(site=EMBEDDING, call=0, inputs={"ids": ids}, output=values(rows, "e", {}))
        )
        inputs = {slot: values(rows, slot, change) for slot in slots}
        output = values(rows, "out", change)
        tracer.on_site(SiteCall(site=ATTENTION, call=0, inputs=inputs, output=output))
    executed = Schedule(events=tuple(events))
    scenario = Scenario(model="m", plan="stock", requests=requests, schedule=executed)
    run = Run(scenario=scenario, executed=executed, requests=requests, samples=(), engine="paged")
    zeros = np.zeros((3, 2), np.int64)
    return tracer.finish(run, {}, {"w": zeros if weights is None else weights})


WHOLE: list[Rows] = [[("a", p) for p in range(4)], [("b", p) for p in range(4)]]
WHOLE_EVENTS = [Step(slices=(Slice(request=name, start=0, stop=4),)) for name in "ab"]


def attention(left: Trace, right: Trace) -> Comparison:
    return Comparison(left, right, classes=frozenset({"attention"}))


def test_equal_traces_convict_nobody_and_count_every_row() -> None:
    comparison = Comparison(traced(WHOLE, WHOLE_EVENTS), traced(WHOLE[::-1], WHOLE_EVENTS[::-1]))
    assert comparison.count() == (16, 0)
    assert comparison.first() is None
    assert comparison.coverage(0.9).share == 1.0


def test_an_output_that_differs_on_equal_inputs_convicts_its_site() -> None:
    left = traced(WHOLE, WHOLE_EVENTS, {("out", "b", 2): 1.0})
    comparison = Comparison(left, traced(WHOLE, WHOLE_EVENTS))
    first = comparison.first()
    assert first is not None
    assert (first.site, first.at.request, first.at.position) == ("attn#attention", "b", 2)
    assert (first.at.step, first.at.row, first.at.rows) == (1, 2, 4)
    assert first.left_digest != first.right_digest


@pytest.mark.parametrize("slot", ["q", "k", "v"])
def test_an_output_is_forgiven_where_its_own_input_differs(slot: str) -> None:
    left = traced(WHOLE, WHOLE_EVENTS, {("out", "b", 2): 1.0, (slot, "b", 2): 1.0})
    comparison = attention(left, traced(WHOLE, WHOLE_EVENTS))
    assert comparison.sites[0].affected == 0
    assert comparison.count() == (8, 1)


def test_attention_is_forgiven_where_an_earlier_key_differs() -> None:
    left = traced(WHOLE, WHOLE_EVENTS, {("k", "b", 1): 1.0, ("out", "b", 3): 1.0})
    (site,) = attention(left, traced(WHOLE, WHOLE_EVENTS)).sites
    assert site.affected == 0
    assert site.compared == 5  # all of a, and the first position of b


def test_attention_after_a_hit_answers_for_the_keys_of_the_other_request() -> None:
    steps: list[Rows] = [[("a", p) for p in range(4)], [("b", 2), ("b", 3)]]
    events = [
        Step(slices=(Slice(request="a", start=0, stop=4),)),
        Hit(request="b", source="a", upto=2),
        Step(slices=(Slice(request="b", start=2, stop=4),)),
    ]
    (clean,) = attention(traced(steps, events), traced(WHOLE, WHOLE_EVENTS)).sites
    assert clean.compared == 6
    planted = traced(steps, events, {("v", "a", 0): 1.0})
    (site,) = attention(planted, traced(WHOLE, WHOLE_EVENTS)).sites
    assert site.compared == 0  # position 0 is read by every row of both requests


def test_a_recomputed_row_is_compared_every_time() -> None:
    steps: list[Rows] = [WHOLE[0], WHOLE[0], WHOLE[1]]
    events = [WHOLE_EVENTS[0], WHOLE_EVENTS[0], WHOLE_EVENTS[1]]
    left = traced(steps, events)
    assert attention(left, traced(WHOLE, WHOLE_EVENTS)).count() == (12, 0)
    assert attention(traced(WHOLE, WHOLE_EVENTS), left).count() == (8, 0)


def test_a_right_side_that_contradicts_itself_is_a_difference() -> None:
    class Wavering(Tracer):
        steps = 0

        def on_site(self, call: SiteCall, /) -> None:
            self.steps += call.site == ATTENTION
            output = call.output + (1.0 if self.steps == 2 else 0.0)
            self.record(SiteCall(site=call.site, call=0, inputs=call.inputs, output=output))

    def repeated(tracer: Tracer) -> Trace:
        for step in range(2):
            tracer.begin_rows(step, [("a", 0)])
            for site in (EMBEDDING, ATTENTION):
                tracer.on_site(SiteCall(site=site, call=0, inputs={}, output=torch.zeros(1, 2)))
        schedule = Schedule(events=(WHOLE_EVENTS[0],))
        scenario = Scenario(model="m", plan="stock", requests=REQUESTS, schedule=schedule)
        run = Run(
            scenario=scenario, executed=schedule, requests=REQUESTS, samples=(), engine="paged"
        )
        return tracer.finish(run, {}, {})

    assert attention(repeated(Tracer()), repeated(Tracer())).count() == (2, 0)
    assert attention(repeated(Tracer()), repeated(Wavering())).count() == (2, 2)


def test_an_input_seen_on_one_side_only_spoils_the_verdict() -> None:
    left = traced(WHOLE, WHOLE_EVENTS, {("out", "b", 2): 1.0})
    comparison = Comparison(left, traced(WHOLE, WHOLE_EVENTS, slots=("q", "k")))
    assert comparison.first() is None
    assert comparison.coverage(0.9).incomplete == ("attn#attention",)


def test_rows_on_one_side_only_are_not_compared() -> None:
    comparison = Comparison(traced(WHOLE, WHOLE_EVENTS), traced(WHOLE[:1], WHOLE_EVENTS[:1]))
    assert comparison.count() == (8, 0)
    assert (comparison.sites[-1].output.state == ABSENT).sum() == 4


def test_other_tokens_are_misaligned_with_request_and_position() -> None:
    other = (REQUESTS[0], Request(id="b", tokens=(0, 1, 7, 3)))
    found = prove_alignment(
        traced(WHOLE, WHOLE_EVENTS), traced(WHOLE, WHOLE_EVENTS, requests=other)
    ).misalignment
    assert found is not None
    assert (found.what, found.request, found.position) == ("tokens", "b", 2)


def test_other_requests_are_misaligned() -> None:
    left, right = traced(WHOLE, WHOLE_EVENTS), traced(WHOLE[:1], WHOLE_EVENTS[:1],
                                                      requests=REQUESTS[:1])  # fmt: skip
    found = prove_alignment(left, right).misalignment
    assert found is not None
    assert (found.what, found.request) == ("requests", "b")


def test_other_weights_are_misaligned_with_tensor_and_row() -> None:
    changed = np.zeros((3, 2), np.int64)
    changed[1, 1] = 5
    found = prove_alignment(
        traced(WHOLE, WHOLE_EVENTS), traced(WHOLE, WHOLE_EVENTS, weights=changed)
    ).misalignment
    assert found is not None
    assert (found.what, found.tensor, found.index) == ("weights", "w", (1,))


def test_ids_that_the_engine_fed_wrongly_are_misaligned() -> None:
    left = traced(WHOLE, WHOLE_EVENTS, {("ids", "a", 3): 1})
    found = prove_alignment(left, traced(WHOLE, WHOLE_EVENTS)).misalignment
    assert found is not None
    assert (found.what, found.request, found.position) == ("inputs", "a", 3)
