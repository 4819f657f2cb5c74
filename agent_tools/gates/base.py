"""What a gate reports, and the rules by which its status follows from what it found.

A gate is a claim, a check that fills a :class:`Findings`, and a verdict that nobody chooses:
:func:`judge` derives it from counts, preconditions and red controls, and :func:`attribute` says
which verdicts still mean something after a red one.

    fail            something differs
    inconclusive    nothing differs, but a part compared nothing, a precondition did not occur, a
                    red control stayed green or touches over 1 % of rows, or the check could not run
    not-applicable  the recipe makes no such claim
    pass            everything else

The digest of a report covers all of it, and :func:`verify` derives every verdict again: a report
that was edited is named, not believed. Left out: running (``run.py``) and the checks themselves.

    pytest tests/agent_tools/gates
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ...model_recipes.plan import Plan
from ...model_recipes.schema import ModelIdentity
from ..plots import HeatMap
from ..recipe import environment_digest
from ..records import Divergence, Record
from ..report import Speed
from ..rollouts import TokenCount

if TYPE_CHECKING:
    from .bench import Bench

SHARE = re.compile(r"(\d+) of (\d+) rows")
Verdict = Literal["pass", "fail", "inconclusive", "not-attributable", "not-applicable"]


class Part(Record):
    """One comparison of a gate. It holds when something was compared and nothing differs.

    Part(name="decode = whole", compared=742, differing=0, unit="tokens", detail="")
    """

    name: str
    compared: int
    differing: int
    unit: str = "tokens"
    detail: str = ""


class Precondition(Record):
    """What must really have happened for the claim to mean something, from the executed schedule.

    Precondition(name="prefix hits", met=True, value="15")
    """

    name: str
    met: bool
    value: str


class Control(Record):
    """A fault that the same comparison must see. ``red``: it did.

    Control(name="stock attention", touches="one stock operator class", compared=742,
            differing=301, red=True)
    """

    name: str
    touches: str
    """What it changes: a stock operator, or a fault in at most one row of a hundred."""
    compared: int
    differing: int
    red: bool

    @property
    def crude(self) -> bool:
        """It spoils more than one row of a hundred: what sees that may be blind to less."""
        counts = SHARE.match(self.touches)
        return counts is not None and 100 * int(counts[1]) > int(counts[2])


class GateResult(Record):
    """One gate as it ran. ``result`` is its own verdict, ``status`` what it counts for.

    The two differ after a red gate: later verdicts are then not attributable to their own claim.
    """

    id: str
    title: str
    claim: str
    status: Verdict
    result: Verdict
    reason: str
    compared: int
    """All that was compared, in the units of ``parts``."""
    differing: int
    parts: tuple[Part, ...] = ()
    preconditions: tuple[Precondition, ...] = ()
    controls: tuple[Control, ...] = ()
    culprits: tuple[str, ...] = ()
    not_applicable: tuple[str, ...] = ()
    """Parts of the claim that the recipe does not make, with the reason."""
    notes: tuple[str, ...] = ()
    error: str = ""
    """Why the check could not run to its end."""
    divergence: Divergence | None = None
    heat: HeatMap | None = None
    """Where the sides of ``divergence`` differ, layer by token."""
    speeds: tuple[Speed, ...] = ()
    seconds: float

    @property
    def tokens(self) -> tuple[int, int]:
        """(compared, differing) over the parts that count scored tokens."""
        parts = [part for part in self.parts if part.unit == "tokens"]
        return sum(part.compared for part in parts), sum(part.differing for part in parts)

    @property
    def control_text(self) -> str:
        """The red controls in one line."""
        return "; ".join(
            f"{entry.name}: {entry.differing} of {entry.compared} differ"
            + ("" if entry.red else " (NOT red)")
            for entry in self.controls
        )


class Request(Record):
    """What was asked for; together with the plan it repeats the report."""

    model: str
    dtype: Literal["float32", "bfloat16"]
    device: str
    seed: int
    rollout: str
    gates: tuple[str, ...]
    quick: bool
    prompts: str | None = None
    """A file of the user's; None for ours."""
    recipe: str | None = None
    """Where the plan comes from, so that `zm regress` judges the recipe as it is by then."""


