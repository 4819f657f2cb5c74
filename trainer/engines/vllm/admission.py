"""What a recipe does not cover in an engine's settings: all of it, in one list, at the start.

Each rule is a sentence about a ``VllmConfig``. Nothing is switched off in silence and nothing is
left for later: an engine that starts is one in which every claim of the recipe is meant.
"""

import os
from collections.abc import Iterator
from typing import Any

from ....kernels.errors import CapabilityError
from ....model_recipes.bindings import device_kind, dtype_name
from .adoption import Adopted
from .compat import PLAIN_CACHES, device_of

_PARALLEL = (
    ("tensor_parallel_size", "tensor parallelism"),
    ("pipeline_parallel_size", "pipeline parallelism"),
    ("data_parallel_size", "data parallelism inside one engine"),
    ("decode_context_parallel_size", "context parallelism in decode"),
    ("prefill_context_parallel_size", "context parallelism in prefill"),
)


def violations(config: Any, adopted: Adopted) -> list[str]:
    """Every setting of an engine that its recipe does not cover, as sentences."""
    return [*_layout(config), *_numbers(config), *_recipe(config, adopted)]


def require_covered(found: list[str]) -> None:
    """Raise CapabilityError with the whole list, if there is one."""
    if found:
        lines = "".join(f"\n- {each}" for each in found)
        raise CapabilityError(
            f"{len(found)} thing(s) that the recipe does not cover:{lines}\n"
            "change these settings, or start the engine without the recipe"
        )


def _layout(config: Any) -> Iterator[str]:
    parallel = config.parallel_config
    for field, name in _PARALLEL:
        size = getattr(parallel, field, 1) or 1
        if size != 1:
            yield f"{name} of {size}: only 1 is claimed"
    if getattr(parallel, "enable_expert_parallel", False):
        yield "expert parallelism: no layout over several ranks is claimed"
    if getattr(config, "kv_transfer_config", None) is not None:
        yield "a KV connector: caches from elsewhere are not claimed"
    if config.speculative_config is not None:
        yield f"speculative decoding ({config.speculative_config.method}): not claimed"
    if config.lora_config is not None:
        yield "LoRA: adapters are not claimed; merge them into the weights"


def _numbers(config: Any) -> Iterator[str]:
    model, cache = config.model_config, config.cache_config
    if config.quant_config is not None:
        yield f"quantised weights ({type(config.quant_config).__name__}): not claimed"
    if cache.cache_dtype not in PLAIN_CACHES:
        yield f"a KV cache of {cache.cache_dtype}: keys and values keep the model's dtype"
    if model.logprobs_mode != "raw_logprobs":
        yield f"logprobs_mode {model.logprobs_mode}: recipes are about raw_logprobs"
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        yield "VLLM_BATCH_INVARIANT: without effect on what a recipe puts in place of vLLM's layers"
    if getattr(cache, "calculate_kv_scales", False):
        yield "scales of keys and values that depend on the first batch"


def _recipe(config: Any, adopted: Adopted) -> Iterator[str]:
    model, recipe = config.model_config, adopted.recipe
    if adopted.plan.is_stock:
        yield "the stock plan: it changes nothing; start the engine without a recipe instead"
    if recipe is None:
        return
    have = dtype_name(model.dtype), device_kind(device_of(config))
    for what, wanted, here in zip(
        ("dtype", "device"), (recipe.dtype, recipe.device), have, strict=True
    ):
        if wanted != here:
            yield f"{what} {here}: the recipe is for {wanted}"
    model_type = model.hf_config.model_type
    if model_type != recipe.model.model_type:
        yield f"a {model_type} model: the recipe is for {recipe.model.model_type}"
