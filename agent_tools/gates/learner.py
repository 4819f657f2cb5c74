"""A trainer's copy of the model with an optimiser: what the gates about updates step with.

    learner = Learner(model, plan, rate=1e-3)
    learner.step(requests, weights)            # AdamW on a weighted sum of logprobs
    learner.save(path); other.load(path)

Left out: rewards, baselines, anything asynchronous: that is training proper, not a gate.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernels import bits
from ...model_recipes.models import LoadedModel
from ...model_recipes.plan import Plan
from ...model_recipes.state import named_state, state_digest
from ...trainer.engines.base import Request
from .bench import engines_on


class Learner:
    """See the module. The model carries ``plan`` until :meth:`close`."""

    def __init__(self, model: LoadedModel, plan: Plan, rate: float) -> None:
        self.model = model
        self.engines = engines_on(model, plan)
        self.names = [name for name, _ in model.module.named_parameters()]
        self.optimiser = torch.optim.AdamW(model.module.parameters(), lr=rate, foreach=False)

    def step(self, requests: Sequence[Request], weights: Tensor) -> None:
        """One update; ``weights`` has one entry per sampled token."""
        self.optimiser.zero_grad(set_to_none=True)
        logprobs = self.engines.packed.logprobs(requests)
        loss = -(logprobs * weights.to(logprobs.device)).sum()
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def save(self, file: Path) -> None:
        """Weights and optimiser state."""
        weights = named_state(self.model.module)
        torch.save({"weights": weights, "optimiser": self.optimiser.state_dict()}, file)

    def load(self, file: Path) -> None:
        """What :meth:`save` wrote."""
        held = torch.load(file, weights_only=True)
        with torch.no_grad():
            for name, tensor in named_state(self.model.module).items():
                tensor.copy_(held["weights"][name])
        self.optimiser.load_state_dict(held["optimiser"])

    def forget_smallest(self) -> None:
        """Drop the optimiser's memory of the smallest parameter: a fault for red controls."""
        parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
        smallest = min(parameters, key=lambda parameter: parameter.numel())
        state: dict[Any, Any] = self.optimiser.state
        state[smallest]["exp_avg"].zero_()

    def digests(self) -> dict[str, str]:
        """Digest of every tensor of the model and of the optimiser."""
        return state_digest(self.model.module) | optimiser_digest(self.optimiser, self.names)

    def close(self) -> None:
        """Take the plan off the model."""
        self.engines.paged.close()


def optimiser_digest(optimiser: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, str]:
    """Digest of every tensor in an optimiser's state, by parameter and name."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    return {
        f"{name}: {key}": bits.digest_tensor(value.reshape(1, -1))
        for name, parameter in zip(names, parameters, strict=True)
        for key, value in optimiser.state[parameter].items()
        if isinstance(value, Tensor)
    }
