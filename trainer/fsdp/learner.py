"""A learner over several processes of this host, used like the one in ``loop/learner.py``.

    learner = ShardedLearner(model, config, spec)     # starts ranks 1 ... W - 1
    step = learner.step(trajectories)

This process is rank 0. The others wait at a pipe for the name of what to do and do it together with
rank 0, over gloo on the loopback device or NCCL between GPUs; when rank 0 is gone the pipe ends and
so do they. A rank that dies, or a collective that takes longer than ``wait_seconds``, ends the run,
which is resumed from its last checkpoint. Checkpoints are written by
``torch.distributed.checkpoint``, every rank its own shards.
"""

import contextlib
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.tensor import DTensor

from ...kernels import bits
from ...kernels.errors import CapabilityError, NonFiniteError, ZeroMismatchError
from ...model_recipes.models import LoadedModel, load_model
from ...model_recipes.plan import Plan
from ..loop.config import TrainConfig
from ..loop.learner import Step, warmed_up
from ..loop.records import LossOutput, Trajectory
from ..loop.trajectories import batch_of
from ..losses.catalogue import loss_named
from .shard import Shard

STOP_SECONDS = 20.0
IDLE_FACTOR = 4
"""A rank ends that rank 0 asked for nothing for this many ``wait_seconds``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What a rank is built from. rendezvous: a file that all ranks can open."""

    model: str
    dtype: Literal["float32", "bfloat16"]
    model_seed: int
    plan: Plan
    config: TrainConfig
    rendezvous: str
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: rank r on GPU r, over NCCL."""


class Rank:
    """One rank's side of everything: each method is a collective that all ranks call alike."""

    def __init__(self, rank: int, spec: RankSpec, model: LoadedModel | None = None) -> None:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        place = spec.device
        if place == "cuda":
            place = f"cuda:{rank}"
            torch.cuda.set_device(rank)
        if dist.is_initialized():
            raise CapabilityError(
                "this process has a process group already, vLLM's or the caller's, and the "
                "sharded learner needs its own; use placement processes or ray, in a process that "
                "does nothing else"
            )
        dist.init_process_group(
            "gloo" if spec.device == "cpu" else "nccl",
            init_method=f"file://{spec.rendezvous}",
            rank=rank,
            world_size=spec.config.ranks,
            timeout=timedelta(seconds=spec.config.wait_seconds),
        )
        loaded = model or load_model(
            spec.model, dtype=spec.dtype, device=place, seed=spec.model_seed
        )
        self.shard = Shard(loaded, spec.plan, spec.config, loss_named(spec.config.loss))
        self.version = 0

    def step(
        self, trajectories: Sequence[Trajectory], old: Tensor | None
    ) -> tuple[Any, Tensor, LossOutput, float, float]:
        """Gradient, norm, AdamW: batch, own logprobs and output, norm, learning rate."""
        shard = self.shard
        batch = replace(batch_of(trajectories, version=self.version, loss=shard.loss), old=old)
        logp, output = shard.gradient(trajectories, batch)
        norm = self._norm()
        rate = warmed_up(shard.config, self.version)
        for group in shard.optimiser.param_groups:
            group["lr"] = rate
        shard.optimiser.step()
        shard.optimiser.zero_grad(set_to_none=True)
        self.version += 1
        return batch, *self._whole(logp, output), norm, rate

    def weights(self) -> dict[str, Tensor]:
        """The whole tensors, gathered."""
        return self.shard.weights()

    def save(self, folder: Path) -> None:
        """Every rank its shards of weights and moments."""
        save_sharded(self._state(), checkpoint_id=folder)

    def restore(self, folder: Path, version: int) -> None:
        """What :meth:`save` wrote at ``version``."""
        self._materialise()
        state = self._state()
        load_sharded(state, checkpoint_id=folder)
        self.version = version

    def close(self) -> None:
        """Leave the group."""
        self.shard.engine.close()
        dist.destroy_process_group()

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, parameter in self.shard.parameters.items():
            state[f"weight/{name}"] = parameter.data
            for key, value in self.shard.optimiser.state[parameter].items():
                state[f"{key}/{name}"] = value
        return state

    def _materialise(self) -> None:
        """Give the optimiser its moments, so that there is somewhere to load them."""
        for parameter in self.shard.parameters.values():
            self.shard.optimiser.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter.data),
                "exp_avg_sq": torch.zeros_like(parameter.data),
            }

    def _norm(self) -> float:
        """Of the whole gradient, before any limit; ranks' squares are added in order."""
        squares: list[float] = []
        for name, parameter in self.shard.parameters.items():
            gradient = cast(DTensor, parameter.grad).to_local()
            where = bits.nonfinite(gradient)
            squares.append(float(gradient.double().square().sum()))
            if where is not None:
                squares[-1] = math.nan
                print(f"zm: gradient of {name}, shard {self.shard.rank}, at {list(where)} is not "
                      "finite", file=sys.stderr)  # fmt: skip
        mine = torch.tensor([math.fsum(squares)], dtype=torch.float64)
        total = math.fsum(float(each) for each in _gathered(mine))
        if not math.isfinite(total):
            raise NonFiniteError(
                f"update {self.version}: a gradient is not finite (named above); nothing was "
                "applied: lower the learning rate and resume from the last checkpoint"
            )
        norm = math.sqrt(total)
        limit = self.shard.config.max_gradient_norm
        if limit is not None and norm > limit:
            for parameter in self.shard.parameters.values():
                cast(Tensor, parameter.grad).mul_(limit / norm)
        return norm

    def _whole(self, logp: Tensor, output: LossOutput) -> tuple[Tensor, LossOutput]:
        return torch.cat(_gathered(logp)), LossOutput(
            loss=torch.stack(_gathered(output.loss)).sum(),
            weights=torch.cat(_gathered(output.weights)),
            rejected=torch.cat(_gathered(output.rejected)),
        )


