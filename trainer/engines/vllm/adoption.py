"""What a vLLM engine was told: the recipe or plan in ``additional_config``, or nothing.

    LLM(model, additional_config={"zero_mismatch": "recipes/my-model"})
    LLM(model, additional_config={"zero_mismatch": {"plan": plan.model_dump()}})

``additional_config`` reaches every worker process, and vLLM hashes it into the key of its compile
cache. Nothing here imports vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ....kernels.errors import RecipeError
from ....model_recipes.plan import Plan
from ....model_recipes.schema import Recipe, load_recipe

KEY = "zero_mismatch"
SLOT = "zero_mismatch"
"""Attribute of a live model with a plan: what it adopted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A plan to apply, and the recipe that it comes from, if there is one."""

    plan: Plan
    recipe: Recipe | None = None


def adoption(plan: Plan | Recipe | str) -> dict[str, Any]:
    """What to hand to vLLM as ``additional_config``: a path, or a plan in full."""
    if isinstance(plan, str):
        return {KEY: plan}
    return {KEY: {"plan": (plan.plan if isinstance(plan, Recipe) else plan).model_dump()}}


def adopted(additional_config: Any) -> Adopted | None:
    """The plan that an engine's ``additional_config`` asks for; None where it asks for none."""
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    value = cast(Mapping[str, Any], additional_config)[KEY]
    if isinstance(value, str):
        recipe = load_recipe(value)
        if recipe.kernels:
            raise RecipeError(
                f"recipe {recipe.name} brings its own kernels, which the vLLM plug-in does not "
                "load; use a recipe whose contracts this version serves"
            )
        return Adopted(plan=recipe.plan, recipe=recipe)
    if isinstance(value, Mapping) and set(cast(Mapping[str, Any], value)) == {"plan"}:
        return Adopted(plan=Plan.model_validate(value["plan"]))
    raise RecipeError(
        f"additional_config[{KEY!r}] is {value!r}; give the path of a recipe, or "
        '{"plan": {...}}'
    )
