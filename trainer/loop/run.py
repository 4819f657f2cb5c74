"""The loop on one page: producers, learner and publication at the same time.

    outcome = train(Setup(...), Path("runs/1"), sink=writer.update)

Producers claim groups from the work buffer, have a worker generate them, have a slice audited,
write them to the journal and put them back. The learner takes the oldest complete update, checks
its lag, steps, checks the kernel term, publishes the new version and writes a checkpoint when one
is due. Whatever fails anywhere ends the run with its own error; ``resume=True`` goes on from the
last checkpoint, the journal and the published versions: in deterministic mode with the bits of the
run that was never interrupted; in free mode without losing a group that had arrived, and with those
that were on their way drawn again from the version that they had started on.

``pytest tests/trainer/loop`` exercises it; the command is ``zm train``.
"""

import contextlib
import copy
import json
import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from ...kernels.errors import CapabilityError, MisalignedError, NonFiniteError
from ...kernels.files import replace_whole
from ...model_recipes.models import LoadedModel, load_model
from ...model_recipes.plan import Plan
from ...model_recipes.state import named_state
from ..losses.catalogue import loss_named
from .audit import Auditor, Group, audit_of, old_of, require_zero
from .buffer import Closed, WorkBuffer
from .config import TrainConfig
from .crossing import Crossing
from .export import export
from .folder import RunFolder
from .hosts import HOSTS, Host, ThreadHost, WorkerDied
from .learner import Learner
from .records import Loss, Task, Trajectory, UpdateFacts
from .trajectories import to_json
from .worker import Generated, WorkerSpec

if TYPE_CHECKING:
    from ..fsdp.learner import ShardedLearner

DUMP = "stopped.json"
RESTARTS = 3
"""How often one claim may lose its worker before the run gives up."""

