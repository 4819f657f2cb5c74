"""The learner: one update from complete groups, in fp32, whatever the dtype of the model.

    learner = Learner(model, plan, config, loss)
    step = learner.step(trajectories)        # gradient, AdamW, version + 1

The gradient: every micro-batch of whole responses goes through the packed forward, the loss gives
each action token its coefficient, and backward continues the chains that earlier micro-batches
left (``kernels/accumulation.py``), so the split changes no bit under an aligned plan. Master
weights and AdamW's moments are fp32; a bf16 model gets their rounding. Nothing is clipped unless
the config asks for a limit on the gradient's norm. A number that is not finite stops the update
before the optimiser and says where.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...kernels import bits
from ...kernels.accumulation import Accumulators
from ...kernels.errors import NonFiniteError
from ...model_recipes.models import LoadedModel
from ...model_recipes.plan import Plan
from ...model_recipes.state import named_state
from ..engines.packed import PackedEngine
from .config import TrainConfig
from .records import Batch, Loss, LossOutput, Trajectory
from .trajectories import batch_of, part_of, request_of

FILE = "state.safetensors"
STATE = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one update was: see :class:`.records.UpdateFacts` for the fields."""

    batch: Batch
    logp: Tensor
    output: LossOutput
    gradient_norm: float
    learning_rate: float
    seconds: float
    tokens: int


