"""The whole job: from a model to a recipe with evidence.

    baseline: stock kernels, red, every culprit named
    autopilot: contracts for the culprits, probe by probe, until every probe is equal
    proof: sampled rollout = packed trainer = scored again, and the error against fp64
    recipe folder, traces of the baseline, one HTML report

    model = load_model("smollm2-135m")
    result = align(model, default_requests(model), Options(out=Path("runs/demo"), command="..."))

``zm align MODEL`` and ``make demo`` are this function; it leaves one folder and nothing else.
"""

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..kernels.errors import UsageError
from ..model_recipes.models import LoadedModel, load_model
from ..model_recipes.schema import Recipe
from ..trainer.engines.base import Request
from .drivers.autopilot import Outcome, Step, fly
from .heat import stored_heat_map
from .localize import Options as LocalizeOptions
from .localize import localize
from .proof import Proof, prove
from .recipe import environment_of, write_recipe
from .records import Divergence, Record, Status
from .report import Claim, Command, Comparison, ReportData, Speed, write_report
from .sides import Side

BASELINE = ("transformers:decode", "transformers:alone")
PROBE_REQUESTS = 4
PROBE_REPLY = 12

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """out: the run's folder; it must be empty or absent. command: what repeats this run."""

    out: Path
    command: str
    rollout: str = "paged"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    seed: int = 0
    progress: Progress = field(default=lambda stage: None)


class AlignResult(Record):
    """What ``zm align`` answers. ``status`` is EQUAL when every claim passed."""

    schema_version: Literal[1] = 1
    kind: Literal["align"] = "align"
    status: Status
    reason: str
    model: str
    folder: str
    recipe: str | None
    report: str
    baseline: Divergence
    steps: tuple[Step, ...]
    claims: tuple[Claim, ...] = ()
    seconds: float

    @property
    def exit_code(self) -> int:
        """0 aligned, 1 stuck or a claim failed, 3 inconclusive."""
        return {"EQUAL": 0, "DIVERGENT": 1, "MISALIGNED": 3, "INCONCLUSIVE": 3}[self.status]


def align(model: LoadedModel, requests: Sequence[Request], options: Options) -> AlignResult:
    """Align ``model`` on ``requests``: prompts, with replies for the probes; the proof samples."""
    began = time.perf_counter()
    _check_folder(options.out)
    probes = shorten(requests)
    options.progress(f"baseline: {BASELINE[0]} against {BASELINE[1]}, stock kernels")
    baseline = localize(
        Side.parse(BASELINE[0]),
        Side.parse(BASELINE[1]),
        model,
        probes,
        options=LocalizeOptions(progress=options.progress, out=options.out / "baseline"),
    )
    outcome = fly(model, probes, progress=options.progress)
    proof: Proof | None = None
    recipe: Recipe | None = None
    if outcome.stuck is None:
        pristine = load_model(
            model.spec, dtype=options.dtype, device=options.device, seed=options.seed
        )
        prompts = [only_prompt(request) for request in requests]
        proof = prove(
            model, outcome.plan, prompts, pristine=pristine, rollout=options.rollout,
            progress=options.progress,
        )  # fmt: skip
        recipe = write_recipe(
            options.out / "recipe",
            model,
            outcome.plan,
            proof,
            (_baseline_step(baseline), *outcome.steps),
            command=options.command,
            rollout=options.rollout,
        )
    status, reason = _verdict(outcome, proof)
    page = write_report(
        options.out / "report.html",
        _report(model, options, baseline, outcome, proof, status, reason),
    )
    return AlignResult(
        status=status,
        reason=reason,
        model=model.spec,
        folder=str(options.out),
        recipe=str(options.out / "recipe") if recipe else None,
        report=str(page),
        baseline=baseline,
        steps=outcome.steps,
        claims=tuple(entry.claim for entry in proof.claims) if proof else (),
        seconds=time.perf_counter() - began,
    )


def _baseline_step(found: Divergence) -> Step:
    """The baseline as a first step of the notes: it is where causes were looked for."""
    return Step(
        left=found.left.side,
        right=found.right.side,
        plan="stock",
        status=found.status,
        found=found.reason,
        groups=found.groups,
        action="the baseline, stock kernels: next, from an engine against itself to the trainer",
    )


