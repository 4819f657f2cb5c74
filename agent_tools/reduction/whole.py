"""Where no operator alone shows it: both engines on as few and as short requests as still differ.

State that was overwritten, tables that were read too late, logprobs that were changed on the way
out: such a fault lives between operators, so its repro runs the engines. The model is named, not
stored (``tiny:`` models are built from a seed); tokens stand in ``repro.json``, exact.

    record = write_whole_repro(Path("repro"), left, right, found)
    rerun(Path("repro/repro.json"))                  # 0 equal, 1 mismatch, 125 unsuitable

``zm repro DIVERGENCE --whole`` writes one.
"""

import contextlib
import copy
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import ValidationError

from ...kernels.errors import (
    CapabilityError,
    InconclusiveError,
    UncoveredSiteError,
    UsageError,
    ZeroMismatchError,
)
from ...model_recipes.bindings import dtype_name
from ...model_recipes.models import LoadedModel, load_model
from ...model_recipes.plan import Plan
from ...trainer.engines.base import Request, Sampling
from ..doctor import versions
from ..faults import FAULTS, check, plant
from ..records import Divergence, Record
from ..report import write_whole
from ..sides import PLAN_SETTINGS, Runner, Side
from ..trace import Tracer
from ..verdict import compare_traces
from .shrink import minimise

EQUAL, MISMATCH, UNSUITABLE = 0, 1, 125
UNCOVERED = "UNCOVERED"
"""Begins what is named where an operator has no contract: that, too, a patch has to mend."""
LAYER = re.compile(r"\blayers\.(\d+)\b")
SOURCE = '''"""{claim}

Runs both engines: exit 0 equal, 1 mismatch, 125 unsuitable environment (`--expect-equal`: any
mismatch counts, not only the recorded one).
"""

import sys
from pathlib import Path

try:
    from zeromismatch.agent_tools.reduction.whole import rerun
except ImportError as error:
    print(f"unsuitable: {{error}}")
    sys.exit(125)

record = Path(__file__).resolve().parent / "repro.json"
sys.exit(rerun(record, expect_equal="--expect-equal" in sys.argv))
'''


class StoredRequest(Record):
    """A request as it ran."""

    id: str
    tokens: tuple[int, ...]
    sampled_mask: tuple[bool, ...]
    temperature: float

    def request(self) -> Request:
        """As engines take it."""
        sampling = Sampling(temperature=self.temperature)
        return Request(
            id=self.id, tokens=self.tokens, sampled_mask=self.sampled_mask, sampling=sampling
        )


class WholeRepro(Record):
    """What ``repro.json`` of such a repro holds."""

    schema_version: Literal[1] = 1
    kind: Literal["whole-repro"] = "whole-repro"
    claim: str
    model: str
    dtype: Literal["float32", "bfloat16"]
    seed: int
    depth: int | None = None
    """Leading layers that are kept; None for all."""
    sides: tuple[str, str]
    plan: str
    requests: tuple[StoredRequest, ...]
    named: str
    """The first operator in execution order that differs, or what the anchor said."""
    fault: str | None = None
    status: Literal["minimal", "budget", "none"]
    reduced: tuple[str, ...]
    tried: int
    versions: dict[str, str]
    command: str
    seconds: float


def named_by(found: Divergence) -> str | None:
    """The first thing that a comparison names; None where the sides are equal."""
    if found.anchor.misalignment is not None:
        return f"MISALIGNED {found.anchor.misalignment.what}"
    if found.first_divergence is not None:
        return found.first_divergence.site
    return None if found.status == "EQUAL" else found.status


def shallow(model: LoadedModel, depth: int | None) -> LoadedModel:
    """A copy of the model with its leading layers only; None: the model itself."""
    if depth is None:
        return model
    module = copy.deepcopy(model.module)
    body, config = cast(Any, module).model, cast(Any, module).config
    body.layers = body.layers[:depth]
    config.num_hidden_layers = depth
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:depth]
    return replace(model, module=module, config=config)


