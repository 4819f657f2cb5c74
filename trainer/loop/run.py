"""The loop on one page: producers, learner and publication at the same time.

    outcome = train(Setup(...), Path("runs/1"), sink=writer.update)

Producers (``producers.py``) claim groups from the work buffer, have a worker generate them, have a
slice audited, write them to the journal and put them back. The learner takes the oldest complete
update, checks its lag, steps, checks the kernel term, has the new version published and writes a
checkpoint when one is due; a thread beside it publishes, another answers held-out problems.
Whatever fails anywhere ends the run with its own error; ``resume=True`` goes on from the last
checkpoint, the journal and the published versions: in deterministic mode with the bits of the run
that was never interrupted; in free mode without losing a group that had arrived, and with those
that were on their way drawn again from the version that they had started on.

``pytest tests/trainer/loop`` exercises it; the command is ``zm train``.
"""

import contextlib
import copy
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from ...kernels.errors import NonFiniteError
from ...kernels.files import replace_whole
from ...model_recipes.models import LoadedModel, load_model
from ...model_recipes.plan import Plan
from ...model_recipes.state import named_state
from ..losses.catalogue import loss_named
from ..publication.shelf import Shelf
from .audit import Auditor, Group, audit_of, old_of, require_zero
from .buffer import WorkBuffer
from .config import TrainConfig
from .evaluation import Evaluation, Evaluator, settings_of
from .export import export
from .folder import RunFolder
from .hosts import HOSTS, AuditHost, Host, ThreadHost, auditor_of
from .learner import Learner
from .limits import check_lag, check_loss, fewer_rows, named_memory, rows_of
from .producers import Producers
from .publisher import Publisher
from .records import Loss, Task, Trajectory, UpdateFacts
from .trajectories import dealt, to_json
from .worker import WorkerSpec

if TYPE_CHECKING:
    from ..fsdp.learner import ShardedLearner

DUMP = "stopped.json"

