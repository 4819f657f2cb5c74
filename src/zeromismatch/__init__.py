"""zero-mismatch: make a rollout engine and a trainer compute the same bits.

The import is light on purpose: neither torch nor vLLM is loaded until a function needs it.
Real code lives in the top-level folders (``kernels``, ``model_recipes``, ``trainer``,
``agent_tools``), which this package links to; layers import only downwards in that order.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zeromismatch.model_recipes.apply import apply as apply
    from zeromismatch.trainer.engines.vllm.adoption import rollouts as rollouts

__all__ = ["__version__", "apply", "rollouts"]


def __getattr__(name: str) -> Any:
    """Load ``apply(model, recipe)`` and ``rollouts(recipe)`` on first use: a light import."""
    if name == "apply":
        from zeromismatch.model_recipes.apply import apply

        return apply
    if name == "rollouts":
        from zeromismatch.trainer.engines.vllm.adoption import rollouts

        return rollouts
    raise AttributeError(f"module 'zeromismatch' has no attribute {name!r}")
