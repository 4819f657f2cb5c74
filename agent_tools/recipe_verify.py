"""Repeat every claim of a recipe: the same prompts, the same plan, and then the same bits?

    found = verify_recipe(Path("model_recipes/tiny/qwen3"))
    found.status, found.claims[0].verdict, found.changes

The recorded command says which model, prompts and seed; the plan is the recipe's. Verdict, counts
and digest of each claim must come out as recorded: an edited number shows as a claim that does not
repeat. What can be told without running is told first: evidence whose environment digest is not
that of the recorded versions, a plan digest that is not the plan's, no evidence at all, another
model. Another environment alone is no failure; it is listed. Command: ``zm recipe verify DIR``.
"""

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ..kernels.errors import RecipeError
from ..model_recipes.apply import find_sites
from ..model_recipes.models import LoadedModel, load_model
from ..model_recipes.plan import load_own_kernels, plan_from
from ..model_recipes.schema import Evidence, Recipe, load_recipe
from .proof import ProvenClaim, prove
from .recipe import environment_digest, environment_of
from .records import Record

Progress = Callable[[str], None]
VALUED = ("--rollout", "--dtype", "--device", "--seed", "--prompts", "--out", "--agent", "--plan")


class Figures(Record):
    """What a claim came to."""

    verdict: str
    compared: int
    differing: int
    digest: str


class ClaimCheck(Record):
    """One claim, as recorded and as it came out now.

    ``verdict``: repeats, differs (something came out otherwise), absent (nobody proved it now).
    """

    claim: str
    verdict: Literal["repeats", "differs", "absent"]
    recorded: Figures
    now: Figures
    detail: str = ""


class Verification(Record):
    """What ``zm recipe verify`` answers."""

    schema_version: Literal[1] = 1
    kind: Literal["verification"] = "verification"
    status: Literal["pass", "fail", "inconclusive"]
    reason: str
    recipe: str
    model: str
    command: str
    claims: tuple[ClaimCheck, ...]
    changes: tuple[str, ...] = ()
    """How this environment differs from the recorded one."""
    seconds: float

    @property
    def exit_code(self) -> int:
        """0 every claim repeats, 1 one does not, 3 they repeat and prove nothing."""
        return {"pass": 0, "fail": 1, "inconclusive": 3}[self.status]


class RecordedCommand(Record):
    """The arguments of ``zm align`` that decide what a claim is about."""

    model: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    seed: int = 0
    quick: bool = False
    prompts: Path | None = None
    rollout: str = "paged"


def verify_recipe(path: Path, *, progress: Progress = lambda stage: None) -> Verification:
    """Load, check, run again, compare. RecipeError where the recipe contradicts itself."""
    began = time.perf_counter()
    recipe = load_recipe(path)
    check_itself(recipe, path)
    command = recorded_command(recipe.evidence[0].command, path)
    progress(f"loading {command.model}")
    model = _load(command)
    load_own_kernels(path, judging=True)  # a person reads this before ticking
    sites = find_sites(model.module)
    plan = plan_from(recipe, sites, model.dtype, model.device, model.identity)
    environment = environment_of(model, plan)
    proven = _prove(model, recipe, command, progress)
    claims = tuple(_check(entry, proven.get(entry.claim)) for entry in recipe.evidence)
    status, reason = _conclude(claims, recipe)
    names = sorted(environment.keys() | recipe.versions.keys())
    return Verification(
        status=status, reason=reason, recipe=recipe.name, model=model.spec,
        command=recipe.evidence[0].command, claims=claims,
        changes=tuple(
            f"{name}: the recipe's {recipe.versions.get(name, 'absent')}, here "
            f"{environment.get(name, 'absent')}"
            for name in names
            if environment.get(name) != recipe.versions.get(name)
        ),
        seconds=time.perf_counter() - began,
    )  # fmt: skip


def check_itself(recipe: Recipe, path: Path) -> None:
    """RecipeError where a recipe contradicts itself, or proves nothing."""
    if not recipe.evidence:
        raise RecipeError(f"{path} holds no evidence, so there is nothing to repeat; align again")
    own = environment_digest(recipe.versions)
    for entry in recipe.evidence:
        if entry.environment_digest != own:
            raise RecipeError(
                f"{path}: the evidence for {entry.claim!r} was produced in environment "
                f"{entry.environment_digest}, the recorded versions have {own}: one of them was "
                "edited; restore the recipe or align again"
            )
    if recipe.versions.get("plan") != recipe.plan.digest:
        raise RecipeError(
            f"{path}: the plan has digest {recipe.plan.digest}, the evidence was produced under "
            f"{recipe.versions.get('plan')}; restore the plan or align again"
        )
    if len({entry.command for entry in recipe.evidence}) > 1:
        raise RecipeError(
            f"{path}: its claims were produced by different commands; align again to have them all "
            "from one run"
        )