class GateReport(Record):
    """All gates of one run. ``status`` decides the exit code."""

    schema_version: Literal[1] = 1
    kind: Literal["gates"] = "gates"
    status: Literal["pass", "fail", "inconclusive"]
    reason: str
    failed: tuple[str, ...]
    """Gates whose own result is red, attributable or not."""
    request: Request
    identity: ModelIdentity
    plan: Plan
    plan_digest: str
    environment: dict[str, str] = Field(default_factory=dict[str, str])
    environment_digest: str
    requests_digest: str
    """Digest of the prompts that the gates ran on."""
    size: dict[str, int] = Field(default_factory=dict[str, int])
    """How much was done: requests, tokens of a reply, random schedules, backward passes ..."""
    share: float = 1.0
    """Of what is done on a small model (``budget.py``)."""
    gates: tuple[GateResult, ...]
    created: str
    seconds: float
    digest: str = ""
    """BLAKE2b-128 over everything else."""

    @property
    def exit_code(self) -> int:
        """0 all passed, 1 a gate is red, 3 inconclusive."""
        return {"pass": 0, "fail": 1, "inconclusive": 3}[self.status]


@dataclass(slots=True)
class Findings:
    """What a check has found so far."""

    parts: list[Part] = field(default_factory=list[Part])
    preconditions: list[Precondition] = field(default_factory=list[Precondition])
    controls: list[Control] = field(default_factory=list[Control])
    culprits: list[str] = field(default_factory=list[str])
    not_applicable: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    error: str = ""
    divergence: Divergence | None = None
    heat: HeatMap | None = None
    speeds: list[Speed] = field(default_factory=list[Speed])

    def part(
        self, name: str, compared: int, differing: int, unit: str = "tokens", detail: str = ""
    ) -> None:
        """Add a comparison."""
        self.parts.append(
            Part(name=name, compared=compared, differing=differing, unit=unit, detail=detail)
        )

    def tokens(self, name: str, count: TokenCount, detail: str = "") -> None:
        """Add a comparison of scored tokens."""
        if count.first is not None:
            detail = f"{detail + '; ' if detail else ''}first: {count.first[0]} at {count.first[1]}"
        self.part(name, count.compared, count.differing, detail=detail)

    def require(self, name: str, value: object, met: bool | None = None) -> None:
        """Add a precondition; without ``met`` the value must be true."""
        self.preconditions.append(
            Precondition(name=name, met=bool(value) if met is None else met, value=str(value))
        )

    def control(
        self, name: str, touches: str, compared: int, differing: int, *, red: bool | None = None
    ) -> None:
        """Add a red control; without ``red`` it is red when something differs."""
        seen = differing > 0 if red is None else red
        self.controls.append(
            Control(name=name, touches=touches, compared=compared, differing=differing, red=seen)
        )

    def stock_control(self, name: str, count: TokenCount) -> None:
        """Add a red control that puts one class of stock operators in."""
        self.control(name, "one stock operator class", count.compared, count.differing)

    def differs(self) -> bool:
        """Whether anything differs so far."""
        return any(part.differing for part in self.parts)


