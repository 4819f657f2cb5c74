"""The producers' side of a run: claim, generate, audit, keep, hand over.

    producers = Producers(...)
    with producers.at_work():
        ...                              # the learner takes from the buffer meanwhile

One thread a worker claims groups of the work buffer and has them generated; it claims the next ones
as soon as the answer is there. One thread more takes the answers, has the update's slice audited in
one forward for all groups of an answer, writes them to the journal and puts them into the buffer.
What fails in any of them closes the buffer with its error, which the learner raises.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

from .audit import Group
from .buffer import Claim, Closed, WorkBuffer
from .config import TrainConfig
from .crossing import Crossing
from .hosts import RESTARTS, Host, WorkerDied
from .journal import Journal
from .records import Trajectory
from .worker import Generated


class Audits(Protocol):
    """What scores arrived groups: :class:`.audit.Auditor`, here or in a process of its own."""

    def groups(
        self, numbers: tuple[int, ...], groups: tuple[tuple[Trajectory, ...], ...]
    ) -> list[Group]:
        """The arrived groups, each with its share of the update's audit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Producers' seconds: drawing, installing weights, waiting for room, auditing."""

    rollout: float = 0.0
    install: float = 0.0
    blocked: float = 0.0
    audit: float = 0.0


class Producers:
    """See the module. host: makes worker ``index``. clock: seconds, for the audit's."""

    def __init__(
        self,
        config: TrainConfig,
        buffer: WorkBuffer[Group],
        journal: Journal,
        auditor: Audits,
        host: Callable[[int], Host],
        clock: Callable[[], float],
    ) -> None:
        self.config, self.buffer, self.journal = config, buffer, journal
        self.auditor, self._host, self._clock = auditor, host, clock
        self._answers: queue.SimpleQueue[tuple[Claim, Generated] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._seconds = [0.0, 0.0, 0.0]

    def spent(self) -> Spent:
        """Since the last call."""
        with self._lock:
            (rollout, install, audit), self._seconds = self._seconds, [0.0, 0.0, 0.0]
        blocked, self.buffer.blocked_seconds = self.buffer.blocked_seconds, 0.0
        return Spent(rollout=rollout, install=install, blocked=blocked, audit=audit)

    @contextlib.contextmanager
    def at_work(self) -> Generator[None]:
        """A failure of either side ends both."""
        threads = [
            threading.Thread(target=self._produce, args=(index,), daemon=True)
            for index in range(self.config.workers)
        ]
        keeper = threading.Thread(target=self._keep, daemon=True)
        for thread in (*threads, keeper):
            thread.start()
        try:
            yield
        finally:
            self.buffer.close()
            for thread in threads:
                thread.join(self.config.wait_seconds)
            self._answers.put(None)
            keeper.join(self.config.wait_seconds)

    def _produce(self, index: int) -> None:
        """One worker's thread."""
        with Crossing() as crossing:
            host = self._host(index)
            count = -(-self.config.groups // self.config.workers)
            try:
                while True:
                    claim = self.buffer.claim(count, timeout=self.config.wait_seconds)
                    self.journal.claim(claim.groups, claim.version)
                    host, found = self._generate(host, index, claim)
                    self._answers.put((claim, found))
            finally:
                host.close()
        if not isinstance(crossing.error, Closed):
            self.buffer.close(crossing.error)

    def _generate(self, host: Host, index: int, claim: Claim) -> tuple[Host, Generated]:
        """Ask; where the worker is gone, ask a new one. Returns the live one too."""
        restarts = 0
        while True:
            try:
                wait = self.config.wait_seconds
                return host, host.generate(claim.groups, claim.version, wait)
            except WorkerDied:
                host.close()
                restarts += 1
                if restarts > RESTARTS:
                    raise
                host = self._host(index)

    def _keep(self) -> None:
        """The thread that audits and keeps what arrived."""
        with Crossing() as crossing:
            while (answer := self._answers.get()) is not None:
                claim, found = answer
                began = self._clock()
                arrived = self.auditor.groups(claim.groups, found.groups)
                audited = self._clock() - began
                self.journal.append(arrived)
                with self._lock:
                    spent = (found.seconds, found.install_seconds, audited)
                    self._seconds = [a + b for a, b in zip(self._seconds, spent, strict=True)]
                for group in arrived:
                    self.buffer.put(group.number, group)
        if crossing.error is not None:
            self.buffer.close(crossing.error)