def only_prompt(request: Request) -> Request:
    """The request without its reply, ready to be sampled; its seed and budget stay."""
    if True not in request.sampled_mask:
        return request
    start = request.sampled_mask.index(True)
    return replace(request, tokens=request.tokens[:start], sampled_mask=(), turns=())


def shorten(
    requests: Sequence[Request], count: int = PROBE_REQUESTS, reply: int = PROBE_REPLY
) -> tuple[Request, ...]:
    """A few of the requests with short replies: enough to name every culprit, cheap to repeat.

    Requests without a reply keep their prompt, whose second half then counts as decoded.
    """
    chosen = sorted(requests, key=lambda request: -len(request.tokens))[:count]
    return tuple(_cut(request, reply) for request in chosen)


def _cut(request: Request, reply: int) -> Request:
    if True not in request.sampled_mask:
        return request
    stop = request.sampled_mask.index(True) + reply
    return replace(
        request,
        tokens=request.tokens[:stop],
        sampled_mask=request.sampled_mask[:stop],
        turns=tuple((start, min(end, stop)) for start, end in request.turns if start < stop),
    )


def _check_folder(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is not an empty folder; choose another --out or remove it")


def _verdict(outcome: Outcome, proof: Proof | None) -> tuple[Status, str]:
    if outcome.stuck is not None:
        last = outcome.steps[-1]
        inconclusive = last.status in ("MISALIGNED", "INCONCLUSIVE")
        return (
            "INCONCLUSIVE" if inconclusive else "DIVERGENT",
            f"The autopilot is stuck at {last.left} against {last.right}: {outcome.stuck}.",
        )
    assert proof is not None
    statuses = {entry.claim.status for entry in proof.claims}
    if statuses == {"pass"}:
        first = proof.claims[0].claim
        return "EQUAL", (
            f"Aligned: {first.compared} sampled tokens, every bit equal in rollout and trainer, "
            "and scored again. Next: review recipe/README.md."
        )
    failed = next(entry.claim for entry in proof.claims if entry.claim.status != "pass")
    status: Status = "DIVERGENT" if "fail" in statuses else "INCONCLUSIVE"
    return status, (
        f"Not proven: {failed.name} ({failed.differing} of {failed.compared}; {failed.detail}). "
        "Next: `zm localize` the two sides of that claim."
    )


def _report(
    model: LoadedModel,
    options: Options,
    baseline: Divergence,
    outcome: Outcome,
    proof: Proof | None,
    status: Status,
    reason: str,
) -> ReportData:
    stock_speed = proof.rates.get("packed tokens/s, stock") if proof else None
    comparisons = [
        Comparison(
            title=f"Baseline: {BASELINE[0]} against {BASELINE[1]}",
            note="Stock kernels: the same model, the same weights, the same tokens.",
            divergence=baseline,
            heat=stored_heat_map(options.out / "baseline"),
        )
    ]
    comparisons += [
        Comparison(
            title=f"{found.left.side} against {found.right.side}",
            note=step.action,
            divergence=found,
        )
        for step, found in zip(outcome.steps, outcome.divergences, strict=False)
    ]
    first = proof.claims[0].claim if proof else None
    return ReportData(
        title=f"{model.spec}: from red to green",
        verdict=status,
        headline=reason,
        model=model.spec,
        plan=outcome.plan.name,
        dtype=options.dtype,
        compared=first.compared if first else 0,
        differing=first.differing if first else 0,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        comparisons=tuple(comparisons),
        claims=tuple(entry.claim for entry in proof.claims) if proof else (),
        speeds=tuple(
            Speed(
                name=name.removesuffix(" tokens/s"),
                value=value,
                unit="tokens/s",
                relative=value / stock_speed if stock_speed and name == "packed tokens/s" else None,
                against="stock kernels" if name == "packed tokens/s" else "",
            )
            for name, value in (proof.rates if proof else {}).items()
        ),
        digests={"weights": model.weights_root, "plan": outcome.plan.digest}
        | ({entry.claim.name: entry.digest for entry in proof.claims} if proof else {}),
        environment=environment_of(model, outcome.plan),
        commands=(Command(label="repeat all of it", command=options.command),),
        notes=(
            "The claims listed here are what was shown, and no more; gates C0-C10 are not part of "
            "this run.",
        ),
    )
