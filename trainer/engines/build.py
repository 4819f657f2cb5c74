"""From an engine's name to an engine.

    make_engine("paged", load_model("smollm2-135m"), "aligned", num_pages=64)

One loaded model carries one plan at a time: ``close()`` an engine before building the next on the
same model, or hand over its ``instrument``.
"""

import inspect
from pathlib import Path
from typing import Any

from ...kernels.errors import UsageError
from ...model_recipes.apply import find_sites
from ...model_recipes.models import LoadedModel
from ...model_recipes.plan import Plan, load_own_kernels, plan_from
from ...model_recipes.schema import Recipe
from .packed import PackedEngine
from .paged import PagedEngine
from .transformers import TransformersEngine
from .vllm.engine import VllmEngine

AnyEngine = TransformersEngine | PackedEngine | PagedEngine | VllmEngine

ENGINES = {
    engine.name: engine for engine in (TransformersEngine, PackedEngine, PagedEngine, VllmEngine)
}


def make_engine(
    name: str, loaded: LoadedModel, plan: Plan | Recipe | str | Path, **settings: Any
) -> AnyEngine:
    """Build an engine around a loaded model.

    plan: a plan, a recipe, ``stock``, ``aligned``, or a recipe folder or file. settings: the
    engine's own keyword arguments; an unknown one is an error.
    """
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}; use one of {', '.join(ENGINES)}")
    engine = ENGINES[name]
    allowed = [*inspect.signature(engine).parameters][2:]
    unknown = sorted(set(settings) - set(allowed))
    if unknown:
        raise UsageError(
            f"engine {name} has no setting {unknown[0]!r}; it has {', '.join(allowed) or 'none'}"
        )
    if not isinstance(plan, Plan):
        load_own_kernels(plan)
        shared = settings.get("instrument")
        sites = shared.sites if shared is not None else find_sites(loaded.module)
        plan = plan_from(plan, sites, loaded.dtype, loaded.device, loaded.identity)
    return engine(loaded, plan, **settings)