Sink = Callable[[UpdateFacts], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is trained, on what. ``model``, ``dtype``, ``device``, ``model_seed``: for loading."""

    model: str
    plan: Plan
    task: Task
    config: TrainConfig
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    model_seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. weights_root: digest of the last version. resumed_at: where it went on."""

    version: int
    weights_root: str
    resumed_at: int
    seconds: float
    export: Path
    notes: tuple[str, ...] = ()


def train(
    setup: Setup,
    folder: Path,
    *,
    resume: bool = False,
    sink: Sink = lambda facts: None,
    model: LoadedModel | None = None,
) -> Outcome:
    """Run to ``config.updates`` updates, then export. ``sink`` gets every update's facts.

    model: the model as loaded, with no plan on it; it is trained in place. None loads it.
    """
    began = time.perf_counter()
    about = {
        "model": setup.model,
        "dtype": setup.dtype,
        "model_seed": str(setup.model_seed),
        "task": setup.task.name,
        "plan": setup.plan.digest,
    }
    opening = RunFolder(folder, setup.config, resume=resume, about=about)
    with contextlib.closing(opening) as opened:
        run = _Run(setup, opened, model)
        try:
            resumed_at = run.learner.version
            run.to_the_end(sink)
            root = run.root
        finally:
            run.close()
        return Outcome(
            version=run.learner.version,
            weights_root=root,
            resumed_at=resumed_at,
            seconds=time.perf_counter() - began,
            export=run.export(),
            notes=run.notes,
        )


class _Run:
    """One run's parts, and the threads between them."""

    def __init__(self, setup: Setup, folder: RunFolder, model: LoadedModel | None) -> None:
        self.setup, self.config, self.folder = setup, setup.config, folder
        config, loss = setup.config, loss_named(setup.config.loss)
        if (loss.needs_head or loss.needs_routes) and config.ranks > 1:
            raise CapabilityError(
                f"loss {loss.name} works on more than the rollout's tokens and logprobs, which a "
                "learner on several ranks does not take; use ranks 1"
            )
        if (loss.needs_head or loss.needs_routes) and config.rollout != "paged":
            raise CapabilityError(
                f"loss {loss.name} watches the rollout engine at work, which {config.rollout} does "
                "not allow; use rollout paged"
            )
        if loss.needs_routes and config.partial == "recorded":
            raise CapabilityError(
                f"loss {loss.name} replays one choice per token, and a response that goes on under "
                "a newer version can hold two; set `partial: forbidden`"
            )
        base = model or load_model(
            setup.model, dtype=setup.dtype, device=setup.device, seed=setup.model_seed
        )
        self.copies = {name: _copy(base) for name in ("auditor", "worker")}
        self.learner = self._learner(base, loss)
        self.auditor = Auditor(
            self.copies["auditor"], setup.plan, config, folder.versions, everything=loss.needs_old
        )
        self.needs_old = loss.needs_old
        found = folder.checkpoints.newest_good()
        self.notes = () if found is None else found.damaged
        if found is not None:
            self.learner.restore(found.folder, found.version)
        version = self.learner.version
        folder.versions.drop_after(version - 1)
        self.root = folder.versions.publish(self.learner.weights(), version)
        self.buffer: WorkBuffer[Group] = WorkBuffer(
            groups=config.groups,
            lag=config.lag,
            updates=config.updates,
            version=version,
            deterministic=config.mode == "deterministic",
            held=folder.journal.held(),
            claimed=folder.journal.claimed(),
        )
        self.spec = WorkerSpec(
            model=setup.model,
            dtype=setup.dtype,
            device=setup.device,
            model_seed=setup.model_seed,
            plan=setup.plan,
            task=setup.task,
            config=config,
            versions=folder.versions.folder,
            threads=None if config.placement == "threads" else 1,
        )
        self._seconds = {"rollout": 0.0, "sync": 0.0, "blocked": 0.0}
        self._lock = threading.Lock()

    def _learner(self, base: LoadedModel, loss: Loss) -> "Learner | ShardedLearner":
        setup, config = self.setup, self.config
        if config.ranks == 1:
            return Learner(base, setup.plan, config, loss)
        from ..fsdp.learner import RankSpec, ShardedLearner, rendezvous  # slow to import

        spec = RankSpec(
            model=setup.model,
            dtype=setup.dtype,
            model_seed=setup.model_seed,
            plan=setup.plan,
            config=config,
            rendezvous=rendezvous(),
        )
        return ShardedLearner(base, config, spec)

    def to_the_end(self, sink: Sink) -> None:
        """All updates that are left."""
        if self.learner.version >= self.config.updates:
            return
        with self._producers():
            while self.learner.version < self.config.updates:
                sink(self._update())  # told before it is kept: what is kept is not made again
                self._checkpoint_if_due()

    def close(self) -> None:
        """Take the plan off this process's models."""
        self.learner.close()
        self.auditor.close()

    def export(self) -> Path:
        """The last published version as a transformers checkpoint; after :meth:`close`."""
        model, version = self.auditor.engine.loaded, self.learner.version
        with torch.no_grad():
            weights = self.folder.versions.read(version)
            for name, tensor in named_state(model.module).items():
                tensor.copy_(weights[name])
        return export(model, self.folder.path / "export")

    # --- the learner's side ----------------------------------------------------------------

    def _update(self) -> UpdateFacts:
        update, config = self.learner.version, self.config
        began = time.perf_counter()
        groups = self.buffer.take(update, timeout=config.wait_seconds)
        waited = time.perf_counter() - began
        trajectories = [each for group in groups for each in group.trajectories]
        self._check_lag(update, trajectories)
        trajectories = self._dealt(update, trajectories)
        try:
            step = self.learner.step(trajectories, old_of(groups) if self.needs_old else None)
        except NonFiniteError:
            self._dump(update, trajectories)
            raise
        audit = audit_of(groups, step.batch, step.logp)
        if config.require_zero:
            require_zero(audit, update)
        began = time.perf_counter()
        self.root = self.folder.versions.publish(self.learner.weights(), self.learner.version)
        self.buffer.published(self.learner.version)
        self.folder.versions.keep_from(self.buffer.oldest_needed())
        published = time.perf_counter() - began
        after = (
            self.auditor.under(trajectories, self.learner.version) if config.measure_moves else None
        )
        spent = self._spent()
        return UpdateFacts(
            batch=step.batch,
            logp=step.logp,
            output=step.output,
            audit=audit,
            gradient_norm=step.gradient_norm,
            learning_rate=step.learning_rate,
            cap=config.lag,
            rollout_seconds=spent["rollout"],
            train_seconds=step.seconds,
            sync_seconds=published + spent["sync"],
            wait_seconds=waited,
            blocked_seconds=spent["blocked"],
            tokens=step.tokens,
            weights_root=self.root,
            plan_digest=self.setup.plan.digest,
            after=after,
        )

    def _check_lag(self, update: int, trajectories: Sequence[Trajectory]) -> None:
        oldest = min(version for each in trajectories for version in each.versions)
        if update - oldest > self.config.lag:
            raise MisalignedError(
                f"update {update} holds a token of version {oldest}, older than the cap of "
                f"{self.config.lag}; please report this: the work buffer should not allow it"
            )

    def _dump(self, update: int, trajectories: Sequence[Trajectory]) -> None:
        """What the stopped update was about: ids, versions, recorded logprobs, rewards."""
        found = {"update": update, "trajectories": [to_json(each) for each in trajectories]}
        replace_whole(self.folder.path / DUMP, json.dumps(found) + "\n")

    def _dealt(self, update: int, trajectories: list[Trajectory]) -> list[Trajectory]:
        """The trajectories, their rewards at random where that control is asked for."""
        if not self.config.shuffle_rewards:
            return trajectories
        rewards = [each.reward for each in trajectories]
        random.Random(f"shuffle/{self.config.seed}/{update}").shuffle(rewards)
        return [
            replace(each, reward=reward) for each, reward in zip(trajectories, rewards, strict=True)
        ]

    def _checkpoint_if_due(self) -> None:
        version = self.learner.version
        if version % self.config.checkpoint_every and version < self.config.updates:
            return
        self.folder.checkpoints.save(self.learner.save, version)
        self.folder.journal.keep_from(self.folder.checkpoints.oldest() * self.config.groups)

    def _spent(self) -> dict[str, float]:
        """Producers' seconds since the last update."""
        with self._lock:
            spent, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        spent["blocked"], self.buffer.blocked_seconds = self.buffer.blocked_seconds, 0.0
        return spent

    # --- the producers' side ---------------------------------------------------------------

    @contextlib.contextmanager
    def _producers(self) -> Generator[None]:
        """One thread a worker; a failure of either side ends both."""
        threads = [
            threading.Thread(target=self._produce, args=(index,), daemon=True)
            for index in range(self.config.workers)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.buffer.close()
            for thread in threads:
                thread.join(self.config.wait_seconds)

    def _produce(self, index: int) -> None:
        """One producer's thread; the learner raises what fails here."""
        with Crossing() as crossing:
            host = self._host(index)
            count = -(-self.config.groups // self.config.workers)
            try:
                while True:
                    claim = self.buffer.claim(count, timeout=self.config.wait_seconds)
                    self.folder.journal.claim(claim.groups, claim.version)
                    host = self._serve(host, index, claim.groups, claim.version)
            finally:
                host.close()
        if not isinstance(crossing.error, Closed):
            self.buffer.close(crossing.error)

    def _serve(self, host: Host, index: int, groups: Sequence[int], version: int) -> Host:
        """Have these groups generated, whatever happens to workers; returns the live one."""
        host, found = self._generate(host, index, groups, version)
        arrived = [
            self.auditor.group(number, trajectories)
            for number, trajectories in zip(groups, found.groups, strict=True)
        ]
        self.folder.journal.append(arrived)
        with self._lock:
            self._seconds["rollout"] += found.seconds
            self._seconds["sync"] += found.install_seconds
        for group in arrived:
            self.buffer.put(group.number, group)
        return host

    def _generate(
        self, host: Host, index: int, groups: Sequence[int], version: int
    ) -> tuple[Host, Generated]:
        """Ask; where the worker is gone, ask a new one."""
        restarts = 0
        while True:
            try:
                return host, host.generate(groups, version, self.config.wait_seconds)
            except WorkerDied:
                host.close()
                restarts += 1
                if restarts > RESTARTS:
                    raise
                host = self._host(index)

    def _host(self, index: int) -> Host:
        if self.config.placement == "threads":
            ready = self.copies.pop("worker", None) if index == 0 else None
            return ThreadHost(self.spec, ready)
        return HOSTS[self.config.placement](self.spec)


def _copy(model: LoadedModel) -> LoadedModel:
    """Another model of the same bits; no plan must be on it."""
    module = copy.deepcopy(model.module)
    return replace(model, module=module, config=module.config)
