"""The vLLM plug-in (entry point ``vllm.general_plugins``): inert unless an engine names a recipe.

vLLM calls :func:`register` in every process that it starts. It registers, for each architecture
that a plan can cover, a subclass of vLLM's own model class (``ModelRegistry.register_model``). That
subclass does nothing but look into ``additional_config``: without a recipe the object becomes an
instance of vLLM's class again; with one, :mod:`.models` puts the plan on it, or refuses.

An architecture that is not registered here cannot be reached this way, so a recipe for one would
be ignored in silence; :func:`compat.guard_other_models` refuses that.
"""

from typing import Any

_LOADED: list[str] = []


def register() -> None:
    """Called by vLLM, once or more often per process."""
    from . import compat, models
    from .adoption import asks_plain, unplain

    if _LOADED:
        return
    _LOADED.extend(models.register_architectures())
    compat.guard_other_models(frozenset(_LOADED))

    def why(config: Any, parameters: Any) -> str | None:
        odd = unplain(parameters) if asks_plain(config.additional_config) else []
        if not odd:
            return None
        return (
            f"a request has {', '.join(odd)}: its trainer asks for processed logprobs, a recipe "
            "has them at temperature 1 from all tokens alone; sample so"
        )

    compat.guard_requests(why)


def loaded() -> tuple[str, ...]:
    """Architectures registered in this process; empty where the plug-in was not loaded."""
    return tuple(_LOADED)
