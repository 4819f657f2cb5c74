"""What a vLLM engine was told: the recipe or plan in ``additional_config``, or nothing.

    LLM(model, additional_config={"zero_mismatch": "recipes/my-model"})
    LLM(model, additional_config={"zero_mismatch": {"plan": plan.model_dump()}})

    with zeromismatch.rollouts("recipes/my-model"):     # for trainers that build their own engine
        trainer = GRPOTrainer(model, args=GRPOConfig(use_vllm=True, ...), ...)

``additional_config`` reaches every worker process, and vLLM hashes it into the key of its compile
cache. Nothing here imports vLLM before an engine is built.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ....kernels.errors import RecipeError
from ....model_recipes.plan import Plan
from ....model_recipes.schema import Recipe, load_recipe

KEY = "zero_mismatch"
RECIPE, PLAIN = "recipe", "plain_sampling"
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
    if isinstance(value, Mapping) and set(cast(Mapping[str, Any], value)) == {RECIPE, PLAIN}:
        value = cast(Any, value[RECIPE])
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


@contextmanager
def rollouts(recipe: str | Path) -> Generator[None]:
    """Engines that are built in the block, by whoever builds them, adopt a recipe.

    A trainer that asks for ``processed_logprobs`` gets ``raw_logprobs``, which are the same numbers
    at temperature 1 without filters and penalties; requests that ask for anything else are then
    refused. RecipeError where no engine was built, or one that names another recipe.
    """
    from . import compat

    folder = str(recipe)
    load_recipe(folder)
    compat.require()
    built = 0

    def adopt(arguments: Any) -> None:
        nonlocal built
        compat.require_plugin()
        told = dict(arguments.additional_config or {})
        value: Any = folder
        if arguments.logprobs_mode == "processed_logprobs":
            arguments.logprobs_mode = "raw_logprobs"
            value = {RECIPE: folder, PLAIN: True}
        if told.setdefault(KEY, value) != value:
            raise RecipeError(
                f"an engine in a block for {folder} names {told[KEY]!r}; name one of them"
            )
        arguments.additional_config = told
        built += 1

    with compat.engines_told(adopt):
        yield
    if not built:
        raise RecipeError(
            f"no vLLM engine was built in the block for {folder}, so nothing adopted it; build the "
            "trainer in the block, with its engine in this process (TRL: use_vllm=True, "
            'vllm_mode="colocate")'
        )


def asks_plain(additional_config: Any) -> bool:
    """Whether an engine's requests must sample at temperature 1 from the whole distribution."""
    if not isinstance(additional_config, Mapping):
        return False
    value = cast(Mapping[str, Any], additional_config).get(KEY)
    return isinstance(value, Mapping) and bool(cast(Mapping[str, Any], value).get(PLAIN))


_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
}


def unplain(parameters: Any) -> list[str]:
    """What of a request's sampling parameters changes the distribution, as ``name=value``."""
    given = {name: getattr(parameters, name, allowed[0]) for name, allowed in _PLAIN.items()}
    return [f"{name}={given[name]!r}" for name in given if given[name] not in _PLAIN[name]]
