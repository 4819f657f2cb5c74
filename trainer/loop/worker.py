"""A rollout worker: an engine, a task, and the groups it is asked for.

    worker = RolloutWorker(WorkerSpec(...))
    result = worker.generate(groups=(12, 13), version=3)

One call generates whole groups: all prompts of it, every turn, then the rewards. Before it starts
the worker installs the asked version from the run folder. Where partial rollouts are recorded, it
looks for newer versions between two steps and goes on with the newest one; each token carries the
version that drew it. What is drawn depends on seed, group, member and weights alone, so that a
group that was lost with its worker can be generated again.

It runs in a thread, a process or a Ray actor (``hosts.py``) and knows nothing of which.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from ...kernels.errors import MisalignedError, UsageError
from ...model_recipes.models import LoadedModel, load_model
from ...model_recipes.plan import Plan
from ...model_recipes.state import named_state
from ..engines.admission import max_length
from ..engines.paged import PagedEngine
from ..engines.vllm.engine import VllmEngine
from ..losses.catalogue import loss_named
from ..publication.across import Channel, Receiver
from ..publication.in_place import Installed, LiveWeights, Offer
from .config import TrainConfig
from .heads import HeadRecorder
from .limits import ROLLOUT_REMEDY, named_memory
from .patience import Patience
from .records import Task, Trajectory, TurnTask
from .routes import RouteRecorder
from .trajectories import admit, answered, extended, opened, request_of, seed_of
from .versions import Versions

R = TypeVar("R")
MOST_RUNNING = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What it takes to build a worker anywhere: picklable, no tensors.

    model, dtype, device, model_seed: for ``load_model``. versions: folder of published weights,
    which every worker must be able to read. threads: torch's; None leaves them.
    """

    model: str
    dtype: Literal["float32", "bfloat16"]
    model_seed: int
    device: str = "cpu"
    plan: Plan
    task: Task
    config: TrainConfig
    versions: Path
    threads: int | None = None
    index: int = 0
    """Of the run's workers, this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Finished groups, and what they took. tokens: sampled ones."""

    groups: tuple[tuple[Trajectory, ...], ...]
    seconds: float
    install_seconds: float
    tokens: int