def outcome(
    model: LoadedModel, sides: tuple[Side, Side], plan: str | Plan, requests: Sequence[Request]
) -> str | None:
    """Run both sides and compare, without grafting."""
    traces = []
    for side in sides:
        runner = Runner(side=side, model=model, requests=tuple(requests), plan=plan)
        tracer = Tracer()
        try:
            traces.append(runner.traced(tracer, tracer))
        except UncoveredSiteError as error:
            return f"{UNCOVERED} {str(error).splitlines()[0][:200]}"
    return named_by(compare_traces(*traces))


def write_whole_repro(
    folder: Path,
    left: Side,
    right: Side,
    model: LoadedModel,
    requests: Sequence[Request],
    *,
    plan: str | Plan = "aligned",
    place: str | None = None,
    fault: str | None = None,
    seed: int = 0,
    seconds: float = 60.0,
    command: str = "zm repro --whole",
    progress: Callable[[str], None] = lambda stage: None,
) -> WholeRepro:
    """Shrink flags, depth, requests and tokens while the same is named first; write the folder.

    place: the recipe that the file names as its plan; default: ``plan``. fault: a catalogued fault,
    planted for each run here and in the file.
    """
    began = time.monotonic()
    if fault is not None and FAULTS[fault].by not in ("operator", "anchor"):
        named, kept, tried, status = _checked(fault, model), list(requests), 1, "none"
        sides, depth, reduced = (left, right), None, []
    else:
        shrinking = _Shrinking(model, (left, right), plan, fault, began + seconds)
        shrinking.keeps_depth = place is not None  # a recipe is for the whole model
        progress("shrinking flags, depth, requests and tokens")
        named, kept = shrinking.run(list(requests))
        sides, depth, reduced = shrinking.sides, shrinking.depth, shrinking.reduced
        tried, status = shrinking.tried, "budget" if shrinking.spent() else "minimal"
    counts = [sum(len(request.tokens) for request in each) for each in (requests, kept)]
    record = WholeRepro(
        claim=f"{sides[0]} against {sides[1]} on {model.spec}: {named}"
        + (f" (planted: {FAULTS[fault].line})" if fault else ""),
        model=model.spec, dtype=dtype_name(model.dtype), seed=seed,  # pyright: ignore
        depth=depth, sides=(str(sides[0]), str(sides[1])), named=named, fault=fault, status=status,
        plan=place or (plan if isinstance(plan, str) else plan.name),
        requests=tuple(
            StoredRequest(id=r.id, tokens=r.tokens, sampled_mask=r.sampled_mask,
                          temperature=r.sampling.temperature)
            for r in kept
        ),
        reduced=(
            *reduced,
            f"requests: {len(requests)} -> {len(kept)}",
            f"tokens: {counts[0]} -> {counts[1]}",
        ),
        tried=tried, versions=dict(versions()), command=command,
        seconds=time.monotonic() - began,
    )  # fmt: skip
    write_whole(folder / "repro.json", record.model_dump_json(indent=2) + "\n")
    write_whole(folder / "repro.py", SOURCE.format(claim=record.claim))
    return record


def _planted(fault: str | None, model: LoadedModel) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if fault is None else plant(fault, model)


def _checked(fault: str, model: LoadedModel) -> str:
    return "; ".join(check(fault, model).named)


