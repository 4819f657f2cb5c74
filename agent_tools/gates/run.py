"""Run the gates, all of them, and say what each verdict counts for.

    report = run_gates(load_model("tiny:llama"), "aligned", quick=True)
    report.status, [(gate.id, gate.status) for gate in report.gates]

No gate stops another: one that cannot run to its end is inconclusive and says why. After the first
red gate the later ones keep their own result and count as not attributable. Large models take two
processes (``apart.py``). ``zm gate`` is this function; :func:`rerun` is ``zm regress``.
"""

import datetime
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Literal, cast

import torch

from ...kernels.attention import PAGE
from ...kernels.errors import (
    CapabilityError,
    MisalignedError,
    UsageError,
    ZeroMismatchError,
)
from ...model_recipes.apply import find_sites
from ...model_recipes.bindings import dtype_name
from ...model_recipes.models import LoadedModel, load_model
from ...model_recipes.plan import STOCK, Plan, load_own_kernels, plan_from
from ...model_recipes.recurrent import recurrent_chunks
from ...trainer.engines.base import Request as Prompt
from ...trainer.engines.vllm.compat import require as require_vllm
from ..align import only_prompt
from ..recipe import environment_digest, environment_of
from ..records import Record
from ..scenarios import default_requests
from . import cost, environment, gradient, inference, lifecycle, operators, scale, training
from .apart import APART, apart
from .base import (
    Findings,
    Gate,
    GateReport,
    GateResult,
    Request,
    Verdict,
    attribute,
    changes,
    conclude,
    judge,
    seal,
    verify,
)
from .bench import FULL, QUICK, Bench, Size, copy_of, requests_digest
from .budget import fitted, row_operations
from .vllm import VllmBench, gates_for_vllm

GATES: tuple[Gate, ...] = (
    environment.GATE,
    operators.GATE,
    inference.REPEAT,
    inference.BATCH,
    inference.PHASE,
    training.GATE,
    gradient.GATE,
    lifecycle.UPDATE,
    lifecycle.PERSISTENCE,
    scale.GATE,
    cost.GATE,
)
ROLLOUTS = ("paged", "vllm")

Progress = Callable[[str], None]


class Regression(Record):
    """A report and its repetition. ``lost``: gates that were green and no longer are."""

    schema_version: Literal[1] = 1
    kind: Literal["regression"] = "regression"
    status: Literal["pass", "fail", "inconclusive"]
    reason: str
    lost: tuple[str, ...]
    won: tuple[str, ...]
    """Gates that were not green and now are."""
    changes: tuple[str, ...]
    """What else differs from when the report was made: versions, threads."""
    before: dict[str, Verdict]
    after: dict[str, Verdict]
    report: GateReport

    @property
    def exit_code(self) -> int:
        """0 all green gates stayed green, 1 one turned red, 3 one is inconclusive now."""
        return {"pass": 0, "fail": 1, "inconclusive": 3}[self.status]


def run_gates(
    model: LoadedModel,
    plan: str | Path | Plan,
    *,
    rollout: str = "paged",
    only: Sequence[str] | None = None,
    quick: bool = False,
    seed: int = 0,
    prompts: Path | None = None,
    size: Size | None = None,
    gates: Sequence[Gate] = GATES,
    progress: Progress = lambda stage: None,
    pool: ProcessPoolExecutor | None = None,
) -> GateReport:
    """Run the gates of ``plan`` on ``model``; ``only``: their ids. prompts: a file, else ours.

    pool: a second process that loads the model (``second_process.py``), should it be large.
    """
    if rollout not in ROLLOUTS:
        known = " or ".join(ROLLOUTS)
        raise CapabilityError(f"rollout engine {rollout!r} is not there; use {known}")
    on_vllm = rollout == "vllm"
    if on_vllm:
        require_vllm()
    chosen = _choose(gates_for_vllm(gates) if on_vllm else gates, only)
    share = 1.0
    if size is None:
        chunk = max(recurrent_chunks(model.module), default=PAGE)
        size, share = fitted(QUICK if quick else FULL, row_operations(model), chunk)
    untouched = copy_of(model)  # looking for sites applies a plan
    load_own_kernels(plan)
    resolved = plan if isinstance(plan, Plan) else plan_from(
        plan, find_sites(model.module), model.dtype, model.device, model.identity
    )  # fmt: skip
    bench = (VllmBench if on_vllm else Bench)(
        model=model,
        plan=resolved,
        prompts=tuple(prompts_for(model, size, seed, prompts)),
        size=size,
        quick=quick,
        seed=seed,
        progress=progress,
        untouched=untouched,
    )
    asked = Request(
        model=model.spec,
        dtype=cast(Literal["float32", "bfloat16"], dtype_name(model.dtype)),
        device=str(model.device),
        seed=seed,
        rollout=rollout,
        gates=tuple(gate.id for gate in chosen),
        quick=quick,
        prompts=None if prompts is None else str(prompts),
        recipe=_recipe_of(plan),
    )
    began = time.perf_counter()
    large = share < 1.0 and gates is GATES and not on_vllm and not isinstance(plan, Plan)
    try:
        if large and torch.get_num_threads() > 1:
            results = _in_two(chosen, bench, asked, pool)
        else:
            results = [run_gate(gate, bench) for gate in chosen]
    finally:
        bench.release()
    return _report(bench, asked, results, share, time.perf_counter() - began)


