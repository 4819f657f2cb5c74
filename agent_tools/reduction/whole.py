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

from pydantic import Field, ValidationError

from ...kernels.errors import InconclusiveError, UncoveredSiteError, ZeroMismatchError
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
from .case import Flags
from .origin import environment, revision
from .shrink import minimise

EQUAL, MISMATCH, UNSUITABLE = 0, 1, 125
UNCOVERED, MISALIGNED = "UNCOVERED", "MISALIGNED"
UNSTEADY = "the left side does not repeat itself: nondeterminism"
"""Begins what is named where an operator has no contract: that, too, a patch has to mend."""
LAYER = re.compile(r"\blayers\.(\d+)\b")
SOURCE = '''"""{claim}

Runs both engines (or the sweep of one kernel): exit 0 equal, 1 mismatch, 125 unsuitable environment
(`--expect-equal`: any mismatch counts, not only the recorded one).
"""

import gc
import os
import sys
from pathlib import Path

gc.disable()  # two seconds less: imports make objects by the million, and none is garbage
try:
    from zeromismatch.agent_tools.{home} import rerun
except ImportError as error:
    print(f"unsuitable: {{error}}")
    sys.exit(125)

record = Path(__file__).resolve().parent / "repro.json"
try:
    found = rerun(record, expect_equal="--expect-equal" in sys.argv)
except Exception as error:
    print(f"unsuitable: {{type(error).__name__}}: {{error}}")
    found = 125
sys.stdout.flush()
os._exit(found)  # at once: taking all that was imported down takes another second
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
    repeats: bool = True
    """Whether the left side gives its own bits again; if not, this is nondeterminism."""
    first: str | None = None
    """Where it shows first."""
    left_digest: str | None = None
    right_digest: str | None = None
    """Of what differs first: an operator's row, or a logprob's bits."""
    reduced: tuple[str, ...]
    tried: int
    versions: dict[str, str]
    device: str = "cpu"
    environment: dict[str, str] = Field(default_factory=dict[str, str])
    revision: str | None = None
    command: str
    seconds: float


class Shown(Record):
    """What one comparison names first, where, and both sides' bits there.

    Shown(named="model.norm", first="request r0, position 17", left="9f3c...", right="07aa...")
    """

    named: str | None
    first: str | None = None
    left: str | None = None
    right: str | None = None


def shown_by(found: Divergence) -> Shown:
    """The first thing that a comparison names; nothing where the sides are equal."""
    odd, first, logprobs = found.anchor.misalignment, found.first_divergence, found.logprobs
    if odd is not None:
        where = None if odd.request is None else f"request {odd.request}, position {odd.position}"
        return Shown(named=f"{MISALIGNED} {odd.what}", first=where)
    if first is not None:
        at = first.at
        where = f"request {at.request}, position {at.position}, row {at.row} of {at.rows}"
        return Shown(
            named=first.site, first=where, left=first.left_digest, right=first.right_digest
        )
    if found.status == "EQUAL" or logprobs is None:
        return Shown(named=None if found.status == "EQUAL" else found.status)
    return Shown(
        named=found.status, left=logprobs.first_left_bits, right=logprobs.first_right_bits,
        first=f"request {logprobs.first_request}, position {logprobs.first_position}",
    )  # fmt: skip


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
) -> Shown:
    """Run both sides and compare, without grafting."""
    traces = []
    one_plan = all(side.engine in ("paged", "packed") and not side.plan for side in sides)
    resolved: Plan | None = None
    for side in sides:
        runner = Runner(
            side=side, model=model, requests=tuple(requests), plan=plan, resolved=resolved
        )
        tracer = Tracer()
        try:
            traces.append(runner.traced(tracer, tracer))
        except UncoveredSiteError as error:
            return Shown(named=f"{UNCOVERED} {str(error).splitlines()[0][:200]}")
        resolved = runner.resolved if one_plan else None  # its sites need no second search
    return shown_by(compare_traces(*traces))


def repeats(model: LoadedModel, side: Side, plan: str | Plan, requests: Sequence[Request]) -> bool:
    """Whether a side gives its own bits again."""
    named = outcome(model, (side, side), plan, requests).named
    return named is None or named.startswith((UNCOVERED, MISALIGNED))


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
        shown, kept, tried, status = _checked(fault, model), list(requests), 1, "none"
        sides, depth, reduced, steady = (left, right), None, [], True
    else:
        shrinking = _Shrinking(model, (left, right), plan, fault, began + seconds)
        shrinking.keeps_depth = place is not None  # a recipe is for the whole model
        progress("shrinking flags, depth, requests and tokens")
        shown, kept = shrinking.run(list(requests))
        steady = shrinking.steady(kept)
        sides, depth, reduced = shrinking.sides, shrinking.depth, shrinking.reduced
        tried, status = shrinking.tried, "budget" if shrinking.spent() else "minimal"
    counts = [sum(len(request.tokens) for request in each) for each in (requests, kept)]
    record = WholeRepro(
        claim=f"{sides[0]} against {sides[1]} on {model.spec}: {shown.named}"
        + ("" if steady else f" ({UNSTEADY})")
        + (f" (planted: {FAULTS[fault].line})" if fault else ""),
        model=model.spec, dtype=dtype_name(model.dtype), seed=seed,  # pyright: ignore
        depth=depth, sides=(str(sides[0]), str(sides[1])), fault=fault, status=status,
        named=shown.named or "", repeats=steady,
        first=shown.first, left_digest=shown.left, right_digest=shown.right,
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
        tried=tried, versions=dict(versions()), device=str(model.device),
        environment=environment(Flags.now()), revision=revision(), command=command,
        seconds=time.monotonic() - began,
    )  # fmt: skip
    swept = fault is not None and FAULTS[fault].by == "certified"
    home = "faults.sweep" if swept else "reduction.whole"
    write_whole(folder / "repro.json", record.model_dump_json(indent=2) + "\n")
    write_whole(folder / "repro.py", SOURCE.format(claim=record.claim, home=home))
    return record


def _planted(fault: str | None, model: LoadedModel) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if fault is None else plant(fault, model)


def _checked(fault: str, model: LoadedModel) -> Shown:
    return Shown(named="; ".join(check(fault, model).named) or None)


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
        self._known: dict[object, Shown] = {}

    def spent(self) -> bool:
        return time.monotonic() > self.until

    def shown(self, requests: Sequence[Request]) -> Shown:
        key = (self.sides, self.depth, tuple(request.tokens for request in requests))
        if key not in self._known:
            self.tried += 1
            with _planted(self.fault, self.model):
                self._known[key] = outcome(self.model, self.sides, self.plan, requests)
        return self._known[key]

    def steady(self, requests: Sequence[Request]) -> bool:
        """Whether the left side, as it is by now, repeats itself."""
        with _planted(self.fault, self.model):
            return repeats(self.model, self.sides[0], self.plan, requests)

    def run(self, requests: list[Request]) -> tuple[Shown, list[Request]]:
        named = self.shown(requests).named
        if named is None:
            raise InconclusiveError(
                "both sides give equal bits on these requests, so there is nothing to reproduce; "
                "run `zm localize` again"
            )
        if named.startswith(UNCOVERED):
            return self.shown(requests), requests  # fewer tokens would say less once it runs
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
        return self.shown(smaller), smaller

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
            return self.shown(requests).named == named
        except ZeroMismatchError:
            return False  # no schedule of that name exists for so few tokens


def _cut(request: Request, length: int) -> Request:
    mask = request.sampled_mask[:length]
    return replace(request, tokens=request.tokens[:length], sampled_mask=mask, turns=())


def rerun(path: Path, *, expect_equal: bool = False) -> int:
    """Run a stored repro again; prints what it finds and returns its exit code."""
    try:
        record = WholeRepro.model_validate_json(path.read_text(encoding="utf-8"))
        model = load_model(record.model, dtype=record.dtype, device=record.device, seed=record.seed)
        model = shallow(model, record.depth)
        shown, steady = _again(record, model)
    except (OSError, ValidationError, ZeroMismatchError) as error:  # or a plan that cannot be used
        print(f"unsuitable: {error}")
        return UNSUITABLE
    if shown.named is None:
        print("equal: every operator row and every logprob")
        return EQUAL
    named = shown.named + ("" if steady else f", and {UNSTEADY}")
    print(f"mismatch: {named}" + (f", first at {shown.first}" if shown.first else ""))
    if not expect_equal:
        same = shown.named == record.named and steady == record.repeats
        print("  as recorded" if same else f"  recorded was {record.claim}")
        bits = shown.left, shown.right
        if same and bits != (record.left_digest, record.right_digest):
            print(f"  with other bits: {bits[0]} and {bits[1]}")
    return MISMATCH


def _again(record: WholeRepro, model: LoadedModel) -> tuple[Shown, bool]:
    """What differs now, and whether the left side repeats itself, if it once did not."""
    if record.fault is not None and FAULTS[record.fault].by not in ("operator", "anchor"):
        return _checked(record.fault, model), True
    requests = [request.request() for request in record.requests]
    sides = Side.parse(record.sides[0]), Side.parse(record.sides[1])
    with _planted(record.fault, model):
        shown = outcome(model, sides, record.plan, requests)
        steady = record.repeats or shown.named is None
        return shown, steady or repeats(model, sides[0], record.plan, requests)