class Learner:
    """See the module. The model is the learner's alone and carries ``plan`` until :meth:`close`."""

    def __init__(self, model: LoadedModel, plan: Plan, config: TrainConfig, loss: Loss) -> None:
        self.model, self.config, self.loss = model, config, loss
        self.engine = PackedEngine(model, plan)
        self.version = 0
        self.parameters = dict(model.module.named_parameters())
        self._named = named_state(model.module)  # slow to collect; all updates are in place
        self.accumulators = Accumulators(self.parameters)
        self.masters = {
            name: parameter
            if parameter.dtype == torch.float32
            else nn.Parameter(parameter.detach().float())
            for name, parameter in self.parameters.items()
        }
        self.optimiser = torch.optim.AdamW(
            self.masters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            foreach=model.device.type == "cuda",
        )

    def step(self, trajectories: Sequence[Trajectory], old: Tensor | None = None) -> Step:
        """One update. ``old``: fp32 [N], where the loss asks for it."""
        began = time.perf_counter()
        batch = replace(batch_of(trajectories, version=self.version, loss=self.loss), old=old)
        logp, output = self.gradient(trajectories, batch)
        norm = self._gather()
        rate = warmed_up(self.config, self.version)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self._round()
        self.version += 1
        return Step(
            batch=batch,
            logp=logp,
            output=output,
            gradient_norm=norm,
            learning_rate=rate,
            seconds=time.perf_counter() - began,
            tokens=sum(len(each.tokens) for each in trajectories),
        )

    def gradient(
        self, trajectories: Sequence[Trajectory], batch: Batch
    ) -> tuple[Tensor, LossOutput]:
        """Sum the update's gradient; returns logprobs and the loss's output, detached."""
        self.accumulators.clear()
        requests = [request_of(each) for each in trajectories]
        logps: list[Tensor] = []
        outputs: list[LossOutput] = []
        first = 0
        for part in self.engine.micro_batches(requests, max_rows=self.config.max_rows):
            last = first + len(part)
            with self.accumulators.micro_batch():
                piece = part_of(batch, first, last)
                if piece.head is None:
                    logp = self.engine.logprobs(part).cpu()  # where the loss and the batch are
                else:
                    logp, beside = self.engine.logprobs_beside(part, piece.head.ids)
                    piece = replace(piece, head=replace(piece.head, logp=beside.cpu()))
                    logp = logp.cpu()
                _check_finite(logp, "the learner's logprob", piece, trajectories[first:last])
                output = self.loss(piece, logp)
                output.loss.backward()
            logps.append(logp.detach())
            outputs.append(output)
            first = last
        return torch.cat(logps), LossOutput(
            loss=torch.stack([each.loss.detach() for each in outputs]).sum(),
            weights=torch.cat([each.weights for each in outputs]),
            rejected=torch.cat([each.rejected for each in outputs]),
        )

    def weights(self) -> dict[str, Tensor]:
        """The named tensors that a publication carries; views of what the learner holds."""
        return self._named

    def state(self) -> dict[str, Tensor]:
        """Weights, moments, and masters where they are not the weights themselves, by name."""
        held = {f"weight/{name}": tensor for name, tensor in self.weights().items()}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                held[f"master/{name}"] = master.detach()
            for key in STATE:
                value = self.optimiser.state[master].get(key) if self.version else None
                if value is not None:
                    held[f"{key}/{name}"] = value
        return held

    @torch.no_grad()
    def load(self, held: Mapping[str, Tensor], version: int) -> None:
        """What :meth:`state` gave at ``version``."""
        for name, tensor in self.weights().items():
            tensor.copy_(held[f"weight/{name}"])
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.copy_(held[f"master/{name}"])
            moments = {key: held[f"{key}/{name}"] for key in STATE if f"{key}/{name}" in held}
            if moments:
                self.optimiser.state[master] = {
                    key: value.clone() if key == "step" else value.to(master.device, copy=True)
                    for key, value in moments.items()
                }
        self.version = version

    def save(self, folder: Path) -> None:
        """Write a checkpoint's content."""
        save_file({name: each.contiguous() for name, each in self.state().items()}, folder / FILE)

    def restore(self, folder: Path, version: int) -> None:
        """Read what :meth:`save` wrote at ``version``."""
        self.load(load_file(folder / FILE), version)

    def close(self) -> None:
        """Take the plan off the model."""
        self.engine.close()

    def _gather(self) -> float:
        """Give every master its gradient; the norm of all of it, before any limit."""
        for name, master in self.masters.items():
            gradient = self.accumulators.gradient(name)
            master.grad = torch.zeros_like(master) if gradient is None else gradient
        gradients = {name: cast(Tensor, master.grad) for name, master in self.masters.items()}
        norms = torch.stack([
            torch.linalg.vector_norm(gradient, dtype=torch.float64)
            for gradient in gradients.values()
        ]).tolist()  # one wait for the device
        for (name, gradient), norm in zip(gradients.items(), norms, strict=True):
            if not math.isfinite(norm):
                where = bits.nonfinite(gradient)
                assert where is not None  # fp32 squares fit into fp64
                raise NonFiniteError(
                    f"update {self.version}: the gradient of {name}{list(where)} is "
                    f"{float(gradient[where])}; nothing was applied: lower the learning rate and "
                    "resume from the last checkpoint"
                )
        norm = math.sqrt(math.fsum(norm * norm for norm in norms))
        limit = self.config.max_gradient_norm
        if limit is not None and norm > limit:
            for gradient in gradients.values():
                gradient.mul_(limit / norm)
        return norm

    @torch.no_grad()
    def _round(self) -> None:
        """Give the model the masters' values, where it does not share them; drop gradients."""
        for name, master in self.masters.items():
            master.grad = None
            parameter = self.parameters[name]
            if parameter is not master:
                parameter.copy_(master)


def warmed_up(config: TrainConfig, version: int) -> float:
    """The learning rate, which rises linearly over the first ``warmup`` updates."""
    return config.learning_rate * min(1.0, (version + 1) / max(1, config.warmup))


def _check_finite(
    values: Tensor, what: str, batch: Batch, trajectories: Sequence[Trajectory]
) -> None:
    where = bits.nonfinite(values)
    if where is None:
        return
    response = int(batch.response[where])
    raise NonFiniteError(
        f"update {batch.version}: {what} is {float(values.detach()[where])} in response "
        f"{trajectories[response].id}, drawn by version {int(batch.versions[where])}; nothing was "
        "applied: lower the learning rate and resume from the last checkpoint"
    )