def _in_two(
    chosen: Sequence[Gate], bench: Bench, asked: Request, pool: ProcessPoolExecutor | None
) -> list[GateResult]:
    """About half of the gates in a process of their own; C10, which takes the time, afterwards."""
    there = [gate.id for gate in chosen if gate.id in APART]
    threads = torch.get_num_threads()
    results: dict[str, GateResult] = {}
    with apart(asked, bench.plan, bench.size, there, prompts=requests_digest(bench.prompts),
               threads=threads // 2, pool=pool) as other:  # fmt: skip
        bench.progress(f"{', '.join(there)} run in a second process")
        torch.set_num_threads(threads - threads // 2)
        try:
            here = [gate for gate in chosen if gate.id not in (*APART, cost.GATE.id)]
            results |= {gate.id: run_gate(gate, bench) for gate in here}
        finally:
            torch.set_num_threads(threads)
        results |= {found.id: found for found in other.results()}
    last = [gate for gate in chosen if gate.id == cost.GATE.id]
    results |= {gate.id: run_gate(gate, bench) for gate in last}
    return [results[gate.id] for gate in chosen]


def _recipe_of(plan: str | Path | Plan) -> str | None:
    named = not isinstance(plan, Plan) and str(plan) not in (STOCK, "aligned")
    return str(plan) if named else None


def prompts_for(model: LoadedModel, size: Size, seed: int, file: Path | None) -> list[Prompt]:
    """A file's prompts or ours, each to be sampled for ``size.reply`` tokens."""
    found = default_requests(
        model, count=size.requests, max_reply=size.reply, seed=seed, prompts=file
    )
    return [only_prompt(request) for request in found]


def _choose(gates: Sequence[Gate], only: Sequence[str] | None) -> list[Gate]:
    known = [gate.id for gate in gates]
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise UsageError(f"no gate is called {unknown[0]!r}; the gates are {', '.join(known)}")
    return [gate for gate in gates if only is None or gate.id in only]


def run_gate(gate: Gate, bench: Bench) -> GateResult:
    """One gate's own result; its status is not yet attributed."""
    bench.progress(f"{gate.id} {gate.title}")
    found, began = Findings(), time.perf_counter()
    try:
        gate.check(bench, found)
    except (ZeroMismatchError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        found.error = f"{type(error).__name__}: {error}"
        if not isinstance(error, ZeroMismatchError):  # an engine broke: say where
            where = traceback.extract_tb(error.__traceback__)[-1]
            found.error += f" ({Path(where.filename).name}:{where.lineno})"
    result, reason = judge(found)
    bench.progress(f"{gate.id} {result}: {reason}")
    return GateResult(
        id=gate.id,
        title=gate.title,
        claim=gate.claim,
        status=result,
        result=result,
        reason=reason,
        compared=sum(part.compared for part in found.parts),
        differing=sum(part.differing for part in found.parts),
        parts=tuple(found.parts),
        preconditions=tuple(found.preconditions),
        controls=tuple(found.controls),
        culprits=tuple(found.culprits),
        not_applicable=tuple(found.not_applicable),
        notes=tuple(found.notes),
        error=found.error,
        divergence=found.divergence,
        heat=found.heat,
        speeds=tuple(found.speeds),
        seconds=round(time.perf_counter() - began, 3),
    )


def _report(
    bench: Bench, asked: Request, results: Sequence[GateResult], share: float, seconds: float
) -> GateReport:
    statuses = attribute([gate.result for gate in results])
    gates = tuple(
        gate.model_copy(update={"status": status})
        for gate, status in zip(results, statuses, strict=True)
    )
    status, reason = conclude(gates)
    circumstances = circumstances_of(bench.model, bench.plan)
    return seal(
        GateReport(
            status=status,
            reason=reason,
            failed=tuple(gate.id for gate in gates if gate.result == "fail"),
            request=asked,
            identity=bench.model.identity,
            plan=bench.plan,
            plan_digest=bench.plan.digest,
            environment=circumstances,
            environment_digest=environment_digest(circumstances),
            requests_digest=requests_digest(bench.prompts),
            size=asdict(bench.size),
            share=share,
            gates=gates,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            seconds=round(seconds, 3),
        )
    )


def circumstances_of(model: LoadedModel, plan: Plan) -> dict[str, str]:
    """Versions, processor, threads, dtype, plan: what may change a bit."""
    return environment_of(model, plan) | {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def read_gates(path: Path) -> GateReport:
    """A stored report; UsageError when it is none, or was edited."""
    from pydantic import ValidationError

    file = path / "gates.json" if path.is_dir() else path
    try:
        report = GateReport.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}; give a gate report") from error
    except (ValidationError, UnicodeDecodeError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise UsageError(f"{file} is no gate report ({first}); make one: `zm gate`") from error
    faults = verify(report)
    if faults:
        raise UsageError(
            f"{file} was edited: {'; '.join(faults[:3])}; run `zm gate` again to get a report"
        )
    return report


def rerun(report: GateReport, *, progress: Progress = lambda stage: None) -> Regression:
    """The same gates on the same weights, now; green ones must stay green.

    The plan is the report's; where it came from a recipe, the recipe as it is now.
    """
    asked = report.request
    progress(f"loading {asked.model}")
    model = load_model(asked.model, dtype=asked.dtype, device=asked.device, seed=asked.seed)
    moved = changes(report, model.identity, circumstances_of(model, report.plan))
    foreign = [entry for entry in moved if entry.startswith(("weights", "config", "model type"))]
    if foreign:
        raise MisalignedError(
            f"the report is about another model ({'; '.join(foreign)}); run `zm gate` on this one"
        )
    again = run_gates(
        model, Path(asked.recipe) if asked.recipe else report.plan, rollout=asked.rollout,
        only=asked.gates, quick=asked.quick, seed=asked.seed,
        prompts=Path(asked.prompts) if asked.prompts else None,
        size=Size(**report.size) if report.size else None, progress=progress,
    )  # fmt: skip
    if again.requests_digest != report.requests_digest:
        raise MisalignedError(
            "the prompts are not the ones of the report; restore the file, or run `zm gate` again"
        )
    if again.plan_digest != report.plan_digest:
        moved = [*moved, f"plan: {asked.recipe} has other rules now"]
    return compare(report, again, moved)


def compare(report: GateReport, again: GateReport, moved: Sequence[str]) -> Regression:
    """Two reports about the same thing, gate by gate, by their own results."""
    before: dict[str, Verdict] = {gate.id: gate.result for gate in report.gates}
    after: dict[str, Verdict] = {gate.id: gate.result for gate in again.gates}
    lost = tuple(name for name, verdict in before.items() if verdict == "pass" != after[name])
    won = tuple(name for name, verdict in after.items() if verdict == "pass" != before[name])
    red = [name for name in lost if after[name] == "fail"]
    status: Literal["pass", "fail", "inconclusive"] = (
        "fail" if red else "inconclusive" if lost else "pass"
    )
    reason = f"{len(before)} gates again, every green one stayed green."
    if lost:
        first = next(gate for gate in again.gates if gate.id == lost[0])
        reason = f"{', '.join(lost)} no longer passed; {first.id}: {first.reason}."
    elif "pass" not in before.values() and won:
        reason = f"no gate was green before, {', '.join(won)} now."
    elif "pass" not in before.values():
        status, reason = "inconclusive", "no gate of the report was green; run `zm gate` again."
    return Regression(
        status=status, reason=reason, lost=lost, won=won, changes=tuple(moved),
        before=before, after=after, report=again,
    )  # fmt: skip