class _Shrinking:
    def __init__(
        self, model: LoadedModel, sides: tuple[Side, Side], plan: str | Plan, fault: str | None,
        until: float,
    ) -> None:  # fmt: skip
        self.model, self.sides, self.plan, self.fault = model, sides, plan, fault
        self.until, self.keeps_depth = until, False
        self.tried = 0
        self.depth: int | None = None
        self.reduced: list[str] = []
        self._known: dict[object, str | None] = {}

    def spent(self) -> bool:
        return time.monotonic() > self.until

    def named(self, requests: Sequence[Request]) -> str | None:
        key = (self.sides, self.depth, tuple(request.tokens for request in requests))
        if key not in self._known:
            self.tried += 1
            with _planted(self.fault, self.model):
                self._known[key] = outcome(self.model, self.sides, self.plan, requests)
        return self._known[key]

    def run(self, requests: list[Request]) -> tuple[str, list[Request]]:
        named = self.named(requests)
        if named is None:
            raise InconclusiveError(
                "both sides give equal bits on these requests, so there is nothing to reproduce; "
                "run `zm localize` again"
            )
        if named.startswith(UNCOVERED):
            return named, requests  # fewer tokens would say less once it runs
        self._flags(requests, named)
        self._depth(requests, named)
        kept = minimise(
            list(range(len(requests))),
            lambda chosen: self._same([requests[i] for i in chosen], named), self.spent,
        )  # fmt: skip
        smaller = [requests[index] for index in kept]
        for index in range(len(smaller)):
            step = len(smaller[index].tokens) // 2
            while step and not self.spent():
                shorter = list(smaller)
                shorter[index] = _cut(smaller[index], len(smaller[index].tokens) - step)
                if len(shorter[index].tokens) >= 2 and self._same(shorter, named):
                    smaller = shorter
                else:
                    step //= 2
        return named, smaller

    def _flags(self, requests: Sequence[Request], named: str) -> None:
        """Without the settings of either side, one at a time."""
        settings = [(at, name) for at in (0, 1) for name in self.sides[at].settings]
        for at, name in settings:
            if name in PLAN_SETTINGS:
                continue
            before = self.sides
            fewer = tuple(each for each in before[at].settings if each != name)
            side = replace(before[at], settings=fewer)
            self.sides = (side, before[1]) if at == 0 else (before[0], side)
            if self._same(requests, named):
                self.reduced.append(f"flags: {before[at]} -> {side}")
            else:
                self.sides = before

    def _depth(self, requests: Sequence[Request], named: str) -> None:
        """Only the layers up to the one that is named: what comes later cannot matter."""
        whole, layers = self.model, getattr(getattr(self.model.module, "model", None), "layers", ())
        found = LAYER.search(named)
        depth = int(found[1]) + 1 if found else 1
        if self.keeps_depth or self.spent() or depth >= len(layers):
            return
        self.model, self.depth = shallow(whole, depth), depth
        if self._same(requests, named):
            self.reduced.append(f"depth: {len(layers)} -> {depth} layers")
        else:
            self.model, self.depth = whole, None

    def _same(self, requests: Sequence[Request], named: str) -> bool:
        try:
            return self.named(requests) == named
        except ZeroMismatchError:
            return False  # no schedule of that name exists for so few tokens


def _cut(request: Request, length: int) -> Request:
    mask = request.sampled_mask[:length]
    return replace(request, tokens=request.tokens[:length], sampled_mask=mask, turns=())


def rerun(path: Path, *, expect_equal: bool = False) -> int:
    """Run a stored repro again; prints what it finds and returns its exit code."""
    try:
        record = WholeRepro.model_validate_json(path.read_text(encoding="utf-8"))
        model = load_model(record.model, dtype=record.dtype, seed=record.seed)
        model = shallow(model, record.depth)
    except (OSError, ValidationError, ZeroMismatchError) as error:
        print(f"unsuitable: {error}")
        return UNSUITABLE
    requests = [request.request() for request in record.requests]
    if record.fault is not None and FAULTS[record.fault].by not in ("operator", "anchor"):
        named = _checked(record.fault, model) or None
    else:
        sides = Side.parse(record.sides[0]), Side.parse(record.sides[1])
        try:
            with _planted(record.fault, model):
                named = outcome(model, sides, record.plan, requests)
        except (CapabilityError, UsageError) as error:  # a plan that cannot be used, say
            print(f"unsuitable: {error}")
            return UNSUITABLE
    if named is None:
        print("equal: every operator row and every logprob")
        return EQUAL
    same = "as recorded" if named == record.named else f"recorded was {record.named}"
    print(f"mismatch: {named}" + ("" if expect_equal else f" ({same})"))
    return MISMATCH