def recorded_command(text: str, path: Path) -> RecordedCommand:
    """Read ``zm align MODEL [options]``; RecipeError where that is not what was recorded."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise RecipeError(f"{path}: its command {text!r} cannot be read ({error})") from error
    if words[:2] != ["zm", "align"] or len(words) < 3:
        raise RecipeError(
            f"{path}: its evidence comes from {text!r}, only `zm align MODEL ...` can be repeated "
            "here; run that command yourself"
        )
    values: dict[str, str] = {}
    rest = iter(words[3:])
    for word in rest:
        values[word] = next(rest, "") if word in VALUED else "yes"
    unknown = sorted(values.keys() - {*VALUED, "--quick", "--json"})
    if unknown:
        raise RecipeError(f"{path}: its command has {unknown[0]}, which this zm does not know")
    prompts = values.get("--prompts")
    return RecordedCommand.model_validate({
        "model": words[2],
        "dtype": values.get("--dtype", "float32"),
        "device": values.get("--device", "cpu"),
        "seed": int(values.get("--seed", "0")),
        "quick": "--quick" in values,
        "prompts": None if prompts is None else Path(prompts),
        "rollout": values.get("--rollout", "paged"),
    })  # fmt: skip


def _load(command: RecordedCommand) -> LoadedModel:
    return load_model(command.model, dtype=command.dtype, device=command.device, seed=command.seed)


def _prove(
    model: LoadedModel, recipe: Recipe, command: RecordedCommand, progress: Progress
) -> dict[str, ProvenClaim]:
    from .align import only_prompt
    from .commands.measure import requests_for  # the counts behind --quick live with the command

    requests = requests_for(model, prompts=command.prompts, seed=command.seed, quick=command.quick)
    prompts = [only_prompt(request) for request in requests]
    proof = prove(
        model, recipe.plan, prompts, pristine=_load(command), rollout=command.rollout,
        progress=progress,
    )  # fmt: skip
    return {entry.claim.name: entry for entry in proof.claims}


def _check(entry: Evidence, proven: ProvenClaim | None) -> ClaimCheck:
    recorded = Figures(
        verdict=entry.verdict, compared=entry.compared_tokens, differing=entry.differing_tokens,
        digest=entry.digest,
    )  # fmt: skip
    if proven is None:
        nothing = Figures(verdict="absent", compared=0, differing=0, digest="")
        detail = "this zm proves no such claim"
        return ClaimCheck(
            claim=entry.claim, verdict="absent", recorded=recorded, now=nothing, detail=detail
        )
    now = Figures(
        verdict=proven.claim.status, compared=proven.claim.compared,
        differing=proven.claim.differing, digest=proven.digest,
    )  # fmt: skip
    odd = [
        f"{name} was {getattr(recorded, name)}, is {getattr(now, name)}"
        for name in ("verdict", "compared", "differing", "digest")
        if getattr(recorded, name) != getattr(now, name)
    ]
    return ClaimCheck(
        claim=entry.claim, verdict="differs" if odd else "repeats", recorded=recorded, now=now,
        detail="; ".join(odd),
    )  # fmt: skip


def _conclude(
    claims: tuple[ClaimCheck, ...], recipe: Recipe
) -> tuple[Literal["pass", "fail", "inconclusive"], str]:
    broken = [entry for entry in claims if entry.verdict != "repeats"]
    if broken:
        first = broken[0]
        return "fail", (
            f"{len(broken)} of {len(claims)} claims do not repeat; first {first.claim!r}: "
            f"{first.detail}. Next: align again and compare the two recipes"
        )
    weak = [entry for entry in claims if entry.recorded.verdict != "pass"]
    if weak:
        return "inconclusive", (
            f"every claim repeats, but {weak[0].claim!r} is {weak[0].recorded.verdict}: the recipe "
            "proves less than it should; align again with longer prompts"
        )
    tokens = sum(entry.now.compared for entry in claims)
    return "pass", f"all {len(claims)} claims of {recipe.name} repeat, {tokens} comparisons"
