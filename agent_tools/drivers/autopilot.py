"""The autopilot: aligns a model by rules, without a language model.

    localize -> which operator classes are culprits -> a registered, certified contract for each ->
    localize again -> next probe

It goes from an engine against itself to engine against trainer, and changes one thing at a time:
only classes that were named get a contract. What remains stock at the end is then covered too, so
that the plan is total. Causes decide nothing here and cost more than the rest, so they are looked
for only where it is stuck, for whoever goes on. It solves what a registered kernel solves;
otherwise it stops and says with what. The verdict always is the localizer's, never the autopilot's.

    outcome = fly(load_model("smollm2-135m"), requests)
    outcome.stuck or outcome.plan
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...kernels import dispatch
from ...kernels.contract import implementations
from ...model_recipes.bindings import aligned_contract
from ...model_recipes.models import LoadedModel
from ...model_recipes.plan import STOCK, Plan, aligned_plan, stock_plan
from ...trainer.engines.base import Request
from ..localize import Options, localize
from ..records import CulpritGroup, Divergence, Record
from ..sides import Side

PROBES: tuple[tuple[str, str], ...] = (
    ("paged:decode", "paged:alone"),
    ("paged:mixed", "paged:alone"),
    ("paged:prefix-hit", "paged:alone"),
    ("paged:fuzz:1", "packed:packed"),
)
"""An engine against itself first (phase, batch, cache), then engine against trainer."""

Progress = Callable[[str], None]


class Step(Record):
    """One localization and what was done about it.

    Step(left="paged:decode", right="paged:alone", plan="stock", status="DIVERGENT",
         found="...", groups=(...), action="attention -> attention.pages16.float32.cpu.v1")
    """

    left: str
    right: str
    plan: str
    status: str
    found: str
    groups: tuple[CulpritGroup, ...]
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where the autopilot ended. ``stuck`` is None when every probe is equal under ``plan``."""

    plan: Plan
    steps: tuple[Step, ...]
    divergences: tuple[Divergence, ...]
    stuck: str | None


def fly(
    model: LoadedModel,
    requests: Sequence[Request],
    *,
    probes: Sequence[tuple[str, str]] = PROBES,
    progress: Progress = lambda stage: None,
) -> Outcome:
    """Align ``model`` from the stock plan on; every probe is repeated until it is equal."""
    plan = stock_plan()
    steps: list[Step] = []
    divergences: list[Divergence] = []
    for left, right in probes:
        while True:
            progress(f"{left} against {right}, plan {plan.name}")
            compare = functools.partial(
                localize, Side.parse(left), Side.parse(right), model, requests, plan=plan
            )
            found = compare(options=Options(progress=progress, causes=False))
            better, action, stuck = _next_plan(plan, found, model)
            if stuck and found.culprits:
                found = compare(options=Options(progress=progress))
                better, action, stuck = _next_plan(plan, found, model)
            divergences.append(found)
            steps.append(_step(left, right, plan, found, action))
            if stuck:
                return Outcome(
                    plan=plan, steps=tuple(steps), divergences=tuple(divergences), stuck=action
                )
            if better is plan:
                break
            plan = better
    whole = aligned_plan(model.dtype, model.device)
    covered = sorted(name for name, choice in plan.rules.items() if choice == STOCK)
    steps.append(
        Step(
            left="-",
            right="-",
            plan=plan.name,
            status="EQUAL",
            found=f"Every probe is equal; {len(covered)} operator classes were never culprits.",
            groups=(),
            action=f"cover what is still stock: {', '.join(covered) or 'nothing'}",
        )
    )
    return Outcome(plan=whole, steps=tuple(steps), divergences=tuple(divergences), stuck=None)


def _next_plan(plan: Plan, found: Divergence, model: LoadedModel) -> tuple[Plan, str, bool]:
    """(plan to go on with, what was decided, whether that is the end)."""
    if found.status == "EQUAL":
        return plan, "equal: next probe", False
    if found.status != "DIVERGENT":
        return plan, f"{found.status}: {found.reason}", True
    classes = sorted({culprit.op_class for culprit in found.culprits})
    if not classes:
        return plan, "the sides differ but no operator is to blame on equal inputs", True
    served = [name for name in classes if plan.rules.get(name) != STOCK]
    if served:
        return (
            plan,
            (
                f"{', '.join(served)} still differ under their contract "
                f"{plan.rules[served[0]]}; run `zm kernels certify {plan.rules[served[0]]}`"
            ),
            True,
        )
    rules = dict(plan.rules)
    for name in classes:
        contract = aligned_contract(name, model.dtype, model.device)
        if contract is None:
            return (
                plan,
                (
                    f"no registered contract serves {name}; write a kernel for it "
                    f"(sites: {', '.join(_sites(found, name)[:3])})"
                ),
                True,
            )
        refused = _refused(contract)
        if refused:
            return plan, f"{name}: {refused}", True
        rules[name] = contract
    action = ", ".join(f"{name} -> {rules[name]}" for name in classes)
    return Plan(name=f"{model.spec}-step", rules=rules), action, False


def _refused(contract: str) -> str | None:
    """Why no implementation of a contract may serve here, or None when one may."""
    if not implementations(contract):
        return None  # the definition itself serves
    if dispatch.choose(contract).name == "reference":
        return f"no implementation of {contract} is proved here; see `zm kernels certify`"
    return None


def _sites(found: Divergence, op_class: str) -> list[str]:
    return [culprit.site for culprit in found.culprits if culprit.op_class == op_class]


def _step(left: str, right: str, plan: Plan, found: Divergence, action: str) -> Step:
    return Step(
        left=left,
        right=right,
        plan=plan.name,
        status=found.status,
        found=found.reason,
        groups=found.groups,
        action=action,
    )
