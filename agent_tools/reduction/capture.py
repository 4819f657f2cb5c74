"""The exact inputs of one culprit on both sides, taken while both run.

The right side runs once and keeps its outputs; the left side runs with every operator on the right
side's values (as ``localize`` judges operators), so that the culprit's inputs are equal. What it
and its counterpart got at the culprit's first differing row becomes a :class:`.case.Case`.

    case = capture(left_runner, right_runner, culprit)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...kernels import bits
from ...kernels.errors import InconclusiveError
from ...trainer.engines.base import Hit, SiteCall
from ..compare import Comparison
from ..graft import Grafter, Reference, choose_rows
from ..records import Culprit
from ..sides import Runner, TracingObserver
from ..trace import Tracer
from .case import Case, SideCall
from .programs import program

MEMORY_BYTES = 1_500_000_000
Row = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One call: whose rows it held and what it got."""

    step: int
    rows: tuple[Row, ...]
    inputs: Mapping[str, Tensor]
    weights: tuple[str, ...]


class Spy:
    """Observer round an observer that keeps every call of one site."""

    def __init__(self, inner: TracingObserver, site: str) -> None:
        self.inner, self.tracer = inner, inner.tracer
        self.calls: list[Seen] = []
        self._site = site
        self._at: tuple[int, tuple[Row, ...]] = (0, ())

    def begin_rows(self, step: int, rows: Sequence[Row]) -> None:
        """Pass on, and note whose rows come."""
        self._at = step, tuple(rows)
        self.inner.begin_rows(step, rows)

    def on_site(self, call: SiteCall, /) -> Tensor | None:
        """Pass on; keep the inputs at the chosen site."""
        if call.site.name == self._site:
            inputs = {name: tensor.clone() for name, tensor in call.inputs.items()}
            self.calls.append(
                Seen(step=self._at[0], rows=self._at[1], inputs=inputs, weights=call.weights)
            )
        return self.inner.on_site(call)


def capture(left: Runner, right: Runner, culprit: Culprit, *, fault: str | None = None) -> Case:
    """Run both sides again and take the culprit's call; InconclusiveError where they disagree."""
    tracers = Tracer(), Tracer()
    plain = left.traced(tracers[0], tracers[0]), right.traced(tracers[1], tracers[1])
    limits, _ = choose_rows(Comparison(*plain), MEMORY_BYTES)
    reference = Reference(limits)
    right_spy = Spy(reference, culprit.site)
    right.traced(right_spy, reference.tracer)
    grafter = Grafter(reference, sample=False)
    left_spy = Spy(grafter, culprit.site)
    left.traced(left_spy, grafter.tracer)
    at = culprit.first.request, culprit.first.position
    ours = _call(left_spy, at, culprit.first.step)
    theirs = _call(right_spy, at, None)
    module = left.model.module
    if culprit.op_class == "attention":
        case = _attention(culprit, left, right, (left_spy, right_spy), (ours, theirs), at)
    else:
        case = _rows(culprit, module, (ours, theirs), at)
    if fault is None:
        return case
    return replace(case, left=replace(case.left, fault=fault))


def _call(spy: Spy, at: Row, step: int | None) -> Seen:
    for seen in spy.calls:
        if at in seen.rows and step in (None, seen.step):
            return seen
    raise InconclusiveError(
        f"request {at[0]}, position {at[1]} did not run again at that operator; the schedules "
        "differ from those of the divergence: run `zm localize` again with --out"
    )


def _rows(culprit: Culprit, module: nn.Module, calls: tuple[Seen, Seen], at: Row) -> Case:
    places = [seen.rows.index(at) for seen in calls]
    rows = [
        {name: tensor[place : place + 1] for name, tensor in seen.inputs.items()}
        for seen, place in zip(calls, places, strict=True)
    ]
    for name in rows[0]:
        if not bits.equal(rows[0][name].contiguous(), rows[1][name].contiguous()):
            raise InconclusiveError(
                f"input {name} of {culprit.site} is not the same on both sides, so the operator is "
                "not to blame; run `zm localize` again"
            )
    sides = [
        SideCall(
            program=program(culprit.op_class, contract), contract=contract, rows=len(seen.rows),
            row=place, neighbours=dict(seen.inputs),
        )
        for seen, place, contract in zip(
            calls, places, (culprit.contract_left, culprit.contract_right), strict=True
        )
    ]  # fmt: skip
    tensors, settings = _parameters(module, culprit)
    return Case(
        op_class=culprit.op_class, tensors={**rows[0], **tensors}, settings=settings,
        left=sides[0], right=sides[1],
    )  # fmt: skip


