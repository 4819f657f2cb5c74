"""Random legal schedules: what no engine author thought of, from a seed.

Every event is proposed at random and admitted by the same :class:`~.legal.Ledger` that engines
obey, so a fuzzed schedule is legal by construction, for every kind of state. It mixes chunks,
decodes, shared steps, padding rows, rejected drafts, prefix hits (also of a request on itself),
evictions, preemptions and resumes, and ends when every token of every request went through a
forward pass.

    zm localize smollm2-135m --left paged:fuzz:1 --right packed:packed
"""

import random
from collections.abc import Sequence

from ...kernels.errors import ScheduleError
from .base import (
    Event,
    Evict,
    Hit,
    Preempt,
    Request,
    Resume,
    Schedule,
    Slice,
    StateSpec,
    Step,
)
from .legal import Ledger, granule, shared_prefix


def fuzz_schedule(
    seed: int, requests: Sequence[Request], state_specs: Sequence[StateSpec]
) -> Schedule:
    """A random legal schedule that depends on nothing but its arguments."""
    return _Fuzzer(random.Random(seed), requests, state_specs).build()


class _Fuzzer:
    def __init__(
        self, rng: random.Random, requests: Sequence[Request], specs: Sequence[StateSpec]
    ) -> None:
        self.rng = rng
        self.requests = {request.id: request for request in requests}
        self.ledger = Ledger(specs, requests)
        self.grain = granule(specs)
        self.events: list[Event] = []
        self.unfinished = list(self.requests)
        self.disturbances = 2 + 2 * len(requests)
        self.largest = rng.choice((1, 5, self.grain, 3 * self.grain + 1, 1 << 30))
        if self.ledger.complaints:
            raise ScheduleError("cannot fuzz these requests: " + "; ".join(self.ledger.complaints))

    def build(self) -> Schedule:
        while self.unfinished:
            if self.disturbances and self.rng.random() < 0.4:
                self.disturbances -= 1
                self._disturb()
            self._resume()
            for request in [r for r in self.unfinished if not self._length(r)]:
                if self.rng.random() < 0.7:
                    self._try(self._hit(request))
            self._step()
        return Schedule(events=tuple(self.events))

    def _length(self, request: str) -> int:
        return self.ledger.cached[request].length

    def _try(self, event: Event | None) -> bool:
        """Append the event if there is one and it is legal now."""
        if event is None or self.ledger.check(event):
            return False
        self.ledger.apply(event)
        self.events.append(event)
        return True

    def _disturb(self) -> None:
        request = self.rng.choice(list(self.requests))
        match self.rng.choice(("evict", "preempt", "again")):
            case "evict":
                self._try(Evict(request=request))
            case "preempt" if request in self.unfinished:
                self._try(Preempt(request=request))
            case "again" if self._try(self._hit(request)) and request not in self.unfinished:
                self.unfinished.append(request)
            case _:
                pass

    def _hit(self, request: str) -> Hit | None:
        """A random hit: on the request itself when it has state, else on another's prefix."""
        target = self.requests[request]
        sources = [request] if self._length(request) else [r for r in self.requests if r != request]
        self.rng.shuffle(sources)
        for source in sources:
            longest = min(
                shared_prefix(target, self.requests[source]),
                self._length(source),
                len(target.tokens) - 1,
            )
            for upto in self._shuffled(range(self.grain, longest + 1, self.grain)):
                hit = Hit(request=request, source=source, upto=upto)
                if not self.ledger.check(hit):
                    return hit
        return None

    def _shuffled(self, values: range) -> list[int]:
        return self.rng.sample(values, len(values))

    def _resume(self) -> None:
        parked = [r for r in self.unfinished if self.ledger.cached[r].preempted]
        stuck = len(parked) == len(self.unfinished)
        for request in parked:
            if stuck or self.rng.random() < 0.3:
                self._try(Resume(request=request))

    def _step(self) -> None:
        ready = [r for r in self.unfinished if not self.ledger.cached[r].preempted]
        chosen = self.rng.sample(ready, self.rng.randint(1, len(ready)))
        padded = self.rng.randint(1, 9) if self.rng.random() < 0.3 else 0
        slices = tuple(self._slice(request) for request in chosen)
        if self._try(Step(slices=slices, padded_rows=padded)):
            self.unfinished = [
                r for r in self.unfinished if self._length(r) < len(self.requests[r].tokens)
            ]

    def _slice(self, request: str) -> Slice:
        start, end = self._length(request), len(self.requests[request].tokens)
        size = min(self.largest, end - start)
        size = self.rng.choice((1, self.rng.randint(1, size), size))
        whole = Slice(request=request, start=start, stop=start + size)
        if size > 1 and self.rng.random() < 0.25:
            keep = self.rng.randint(start + 1, start + size - 1)
            draft = Slice(request=request, start=start, stop=start + size, keep=keep)
            if not self.ledger.check(Step(slices=(draft,))):
                return draft
        return whole
