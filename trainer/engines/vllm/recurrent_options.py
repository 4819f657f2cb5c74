"""How vLLM is asked for :mod:`.recurrent_model`; nothing here imports vLLM."""

from typing import Any

from ....kernels.errors import CapabilityError
from ....model_recipes.models import LoadedModel
from ....model_recipes.plan import Plan
from ....model_recipes.recurrent import recurrent_chunks

NAME = "ZeroMismatchForCausalLM"
"""An architecture of ours in vLLM's registry; vLLM's own classes stay as they are."""
FORMAT = "zero_mismatch"
"""Of configs, in which a checkpoint has that architecture (:mod:`.recurrent_config`)."""


def is_recurrent(loaded: LoadedModel) -> bool:
    """Whether a model has recurrent layers that a plan serves."""
    return bool(recurrent_chunks(loaded.module))


def options(loaded: LoadedModel, plan: Plan) -> dict[str, Any]:
    """Arguments for ``LLM``: our config format, blocks of one chunk; none for other models."""
    chunks = sorted(recurrent_chunks(loaded.module))
    if plan.is_stock or not chunks:
        return {}
    if len(chunks) > 1:
        raise CapabilityError(
            f"layers with chunks of {chunks} rows do not fit one size of vLLM's blocks; use the "
            "paged engine (--rollout paged)"
        )
    return {"config_format": FORMAT, "block_size": chunks[0]}