Sink = Callable[[UpdateFacts], None]
Evaluated = Callable[[Evaluation], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is trained, on what. ``model``, ``dtype``, ``device``, ``model_seed``: for loading.

    held_out: asks and scores what is evaluated; None takes ``task``.
    """

    model: str
    plan: Plan
    task: Task
    config: TrainConfig
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    model_seed: int = 0
    held_out: Task | None = None


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
    evaluated: Evaluated = lambda found: None,
    model: LoadedModel | None = None,
) -> Outcome:
    """Run to ``config.updates`` updates, then export. ``sink`` gets every update's facts, and
    ``evaluated`` every evaluation's figures, both in the calling thread.

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
            run.to_the_end(sink, evaluated)
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
        check_loss(loss, config)
        base = model or load_model(
            setup.model, dtype=setup.dtype, device=setup.device, seed=setup.model_seed
        )
        own = ("worker", "evaluator") if config.placement == "threads" else ()
        skipped = {"evaluator"} if config.evaluate_every is None else set[str]()
        self.copies = {name: _copy(base) for name in own if name not in skipped}
        self.spare = _copy(base)
        self.learner = self._learner(base, loss)
        self.spec = WorkerSpec(
            model=setup.model, dtype=setup.dtype, device=setup.device, model_seed=setup.model_seed,
            plan=setup.plan, task=setup.task, config=config, versions=folder.versions.folder,
            threads=None if config.placement == "threads" else 1,
        )  # fmt: skip
        self.auditor = self._auditor(on_gpu=base.device.type == "cuda")
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
            ahead=config.ahead,
            held=folder.journal.held(),
            claimed=folder.journal.claimed(),
        )
        self.producers = Producers(
            config, self.buffer, folder.journal, self.auditor, self._host, time.perf_counter
        )
        self._pending: tuple[UpdateFacts, Future[str]] | None = None
        self.evaluator: Evaluator | None = None
        if config.evaluate_every is not None:
            self.evaluator = Evaluator(
                self._evaluating, config, folder.versions, folder.path, start=version
            )
        shares = config.share_weights
        shares = base.device.type == "cuda" or config.apart if shares is None else shares
        self.publisher = Publisher(
            folder.versions, self.buffer.published, self._written, self.buffer.close,
            timeout=config.wait_seconds,
            shelf=Shelf(folder.versions.folder, readers=config.workers, wanted=config.lag + 2)
            if shares else None,
        )  # fmt: skip
        self._began = time.monotonic()

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
            device="cpu" if setup.device == "cpu" else "cuda",
        )
        return ShardedLearner(base, config, spec)

    def _auditor(self, *, on_gpu: bool) -> Auditor | AuditHost:
        asked = self.config.audit_apart
        apart = on_gpu and self.config.placement != "threads" if asked is None else asked
        return AuditHost(self.spec) if apart else auditor_of(self.spec, self.spare)

    def to_the_end(self, sink: Sink, evaluated: Evaluated) -> None:
        """All updates that are left, or as many as there is time for.

        An update's facts are told while the next one's gradient is on the device; before a
        checkpoint all are: what is kept is not made again.
        """
        if self.learner.version < self.config.updates:
            with self.producers.at_work():
                late = False
                while self.learner.version < self.config.updates and not late:
                    told = self._update(lambda: self._tell(sink))
                    self._pending = told
                    late = self._is_late()
                    if self._checkpoint_is_due(late):
                        self._tell(sink)
                        self._checkpoint()
                    for found in self.evaluator.fresh() if self.evaluator else ():
                        evaluated(found)
                self._tell(sink)
        for found in self.evaluator.finish() if self.evaluator else ():
            evaluated(found)

    def _tell(self, sink: Sink) -> None:
        """The last update's facts, which wait for the digest of its weights."""
        if self._pending is not None:
            facts, root = self._pending
            self._pending = None
            self.root = root.result(self.config.wait_seconds)
            sink(replace(facts, weights_root=self.root))

    def _is_late(self) -> bool:
        limit = self.config.stop_after
        return limit is not None and time.monotonic() - self._began > limit

    def close(self) -> None:
        """Take the plan off this process's models."""
        self.publisher.close()
        if self.evaluator is not None:
            self.evaluator.close()
        self.learner.close()
        self.auditor.close()

    def export(self) -> Path:
        """The last published version as a transformers checkpoint; after :meth:`close`."""
        model, version = self.spare, self.learner.version
        with torch.no_grad():
            weights = self.folder.versions.read(version)
            for name, tensor in named_state(model.module).items():
                tensor.copy_(weights[name])
        return export(model, self.folder.path / "export")

    # --- the learner's side ----------------------------------------------------------------

    def _update(self, meanwhile: Callable[[], None]) -> "tuple[UpdateFacts, Future[str]]":
        """One update. meanwhile: work of this thread for the time that the device copies."""
        update, config = self.learner.version, self.config
        began = time.perf_counter()
        groups = self.buffer.take(update, timeout=config.wait_seconds)
        waited = time.perf_counter() - began
        trajectories = [each for group in groups for each in group.trajectories]
        check_lag(update, trajectories, config.lag)
        if config.shuffle_rewards:
            trajectories = dealt(trajectories, seed=f"shuffle/{config.seed}/{update}")
        try:
            with named_memory(f"update {update}, {rows_of(config)}", fewer_rows(config)):
                step = self.learner.step(trajectories, old_of(groups) if self.needs_old else None)
        except NonFiniteError:
            self._dump(update, trajectories)
            raise
        began = time.perf_counter()
        copied = self.publisher.copy(self.learner.weights(), self.learner.version)
        published = time.perf_counter() - began
        audit = audit_of(groups, step.batch, step.logp)
        if config.require_zero:
            require_zero(audit, update)
        began = time.perf_counter()
        root = self.publisher.publish(copied)
        published += time.perf_counter() - began
        meanwhile()
        after = None
        if config.measure_moves:
            self.publisher.wait()
            after = self.auditor.under(trajectories, self.learner.version)
        spent = self.producers.spent()
        facts = UpdateFacts(
            batch=step.batch,
            logp=step.logp,
            output=step.output,
            audit=audit,
            gradient_norm=step.gradient_norm,
            learning_rate=step.learning_rate,
            cap=config.lag,
            rollout_seconds=spent.rollout,
            train_seconds=step.seconds,
            sync_seconds=published,
            wait_seconds=waited,
            blocked_seconds=spent.blocked,
            install_seconds=spent.install,
            audit_seconds=spent.audit,
            tokens=step.tokens,
            weights_root="",
            plan_digest=self.setup.plan.digest,
            after=after,
        )
        return facts, root

    def _written(self, version: int) -> None:
        """A version is on disk: it may be evaluated; delete what nobody needs any more."""
        needed = self.buffer.oldest_needed()
        if self.evaluator is not None:
            self.evaluator.consider(version)
            needed = self.evaluator.oldest_needed(needed)
        self.folder.versions.keep_from(needed)

    def _dump(self, update: int, trajectories: Sequence[Trajectory]) -> None:
        """What the stopped update was about: ids, versions, recorded logprobs, rewards."""
        found = {"update": update, "trajectories": [to_json(each) for each in trajectories]}
        replace_whole(self.folder.path / DUMP, json.dumps(found) + "\n")

    def _checkpoint_is_due(self, late: bool) -> bool:
        version = self.learner.version
        last = late or version >= self.config.updates
        return last or version % self.config.checkpoint_every == 0

    def _checkpoint(self) -> None:
        self.publisher.wait()
        self.folder.checkpoints.save(self.learner.save, self.learner.version)
        self.folder.journal.keep_from(self.folder.checkpoints.oldest() * self.config.groups)

    def _evaluating(self) -> Host:
        """The evaluator's own worker."""
        config = settings_of(self.config)
        task = self.setup.held_out or self.setup.task
        spec = replace(self.spec, config=config, task=task)
        if config.placement == "threads":
            return ThreadHost(spec, self.copies.pop("evaluator", None))
        return HOSTS[config.placement](spec)

    def _host(self, index: int) -> Host:
        if self.config.placement == "threads":
            ready = self.copies.pop("worker", None) if index == 0 else None
            return ThreadHost(self.spec, ready)
        return HOSTS[self.config.placement](replace(self.spec, index=index))


def _copy(model: LoadedModel) -> LoadedModel:
    """Another model of the same bits; no plan must be on it."""
    module = copy.deepcopy(model.module)
    return replace(model, module=module, config=module.config)
