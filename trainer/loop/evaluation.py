"""Held-out problems, answered while training goes on: pass@1 and mean@k of a version.

    evaluator = Evaluator(host, config, versions, folder, start=0)
    evaluator.consider(10)          # after version 10 was published; returns at once
    evaluator.fresh()               # evaluations that are done and were not told yet
    evaluator.finish()              # wait for what is left

An evaluator has a worker of its own: engine, copy of the model, thread. It takes published versions
from the run folder and gives the training run nothing, so rollouts do not stop for it and no bit of
the training depends on it. It samples with the paged engine, whatever samples for training: aligned
engines draw by the same logprobs. A version that waits for its evaluation stays in the folder
(:meth:`oldest_needed`); what was cut off by a kill is made again on resuming, with the same
problems and the same seeds, as every evaluation of a run.

Problems are the task's prompts from number ``HELD_OUT`` on, which training does not reach, with a
random source of their own; how a task keeps those apart from its training problems is its business
(`gym/` and `tool/` tasks take another dataset seed). A response is *solved* at a reward of 1 or
more.
"""

import json
import math
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...kernels.errors import BudgetError, CheckpointError, DiskError
from ...kernels.files import replace_whole
from .config import TrainConfig
from .crossing import Crossing
from .hosts import Host, WorkerDied
from .records import Trajectory
from .versions import Versions

FILE = "evaluations.jsonl"
HELD_OUT = 10**9
SOLVED = 1.0
RESTARTS = 3
"""How often one evaluation may lose its worker before the run gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One version on all held-out problems, ``samples`` (k) responses each.

    pass_at_1: share of problems whose first response is solved. mean_at_k: share of all responses
    that are solved. standard_error: of mean_at_k, over problems. reward: mean of all responses.
    """

    version: int
    weights_root: str
    problems: int
    samples: int
    pass_at_1: float
    mean_at_k: float
    standard_error: float
    reward: float
    seconds: float


def settings_of(config: TrainConfig) -> TrainConfig:
    """What an evaluating worker runs by."""
    return config.model_copy(
        update={
            "group_size": config.evaluate_samples,
            "partial": "forbidden",
            "rollout": "paged",
            "loss": "reinforce_zero",
            "apart": False,
        }
    )


def measured(
    groups: Sequence[Sequence[Trajectory]], *, version: int, root: str, seconds: float
) -> Evaluation:
    """The figures of scored responses, a group a problem."""
    rewards = [[float(each.reward or 0.0) for each in group] for group in groups]
    shares = [statistics.fmean(reward >= SOLVED for reward in group) for group in rewards]
    spread = statistics.variance(shares) / len(shares) if len(shares) > 1 else 0.0
    return Evaluation(
        version=version,
        weights_root=root,
        problems=len(groups),
        samples=len(groups[0]),
        pass_at_1=statistics.fmean(group[0] >= SOLVED for group in rewards),
        mean_at_k=statistics.fmean(shares),
        standard_error=math.sqrt(spread),
        reward=statistics.fmean(reward for group in rewards for reward in group),
        seconds=seconds,
    )


class Evaluator:
    """See the module. host: makes the worker. start: version that the run begins or goes on at."""

    def __init__(
        self,
        host: Callable[[], Host],
        config: TrainConfig,
        versions: Versions,
        folder: Path,
        *,
        start: int,
    ) -> None:
        self.config, self.versions, self.file = config, versions, folder / FILE
        self._make = host
        done = [each for each in read_evaluations(folder) if each.version <= start]
        try:
            replace_whole(self.file, "".join(map(_line, done)))
        except OSError as error:
            raise _no_room(self.file, error) from error
        self._done = {each.version for each in done}
        self._fresh: list[Evaluation] = []
        self._changed = threading.Condition()
        self._ended, self._crossing = False, Crossing()
        present = set(versions.present())
        self._pending = [v for v in range(start + 1) if self._due(v) and v in present]
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def consider(self, version: int) -> None:
        """``version`` was published; raises what an earlier evaluation failed with."""
        if self._crossing.error is not None:
            raise self._crossing.error
        with self._changed:
            if self._due(version) and version not in self._pending:
                self._pending.append(version)
                self._changed.notify_all()

    def oldest_needed(self, otherwise: int) -> int:
        """No version below this one will be looked at; ``otherwise`` where none is waiting."""
        with self._changed:
            return min([*self._pending, otherwise])

    def fresh(self) -> list[Evaluation]:
        """What was finished since the last call."""
        with self._changed:
            found, self._fresh = self._fresh, []
            return found

    def finish(self) -> list[Evaluation]:
        """Wait for every pending evaluation; what :meth:`fresh` did not give yet."""
        limit = self.config.wait_seconds * (1 + len(self._pending))
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended or not self._pending, limit):
                raise BudgetError(
                    f"waited {limit:.0f} s for the evaluation of version {self._pending[0]}; raise "
                    "wait_seconds, or lower evaluate_problems"
                )
        if self._crossing.error is not None:
            raise self._crossing.error
        return self.fresh()

    def close(self) -> None:
        """End the thread and its worker; an evaluation that runs is finished first."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(self.config.wait_seconds)

    def _due(self, version: int) -> bool:
        every = self.config.evaluate_every
        due = every is not None and (version % every == 0 or version == self.config.updates)
        return due and version not in self._done

    def _work(self) -> None:
        """The thread: one pending version after the other."""
        host: Host | None = None
        with self._crossing:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._ended or self._pending)
                    if self._ended:
                        break
                    version = self._pending[0]
                host, found = self._evaluate(host or self._make(), version)
                try:
                    with self.file.open("a", encoding="utf-8") as opened:
                        opened.write(_line(found))
                except OSError as error:
                    raise _no_room(self.file, error) from error
                with self._changed:
                    self._pending.remove(version)
                    self._done.add(version)
                    self._fresh.append(found)
                    self._changed.notify_all()
        if host is not None:
            host.close()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _evaluate(self, host: Host, version: int) -> tuple[Host, Evaluation]:
        problems = range(HELD_OUT, HELD_OUT + self.config.evaluate_problems)
        restarts = 0
        while True:
            try:
                made = host.generate(problems, version, self.config.wait_seconds)
                break
            except WorkerDied:
                host.close()
                restarts += 1
                if restarts > RESTARTS:
                    raise
                host = self._make()
        root = self.versions.root(version)
        return host, measured(made.groups, version=version, root=root, seconds=made.seconds)


def read_evaluations(folder: Path) -> list[Evaluation]:
    """A run's evaluations by version. A last line without its end (a killed run) is left out."""
    file = folder / FILE
    if not file.is_file():
        return []
    found: list[Evaluation] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            found.append(Evaluation(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"line {number} of {file} is no evaluation ({error}); delete the file, and the "
                "run goes on without its earlier evaluations"
            ) from error
    return sorted(found, key=lambda each: each.version)


def _line(found: Evaluation) -> str:
    return json.dumps(asdict(found)) + "\n"


def _no_room(file: Path, error: OSError) -> DiskError:
    return DiskError(f"cannot write {file}: {error}; free some space, then resume")