class RolloutWorker:
    """See the module. ``model``: an already loaded copy that is this worker's alone."""

    def __init__(self, spec: WorkerSpec, model: LoadedModel | None = None) -> None:
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self.spec, self.config, self.task = spec, spec.config, spec.task
        self.versions = Versions(spec.versions)
        self.model = model or load_model(
            spec.model, dtype=spec.dtype, device=spec.device, seed=spec.model_seed
        )
        with named_memory(f"the {spec.config.rollout} engine", ROLLOUT_REMEDY):
            self.engine = self._engine()
        self.recorder = self._recorder()
        self._limit = max_length(self.model.config)
        self._patience = Patience()
        self._receiver: Receiver | None = None
        self._install_seconds = 0.0
        self._received_seconds = 0.0

    def generate(self, groups: Sequence[int], version: int) -> Generated:
        """Whole groups, scored, starting on ``version``."""
        what = f"drawing {len(groups) * self.config.group_size} responses of version {version}"
        with named_memory(what, ROLLOUT_REMEDY):
            return self._generate(groups, version)

    def _generate(self, groups: Sequence[int], version: int) -> Generated:
        began = time.perf_counter()
        received = self._install_seconds = self._received_seconds
        self._received_seconds = 0.0
        self._install(version)
        running = [one for group in groups for one in self._open(group)]
        done: dict[str, Trajectory] = {}
        for turn in range(self.config.max_turns):
            grown = self._turn(running)
            running = []
            for each in grown:
                reply = self._reply(each) if turn + 1 < self.config.max_turns else None
                if reply is None:
                    done[each.id] = each
                else:
                    running.append(answered(each, reply))
            if not running:
                break
        scored = {name: self._score(each) for name, each in done.items()}
        members = range(self.config.group_size)
        return Generated(
            groups=tuple(tuple(scored[f"{group}/{m}"] for m in members) for group in groups),
            seconds=time.perf_counter() - began - (self._install_seconds - received),
            install_seconds=self._install_seconds,
            tokens=sum(len(each.logprob_bits) for each in scored.values()),
        )

    def _engine(self) -> VllmEngine | PagedEngine:
        config, plan = self.config, self.spec.plan
        if config.rollout == "paged":
            return PagedEngine(self.model, plan)
        return VllmEngine(
            self.model, plan, max_running=_most_running(config), cache_gib=config.cache_gib
        )

    def ready(self) -> None:
        """Nothing more: the engine has started by now."""

    def meet(self, meet: str) -> None:
        """Open this side's end of a channel (:mod:`.sending`)."""
        device = self.model.device
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        channel = Channel(meet, 1, device=device)
        if isinstance(self.engine, VllmEngine):
            live = self.engine.live
            weights = live.writable()
            self._receiver = Receiver(channel, weights, live.install)
        else:
            tensors = named_state(self.model.module)
            weights = LiveWeights(tensors, cleared=lambda: True, version=self.engine.version)
            self._receiver = Receiver(channel, weights, self._install_offer)

    def receive(self, seconds: float) -> None:
        """The version that is sent next, installed; no request is under way."""
        began = time.perf_counter()
        if self._receiver is None:
            raise UsageError("this worker meets nobody yet; call meet() first")
        self._receiver.receive(seconds=seconds)
        self._received_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Take the plan off the model."""
        self._patience.close()
        self.engine.close()

    def _install_offer(self, offer: Offer) -> Installed:
        """Over the paged engine's tensors, which keeps nothing between two calls."""
        assert self._receiver is not None
        assert isinstance(self.engine, PagedEngine)
        live, held = self._receiver.live, self.engine.weights
        done = live.install(offer)
        held.version, held.digests = live.version, live.digests
        return done

    def _recorder(self) -> HeadRecorder | RouteRecorder | None:
        """What the loss asks for beside tokens and logprobs."""
        if not isinstance(self.engine, PagedEngine):  # the run refused losses that ask for more
            return None
        loss, instrument = loss_named(self.config.loss), self.engine.instrument
        if loss.needs_routes:
            return RouteRecorder(instrument.routings)
        if loss.needs_head:
            return HeadRecorder(
                instrument,
                vocabulary=self.model.config.vocab_size,
                temperature=self.config.temperature,
            )
        return None

    def _install(self, version: int) -> None:
        ahead = self.config.partial == "recorded" and self.engine.version > version
        if version == self.engine.version or ahead:  # it saw a version before the claim did
            return
        began = time.perf_counter()
        if not self._from_memory(version):
            self.engine.publish(self.versions.read(version, self.model.device), version)
        self._install_seconds += time.perf_counter() - began

    def _from_memory(self, version: int) -> bool:
        """Over vLLM's tensors straight from the learner's memory; False where it is not there."""
        if not isinstance(self.engine, VllmEngine):
            return False
        there = self.versions.shelved(version, self.model.device)
        if there is None:
            return False
        try:
            self.engine.install(there.offer())
        except MisalignedError:
            if there.is_gone():  # while it was being copied: the file has it
                return False
            raise
        return True

    def _open(self, group: int) -> list[Trajectory]:
        rng = random.Random(f"{self.config.seed}/{group}")
        prompt = self._call(lambda: self.task.prompt(group, rng), f"prompt {group}")
        return [
            opened(prompt, group=group, member=member, temperature=self.config.temperature)
            for member in range(self.config.group_size)
        ]

    def _turn(self, running: Sequence[Trajectory]) -> list[Trajectory]:
        requests = [
            request_of(
                each,
                seed=seed_of(self.config.seed, each.id),
                max_new_tokens=each.prompt.max_new_tokens or self.config.max_new_tokens,
            )
            for each in running
        ]
        newer = self._newer if self.config.partial == "recorded" else None
        run = self.engine.generate(requests, observer=self.recorder, between=newer)
        grown = extended(running, run)
        return grown if self.recorder is None else self.recorder.added(grown, run)

    def _newer(self) -> Any:
        """The newest published version, staged, if it is newer than the installed one."""
        newest = self.versions.newest()
        if newest <= self.engine.version:
            return None
        began = time.perf_counter()
        publish = self.engine.stage(self.versions.read(newest, self.model.device), newest)
        self._install_seconds += time.perf_counter() - began
        return publish

    def _reply(self, trajectory: Trajectory) -> tuple[int, ...] | None:
        task = self.task
        if not isinstance(task, TurnTask):
            return None
        reply = self._call(lambda: task.next_turn(trajectory), f"the turn after {trajectory.id}")
        if reply is not None and not reply:
            raise UsageError(
                f"task {task.name} answered {trajectory.id} with no token; return None to finish"
            )
        return reply

    def _score(self, trajectory: Trajectory) -> Trajectory:
        reward = self._call(lambda: self.task.score(trajectory), f"the score of {trajectory.id}")
        scored = replace(trajectory, reward=float(reward))
        return admit(scored, limit=self._limit)

    def _call(self, ask: Callable[[], R], what: str) -> R:
        """The task's answer; UsageError if it raises, BudgetError if it hangs."""
        return self._patience.wait(ask, self.config.task_seconds, f"task {self.task.name}: {what}")


def _most_running(config: TrainConfig) -> int:
    """Responses that a worker can have under way: CUDA graphs of larger batches would be idle."""
    return min(MOST_RUNNING, -(-config.groups // config.workers) * config.group_size)
