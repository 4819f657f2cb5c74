"""One rank's part of a sharded learner: FSDP2 around the packed forward.

    shard = Shard(model, plan, config, loss)          # in every rank of an initialised group
    part = shard.gradient(trajectories, batch)        # own responses; gradients are summed

Parameters, gradients and AdamW's moments are sharded by ``fully_shard``: each decoder layer is a
group of its own, the rest (embedding, norm, head) another. Forward inputs are not cast
(``cast_forward_inputs=False``): a cast would be other numbers. All-gathered weights are the weights
of the whole model, so the logprobs of a token have the same bits on any number of ranks.

A bf16 model keeps fp32 masters in its shards; they are rounded on their way into the forward, to
the weights that a rollout engine gets (:meth:`Shard.weights`). Gradients are summed in fp32.

Gradients are summed over ranks, not averaged, since c_i = 1/(B T_i) already counts the whole
update; the sum is taken rank by rank in ascending order, after an all-to-all, whatever the
library's own algorithm would do. Within a rank micro-batches are added by autograd: the gradient's
bits depend on the number of ranks and on ``max_rows``, and repeat exactly for the same.

All-gathers write into reused buffers, which torch does not count as a change; the linear layers'
packed weights are safe, since a forward that records a gradient keeps none (``linear/packs.py``).
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...kernels.errors import UsageError
from ...model_recipes.models import LoadedModel
from ...model_recipes.plan import Plan
from ..engines.base import Request
from ..engines.packed import PackedEngine
from ..loop.config import TrainConfig
from ..loop.records import Batch, Loss, LossOutput, Trajectory
from ..loop.trajectories import part_of, request_of


class OrderedSum:
    """FSDP2's reduce-scatter as an all-to-all and a sum over ranks in ascending order."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where a result goes."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """output [n] = sum over ranks r, ascending, of rank r's input [own rank * n : ...]."""
        assert op == dist.ReduceOp.SUM
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = received.view(group.size(), -1)
        output_tensor.copy_(parts[0])
        for part in parts[1:]:
            output_tensor.add_(part)


class _Forward(nn.Module):
    """The packed forward as a module, so that FSDP's hooks run around it."""

    def __init__(self, engine: PackedEngine) -> None:
        super().__init__()
        self.model = engine.loaded.module
        self._engine = engine

    def forward(self, requests: Sequence[Request]) -> Tensor:
        """fp32 [N]."""
        return self._engine.logprobs(requests)


class Shard:
    """See the module. ``dist`` must be initialised, and every rank must hold the same model."""

    def __init__(self, model: LoadedModel, plan: Plan, config: TrainConfig, loss: Loss) -> None:
        self.model, self.config, self.loss = model, config, loss
        self.dtype = model.dtype
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.engine = PackedEngine(model, plan)
        self.forward = _Forward(self.engine)
        for parameter in model.module.parameters():
            parameter.data = parameter.data.float()  # the master; the plan was applied before
        policy = MixedPrecisionPolicy(
            param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for layer in cast(Any, model.module).base_model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(self.forward, mp_policy=policy)
        for module in self.forward.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(cast(Any, OrderedSum()))
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.names = [name for name, _ in model.module.named_parameters()]
        self.parameters = dict(model.module.named_parameters())
        self.optimiser = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            foreach=model.device.type == "cuda",
        )

    def own(self, count: int) -> tuple[int, int]:
        """First and last response of this rank's share of ``count``."""
        if count < self.ranks:
            raise UsageError(
                f"an update of {count} responses cannot be split over {self.ranks} ranks; use fewer"
            )
        return count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks

    def gradient(
        self, trajectories: Sequence[Trajectory], batch: Batch
    ) -> tuple[Tensor, LossOutput]:
        """Own responses' logprobs and output; all ranks' gradients, summed, are in place."""
        self.optimiser.zero_grad(set_to_none=True)
        first, last = self.own(len(trajectories))
        pieces = self._pieces(trajectories)
        logps: list[Tensor] = []
        outputs: list[LossOutput] = []
        for index in range(pieces):
            start = first + (last - first) * index // pieces
            stop = first + (last - first) * (index + 1) // pieces
            cast(FSDPModule, self.forward).set_requires_gradient_sync(index + 1 == pieces)
            logp = self.logprobs(trajectories[start:stop]).cpu()  # where loss and batch are
            output = self.loss(part_of(batch, start, stop), logp)
            output.loss.backward()
            logps.append(logp.detach())
            outputs.append(output)
        return torch.cat(logps), LossOutput(
            loss=torch.stack([each.loss.detach() for each in outputs]).sum(),
            weights=torch.cat([each.weights for each in outputs]),
            rejected=torch.cat([each.rejected for each in outputs]),
        )

    def logprobs(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """fp32 [N] of these responses, with grad; a collective: every rank calls it."""
        return self.forward([request_of(each) for each in trajectories])

    def weights(self) -> dict[str, Tensor]:
        """The whole tensors at the model's dtype, gathered; a collective."""
        return {
            name: cast(DTensor, tensor.detach()).full_tensor().to(self.dtype)
            for name, tensor in self.parameters.items()
        }

    def _pieces(self, trajectories: Sequence[Trajectory]) -> int:
        """Micro-batches, the same number on every rank (each is a collective)."""
        limit, count = self.config.max_rows, len(trajectories)
        fewest = count // self.ranks
        if limit is None:
            return 1
        for pieces in range(1, fewest + 1):
            if all(rows <= limit for rows in self._rows(trajectories, pieces)):
                return pieces
        return fewest

    def _rows(self, trajectories: Sequence[Trajectory], pieces: int) -> list[int]:
        count = len(trajectories)
        rows: list[int] = []
        for rank in range(self.ranks):
            first, last = count * rank // self.ranks, count * (rank + 1) // self.ranks
            for index in range(pieces):
                start = first + (last - first) * index // pieces
                stop = first + (last - first) * (index + 1) // pieces
                rows.append(sum(len(each.tokens) for each in trajectories[start:stop]))
        return rows
