"""The work buffer: which group may start, on which version, and when an update is complete.

Group n belongs to update u = n // groups. There are ``(lag + 1) * groups`` slots; group n takes
slot ``n % slots`` and may start only when the group before it in that slot has been learned from
*and* the version it led to is published. That is the same as ``u - published <= lag``, so no token
can be older than ``lag`` when its gradient is taken: where there is no free slot producers wait.
Nothing is dropped, nothing overtakes: the learner waits for the oldest group.

In deterministic mode group n starts on version max(0, u - lag), whatever the timing; in free mode
on the newest published one. There the learner, which would else run into an empty buffer and train
on whatever has just been drawn, keeps ``ahead`` updates before it: it takes update u once every
group up to update u + ahead has *started*. The group that starts next is therefore at least
``ahead`` versions old when its turn comes, and at most ``lag``. Neither side waits for the other to
finish: while update u is learned from, update u + ahead is being drawn.

What a killed run had claimed keeps its version: a resumed run draws the same responses from the
same weights. Claims are made in the order of groups, so their versions never fall.

    claim = buffer.claim(4, timeout=600)      # a producer
    buffer.put(claim.groups[0], group)
    groups = buffer.take(update, timeout=600) # the learner
    buffer.published(version)
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...kernels.errors import BudgetError, UsageError

G = TypeVar("G")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Groups to generate, all of one update, and the version to start on."""

    groups: tuple[int, ...]
    version: int


class Closed(Exception):
    """The run is over or has failed: whoever waits, stop."""


class WorkBuffer(Generic[G]):
    """See the module. Of a resumed run: ``held``, groups that arrived before it ended, and
    ``claimed``, the versions of those that were on their way."""

    def __init__(
        self,
        *,
        groups: int,
        lag: int,
        updates: int,
        version: int = 0,
        deterministic: bool = True,
        ahead: int = 0,
        held: Mapping[int, G] | None = None,
        claimed: Mapping[int, int] | None = None,
    ) -> None:
        self.groups, self.lag = groups, lag
        self.version = version
        self.deterministic = deterministic
        self.ahead = 0 if deterministic else min(ahead, lag)
        self.blocked_seconds = 0.0
        self._last = updates * groups
        self._arrived: dict[int, G] = dict(held or {})
        first = version * groups
        self._waiting = [n for n in range(first, self._last) if n not in self._arrived]
        self._waiting.reverse()  # the next to start is at the end
        self._claimed = {n: v for n, v in (claimed or {}).items() if n in self._waiting}
        self._started: dict[int, int] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False

    def claim(self, count: int, *, timeout: float) -> Claim:
        """Up to ``count`` groups of one update that may start now; waits for room.

        Raises Closed when there is nothing left to start, BudgetError after ``timeout`` seconds.
        """
        began = time.monotonic()
        with self._changed:
            self._wait(self._may_start, timeout, "for room in the work buffer")
            self.blocked_seconds += time.monotonic() - began
            if not self._waiting:
                raise Closed
            first = self._waiting[-1]
            start = self._start_of(first)
            claimed: list[int] = []
            while self._waiting and len(claimed) < count:
                number = self._waiting[-1]
                if number // self.groups != first // self.groups or self._start_of(number) != start:
                    break
                claimed.append(self._waiting.pop())
                self._claimed.pop(number, None)
            self._started.update(dict.fromkeys(claimed, start))
            self._changed.notify_all()
            return Claim(groups=tuple(claimed), version=start)

    def put(self, group: int, content: G) -> None:
        """A started group is complete."""
        with self._changed:
            if group not in self._started:
                raise UsageError(
                    f"group {group} was not claimed or arrived twice; claim it before it is put"
                )
            del self._started[group]
            self._arrived[group] = content
            self._changed.notify_all()

    def take(self, update: int, *, timeout: float) -> list[G]:
        """The groups of an update, in order; waits until all are there, and enough behind them."""
        wanted = range(update * self.groups, (update + 1) * self.groups)
        started = (update + self.ahead + 1) * self.groups
        with self._changed:
            self._wait(
                lambda: all(n in self._arrived for n in wanted) and self._started_below(started),
                timeout,
                f"for the groups of update {update}",
            )
            return [self._arrived.pop(n) for n in wanted]

    def published(self, version: int) -> None:
        """``version`` may be installed from now on; its update's slots are free."""
        with self._changed:
            self.version = version
            self._changed.notify_all()

    def oldest_needed(self) -> int:
        """No version below this one will be installed or looked at again.

        In deterministic mode that counts groups after the last one, so that a finished run can be
        resumed with more updates.
        """
        with self._changed:
            needed = [self.version, *self._started.values(), *self._claimed.values()]
            if self.deterministic:
                following = self._waiting[-1] if self._waiting else self._last
                needed.append(max(0, following // self.groups - self.lag))
            return min(needed)

    def close(self, failure: BaseException | None = None) -> None:
        """Whoever waits gets ``failure``, or Closed."""
        with self._changed:
            self._closed = True
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _may_start(self) -> bool:
        if not self._waiting:
            return True
        number = self._waiting[-1]
        room = number // self.groups - self.lag <= self.version
        return room and self._claimed.get(number, 0) <= self.version

    def _started_below(self, number: int) -> bool:
        """Whether the version of every group below ``number`` is settled."""
        return all(n in self._claimed for n in self._waiting if n < number)

    def _start_of(self, number: int) -> int:
        """The version that a group starts on, now that it may."""
        if self.deterministic:
            return max(0, number // self.groups - self.lag)
        return self._claimed.get(number, self.version)

    def _wait(self, ready: Callable[[], bool], timeout: float, what: str) -> None:
        if not self._changed.wait_for(lambda: self._closed or ready(), timeout):
            raise BudgetError(
                f"waited {timeout:.0f} s {what}; raise wait_seconds, or look at what the workers do"
            )
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Closed
