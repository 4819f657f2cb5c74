"""Writing a recipe folder: ``recipe.yaml``, the generated README.md, and NOTES.md.

    folder = write_recipe(Path("runs/7/recipe"), model, plan, proof, steps, command="zm align ...")

The recipe says only what was run: evidence with counts and digests, cost, what it does not cover.
The schema and its checks are in ``model_recipes/schema.py``; ``zm recipe show DIR`` prints one.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..model_recipes.apply import identify
from ..model_recipes.bindings import device_kind, dtype_name
from ..model_recipes.models import LoadedModel
from ..model_recipes.plan import Plan
from ..model_recipes.schema import Evidence, Recipe, save_recipe
from .doctor import versions
from .drivers.autopilot import Step
from .proof import Proof
from .report import write_whole

TEMPLATES = Path(__file__).parent / "templates"
NOT_COVERED = (
    "Gates C0-C10: not among the claims listed here; `zm gate` with this recipe runs them.",
    "Other devices, dtypes and models than the ones named; more than one process.",
    "LoRA; quantised weights or caches.",
    "Gradients, optimiser steps and weight publication.",
)
WITHOUT_VLLM = ("vLLM as rollout engine; CUDA graphs and torch.compile.",)


def write_recipe(
    folder: Path,
    model: LoadedModel,
    plan: Plan,
    proof: Proof,
    steps: Sequence[Step],
    *,
    command: str,
    rollout: str = "paged",
) -> Recipe:
    """Write the folder and return the recipe. Each file appears whole or not at all."""
    environment = environment_of(model, plan)
    not_covered = NOT_COVERED + (() if rollout == "vllm" else WITHOUT_VLLM)
    recipe = Recipe(
        name=f"{model.spec.replace(':', '-').replace('/', '-').strip('-')}-{plan.name}",
        model=identify(model.module, model.spec),
        plan=plan,
        dtype=cast(Any, dtype_name(model.dtype)),  # validated there
        device=device_kind(model.device),
        engines={rollout: {}, "packed": {}},
        versions=environment,
        evidence=tuple(
            Evidence(
                claim=entry.claim.name,
                command=command,
                verdict=entry.claim.status,
                compared_tokens=entry.claim.compared,
                differing_tokens=entry.claim.differing,
                digest=entry.digest,
                environment_digest=environment_digest(environment),
                seconds=entry.seconds,
            )
            for entry in proof.claims
        ),
        cost=proof.rates,
        not_covered=not_covered,
        precision=_precision(model, proof),
    )
    save_recipe(recipe, folder)
    render = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
    ).get_template
    write_whole(folder / "README.md", render("recipe_readme.md.j2").render(recipe=recipe))
    write_whole(
        folder / "NOTES.md", render("recipe_notes.md.j2").render(recipe=recipe, steps=steps)
    )
    return recipe


def environment_of(model: LoadedModel, plan: Plan) -> dict[str, str]:
    """Versions and settings that may change a bit, as text."""
    return dict(versions()) | {
        "dtype": dtype_name(model.dtype),
        "device": device_kind(model.device),
        "plan": plan.digest,
    }


def environment_digest(environment: dict[str, Any]) -> str:
    """One digest over an environment."""
    text = json.dumps(environment, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _precision(model: LoadedModel, proof: Proof) -> tuple[str, ...]:
    accuracy = proof.accuracy
    return (
        f"Weights and activations are {dtype_name(model.dtype)}; every sum is accumulated in fp32 "
        "in a fixed order, logits and logprobs are fp32.",
        "Rotary tables are computed in fp64 and rounded once to fp32; stock computes them in fp32.",
        "exp, log and division are the CPU core's own, named in each contract.",
        f"Mean error of a logprob against fp64: {accuracy.ours.mean:.2e}, stock's is "
        f"{accuracy.stock.mean:.2e}; largest {accuracy.ours.largest:.2e} against "
        f"{accuracy.stock.largest:.2e}.",
    )