Check = Callable[["Bench", Findings], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A claim and the check that tries to refute it."""

    id: str
    title: str
    claim: str
    check: Check


def judge(found: Findings | GateResult) -> tuple[Verdict, str]:
    """The gate's own verdict and why, from what was found and nothing else."""
    broken = [part for part in found.parts if part.differing]
    if broken:
        first = broken[0]
        return "fail", (
            f"{first.name}: {first.differing} of {first.compared} {first.unit} differ"
            + (f" ({first.detail})" if first.detail else "")
        )
    if found.error:
        return "inconclusive", found.error
    if not found.parts and found.not_applicable:
        return "not-applicable", found.not_applicable[0]
    empty = [part.name for part in found.parts if not part.compared]
    if empty or not found.parts:
        return "inconclusive", f"nothing was compared: {', '.join(empty) or 'no comparison ran'}"
    unmet = [entry for entry in found.preconditions if not entry.met]
    if unmet:
        named = "; ".join(f"{entry.name} ({entry.value})" for entry in unmet)
        return "inconclusive", f"a precondition did not occur: {named}"
    blind = [entry.name for entry in found.controls if not entry.red]
    if blind or not found.controls:
        return "inconclusive", f"no red control turned red: {', '.join(blind) or 'none ran'}"
    crude = [f"{entry.name} touches {entry.touches}" for entry in found.controls if entry.crude]
    if crude:
        return "inconclusive", f"a red control touches over 1 %: {', '.join(crude)}"
    return "pass", f"{sum(part.compared for part in found.parts)} comparisons, none differs"


def attribute(results: Sequence[Verdict]) -> list[Verdict]:
    """What each own verdict counts for: after the first red one, the later are not attributable."""
    first = results.index("fail") if "fail" in results else len(results)
    return [
        "not-attributable" if index > first and result != "not-applicable" else result
        for index, result in enumerate(results)
    ]


def conclude(gates: Sequence[GateResult]) -> tuple[Literal["pass", "fail", "inconclusive"], str]:
    """The report's verdict and one sentence."""
    red = [gate for gate in gates if gate.result == "fail"]
    if red:
        names = ", ".join(gate.id for gate in red)
        return "fail", (
            f"{names} failed; the first red gate is {red[0].id}: {red[0].reason}. Next: "
            "`zm align MODEL` names and fixes the culprits."
        )
    void = [gate for gate in gates if gate.result == "inconclusive"]
    passed = [gate.id for gate in gates if gate.result == "pass"]
    if void or not passed:
        why = f"{void[0].id}: {void[0].reason}" if void else "no gate made a claim"
        return "inconclusive", f"{why}. Next: give longer or more prompts, or `zm doctor`."
    return "pass", f"{', '.join(passed)} passed; nothing differs."


def seal(report: GateReport) -> GateReport:
    """The report with its digest."""
    return report.model_copy(update={"digest": digest_of(report)})


def digest_of(report: GateReport) -> str:
    """Digest over everything but the digest itself."""
    plain = json.loads(report.model_dump_json(exclude={"digest"}))
    if report.request.recipe is None:
        del plain["request"]["recipe"]  # reports from before there was such a field
    if not report.size:
        del plain["size"], plain["share"]  # likewise
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def verify(report: GateReport) -> list[str]:
    """What is wrong with a report in itself: edited fields, verdicts that do not follow."""
    faults = []
    if digest_of(report) != report.digest:
        faults.append(f"its content has digest {digest_of(report)}, it says {report.digest}")
    if environment_digest(dict(report.environment)) != report.environment_digest:
        faults.append("its environment does not have its environment digest")
    if report.plan.digest != report.plan_digest:
        faults.append("its plan does not have its plan digest")
    for gate in report.gates:
        result, reason = judge(gate)
        counts = tuple(sum(getattr(p, n) for p in gate.parts) for n in ("compared", "differing"))
        if (result, reason, *counts) != (gate.result, gate.reason, gate.compared, gate.differing):
            faults.append(f"{gate.id} says {gate.result} ({gate.reason}), its evidence {result}")
    statuses = attribute([gate.result for gate in report.gates])
    faults += [
        f"{gate.id} counts as {gate.status}, it can only count as {status}"
        for gate, status in zip(report.gates, statuses, strict=True)
        if gate.status != status
    ]
    if tuple(gate.id for gate in report.gates) != report.request.gates:
        faults.append("it does not hold the gates that it says were run")
    if conclude(report.gates) != (report.status, report.reason):
        faults.append(f"it says {report.status}, its gates {conclude(report.gates)[0]}")
    if tuple(gate.id for gate in report.gates if gate.result == "fail") != report.failed:
        faults.append("its list of failed gates is not what its gates say")
    return faults


def changes(
    report: GateReport, identity: ModelIdentity, environment: Mapping[str, str]
) -> list[str]:
    """What differs between a report's circumstances and these: weights, config, versions."""
    own = report.identity
    named = [
        f"{what}: the report's {mine}, here {here}"
        for what, mine, here in (
            ("model type", own.model_type, identity.model_type),
            ("config", own.config_digest, identity.config_digest),
            ("weights", own.weights_root, identity.weights_root),
        )
        if mine != here
    ]
    names = sorted(report.environment.keys() | environment.keys())
    return named + [
        f"{name}: the report's {report.environment.get(name, 'absent')}, here "
        f"{environment.get(name, 'absent')}"
        for name in names
        if report.environment.get(name) != environment.get(name)
    ]