def _parameters(module: nn.Module, culprit: Culprit) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The operator's own tensors and settings."""
    if culprit.op_class not in ("linear", "lm_head", "rmsnorm", "rmsnorm_wide"):
        return {}, {}
    own = cast(Any, module.get_submodule(culprit.site.partition("#")[0]))
    tensors = {
        name: getattr(own, name).detach().clone()
        for name in ("weight", "bias")
        if getattr(own, name, None) is not None
    }
    if not culprit.op_class.startswith("rmsnorm"):
        return tensors, {}
    eps = getattr(own, "variance_epsilon", None) or own.eps
    return tensors, {"eps": float(eps), "unit_offset": type(own).__name__.startswith("Gemma")}


def _attention(
    culprit: Culprit, left: Runner, right: Runner, spies: tuple[Spy, Spy],
    calls: tuple[Seen, Seen], at: Row,
) -> Case:  # fmt: skip
    _refuse_options(culprit, left, max(position for seen in calls for _, position in seen.rows) + 1)
    spans = [[p for name, p in seen.rows if name == at[0]] for seen in calls]
    length = max(max(span) for span in spans) + 1
    owner = _owners(right, at[0])
    tensors = {
        name: torch.stack([_input(spies, name, at[0], p, owner) for p in range(length)])
        for name in ("q", "k", "v")
    }
    groups = tensors["k"].shape[1]
    tensors["q"] = tensors["q"].unflatten(1, (groups, -1)).contiguous()
    own = cast(Any, left.model.module.get_submodule(culprit.site.partition("#")[0]))
    sides = [
        SideCall(
            program=program("attention", contract), contract=contract, start=min(span),
            stop=max(span) + 1,
        )
        for span, contract in zip(
            spans, (culprit.contract_left, culprit.contract_right), strict=True
        )
    ]  # fmt: skip
    return Case(
        op_class="attention", tensors=tensors, settings={"scale": float(own.scaling)},
        left=sides[0], right=sides[1], position=at[1],
    )  # fmt: skip


def _refuse_options(culprit: Culprit, runner: Runner, length: int) -> None:
    """The generated file writes plain causal attention only; anything more is refused."""
    config = runner.model.config
    own = runner.model.module.get_submodule(culprit.site.partition("#")[0])
    window = getattr(config, "sliding_window", None)
    found = {
        f"a window of {window}": window is not None and length > window,
        "a softcap": getattr(config, "attn_logit_softcapping", None) is not None,
        "sinks": getattr(own, "sinks", None) is not None,
    }
    for what, applies in found.items():
        if applies:
            raise InconclusiveError(
                f"{culprit.site} may attend with {what}, which the generated file does not write "
                "out; `zm repro --whole` writes a file that runs the engines"
            )


def _owners(runner: Runner, request: str) -> list[str]:
    """The request, and those whose cached state it may have used, nearest first."""
    assert runner.schedule is not None
    names = [request]
    for event in runner.schedule.events:
        if isinstance(event, Hit) and event.request == request and event.source not in names:
            names.append(event.source)
    return names


def _input(
    spies: tuple[Spy, Spy], name: str, request: str, position: int, owners: Sequence[str]
) -> Tensor:
    for owner in owners:
        for spy in reversed(spies):
            for seen in spy.calls:
                if (owner, position) in seen.rows:
                    return seen.inputs[name][seen.rows.index((owner, position))]
    raise InconclusiveError(
        f"position {position} of request {request} never ran at that operator; run "
        "`zm localize` with a schedule that computes it"
    )
