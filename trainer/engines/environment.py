"""What an engine says about itself: whatever may change a bit, for the environment digest."""

import platform
from typing import Any

import torch
import transformers

from zeromismatch import __version__

from ...model_recipes.apply import Instrument
from .weights import Weights


def describe_engine(name: str, instrument: Instrument, weights: Weights) -> dict[str, Any]:
    """Versions, threads, device, plan, contracts and weights, as plain values."""
    loaded = weights.loaded
    return {
        "engine": name,
        "model": loaded.spec,
        "config_digest": loaded.config_digest,
        "weights_digest": weights.root,
        "weights_version": weights.version,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "plan": instrument.plan.name,
        "plan_digest": instrument.plan.digest,
        "contracts": sorted({site.contract for site in instrument.sites if site.contract}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "zeromismatch": __version__,
    }