def _gathered(mine: Tensor) -> list[Tensor]:
    """Every rank's tensor, in order; they may have unlike lengths."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine.detach())
    return found


class ShardedLearner:
    """See the module."""

    def __init__(self, model: LoadedModel, config: TrainConfig, spec: RankSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self._followers: list[tuple[Any, Connection]] = []
        for rank in range(1, config.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_follow, args=(rank, spec, theirs), daemon=True)
            process.start()
            theirs.close()
            self._followers.append((process, ours))
        self.rank = Rank(0, spec, model)

    @property
    def version(self) -> int:
        """Updates so far."""
        return self.rank.version

    def step(self, trajectories: Sequence[Trajectory], old: Tensor | None = None) -> Step:
        """One update, on all ranks."""
        began = time.perf_counter()
        batch, logp, output, norm, rate = self._together("step", trajectories, old)
        return Step(
            batch=batch,
            logp=logp,
            output=output,
            gradient_norm=norm,
            learning_rate=rate,
            seconds=time.perf_counter() - began,
            tokens=sum(len(each.tokens) for each in trajectories),
        )

    def weights(self) -> dict[str, Tensor]:
        """The named tensors that a publication carries, whole."""
        return self._together("weights")

    def save(self, folder: Path) -> None:
        """Write a checkpoint's content, every rank its shards."""
        self._together("save", folder)

    def restore(self, folder: Path, version: int) -> None:
        """Read what :meth:`save` wrote at ``version``."""
        self._together("restore", folder, version)

    def close(self) -> None:
        """End the other ranks."""
        for _, connection in self._followers:
            with contextlib.suppress(OSError):  # it may be gone already
                connection.send(None)
        self.rank.close()
        for process, connection in self._followers:
            process.join(STOP_SECONDS)
            if process.is_alive():
                process.kill()
            connection.close()

    def _together(self, name: str, *arguments: Any) -> Any:
        """Call a method on every rank; another rank's error is raised here."""
        for process, connection in self._followers:
            if not process.is_alive():
                raise CapabilityError(
                    f"a learner rank ended with exit code {process.exitcode}; look at its output, "
                    "then resume"
                )
            connection.send((name, arguments))
        try:
            answer = cast(Callable[..., Any], getattr(self.rank, name))(*arguments)
        except RuntimeError as error:
            if isinstance(error, ZeroMismatchError):
                raise
            raise CapabilityError(
                f"the learner's ranks could not do {name!r} together: {error}; resume from the "
                "last checkpoint"
            ) from error
        return answer


def _follow(rank: int, spec: RankSpec, connection: Connection) -> None:
    """A rank other than 0: do what rank 0 does, until it says so or is gone."""
    torch.set_num_threads(1)
    own = Rank(rank, spec)
    idle = IDLE_FACTOR * spec.config.wait_seconds
    while True:
        try:
            if not connection.poll(idle):
                raise SystemExit(f"zm: rank {rank} heard nothing from rank 0 for {idle:.0f} s")
            asked = connection.recv()
        except (EOFError, OSError):
            return  # rank 0 is gone
        if asked is None:
            own.close()
            return
        name, arguments = asked
        getattr(own, name)(*arguments)


def rendezvous() -> str:
    """A fresh file name for a group to meet at."""
    return os.path.join(tempfile.mkdtemp(prefix="zm-ranks-"), "meet")
