"""Continuous batching: which rows go into the next step, and who loses memory for it.

Each step takes one row of every decoding request, then prompt chunks, then new arrivals, until the
row budget is full. When pages run out, finished requests (kept only as prefix cache) are evicted,
oldest first; then the latest running request is preempted and later recomputed. Whatever happens is
an event of the executed schedule: it is handed to ``emit``, which carries it out before it returns.

    scheduler = Scheduler(requests, tokens, policy, pages, version=0, emit=engine_applies)
    while step := scheduler.next_step():
        scheduler.advance(step, tokens_sampled_in_it)
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .base import Event, Evict, Hit, Policy, Preempt, Request, Resume, Slice, Step
from .pages import Pools
from .prefixes import Prefixes, extend_keys


@dataclass(slots=True)
class InFlight:
    """One request on its way: all its tokens so far, and how many of them are computed.

    keys: granule keys of ``tokens``, as far as they were needed.
    """

    request: Request
    order: int
    tokens: list[int]
    computed: int = 0
    sampled: int = 0
    preempted: bool = False
    keys: list[bytes] = field(default_factory=list[bytes])

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def finished(self) -> bool:
        stopped = self.sampled > 0 and self.tokens[-1] in self.request.sampling.stop_ids
        return stopped or self.sampled >= self.request.sampling.max_new_tokens


class Scheduler:
    """Forms steps until every request is finished.

    tokens: by request id; sampled tokens are appended to these lists.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        tokens: Mapping[str, list[int]],
        policy: Policy,
        pages: Pools,
        *,
        version: int,
        emit: Callable[[Event], object],
    ) -> None:
        self.policy = policy
        self.pages = pages
        self.granule = pages.granule
        self.version = version
        self.emit = emit
        self.prefixes = Prefixes()
        flights = [
            InFlight(request=r, order=i, tokens=tokens[r.id]) for i, r in enumerate(requests)
        ]
        self.flights = {flight.id: flight for flight in flights}
        self.waiting = deque(flights)
        self.running: list[InFlight] = []
        self.idle: dict[str, InFlight] = {}  # finished; their pages serve as prefix cache

    @property
    def unfinished(self) -> bool:
        """Whether any request still has tokens to draw."""
        return bool(self.running or self.waiting)

    def next_step(self) -> Step | None:
        """The next step, its pages taken; None when all requests are finished."""
        if not self.unfinished:
            return None
        room = self.policy.max_step_tokens
        chosen: dict[str, Slice] = {}
        before = len(self.waiting)
        for flight in sorted(self.running, key=lambda f: (len(f.tokens) - f.computed > 1, f.order)):
            room = self._continue(flight, chosen, room)
        if len(self.waiting) == before:  # nobody was preempted in this step
            self._admit(chosen, room)
        assert chosen, "a step without rows"
        return Step(slices=tuple(chosen.values()))

    def draws(self, step: Step) -> list[str]:
        """Requests whose last row in ``step`` yields a new token."""
        return [
            piece.request
            for piece in step.slices
            if piece.stop == len(self.flights[piece.request].tokens)
        ]

    def advance(self, step: Step, drawn: Mapping[str, int]) -> None:
        """``step`` was computed; ``drawn`` has the new token of each request that drew one."""
        for piece in step.slices:
            flight = self.flights[piece.request]
            flight.computed = piece.stop
            if self.policy.prefix_cache:
                self.prefixes.hold(flight.id, self._keys(flight)[: piece.stop // self.granule])
            if flight.id in drawn:
                flight.tokens.append(drawn[flight.id])
                flight.sampled += 1
            if flight.finished:
                self.running.remove(flight)
                self.idle[flight.id] = flight
                if not self.policy.prefix_cache:
                    self._evict(flight.id)

    def publish(self, version: int) -> None:
        """New weights are installed: nothing is cached, and whoever ran starts over, in order."""
        self.version = version
        self.prefixes.clear()
        self.idle.clear()
        again = sorted([*self.running, *self.waiting], key=lambda flight: flight.order)
        for flight in again:
            flight.computed, flight.preempted = 0, False
            flight.keys.clear()
        self.waiting = deque(again)
        self.running = []

    def _keys(self, flight: InFlight) -> list[bytes]:
        adapter = flight.request.adapter
        extend_keys(
            flight.keys, flight.tokens, self.granule, version=self.version, adapter=adapter
        )
        return flight.keys

    def _continue(self, flight: InFlight, chosen: dict[str, Slice], room: int) -> int:
        """Give a running request its rows, taking pages from others if need be; the room left."""
        size = min(room, len(flight.tokens) - flight.computed)
        if not size or flight.preempted:
            return room
        stop = flight.computed + size
        while self.pages.is_short(flight.id, stop):
            if self.idle:
                self._evict(next(iter(self.idle)))
                continue
            victim = max(self.running, key=lambda f: f.order)
            taken = chosen.pop(victim.id, None)
            room += taken.stop - taken.start if taken else 0
            self._preempt(victim)
            if victim is flight:
                return room
        self.pages.extend(flight.id, stop)
        chosen[flight.id] = Slice(request=flight.id, start=flight.computed, stop=stop)
        return room - size

    def _admit(self, chosen: dict[str, Slice], room: int) -> None:
        """Start waiting requests in order, each from its longest cached prefix."""
        for flight in list(self.waiting):
            if not room or len(self.running) >= self.policy.max_running:
                return
            keys = self._keys(flight)[: (len(flight.tokens) - 1) // self.granule]
            count, source = self.prefixes.longest(keys) if self.policy.prefix_cache else (0, None)
            if count < len(keys) and self.prefixes.is_promised(keys[count]):
                continue  # another request is computing this very page: wait and share it
            if not self._fits(flight, count, source):
                return
            self._start(flight, count, source)
            size = min(room, len(flight.tokens) - flight.computed)
            stop = flight.computed + size
            while self.pages.is_short(flight.id, stop):
                self._evict(next(iter(self.idle)))
            self.pages.extend(flight.id, stop)
            chosen[flight.id] = Slice(request=flight.id, start=flight.computed, stop=stop)
            room -= size
            if self.policy.prefix_cache:
                self.prefixes.promise(flight.id, keys)

    def _fits(self, flight: InFlight, count: int, source: str | None) -> bool:
        """Whether all tokens known so far fit without preempting anybody."""
        return self.pages.fits(len(flight.tokens), self.idle, source, count * self.granule)

    def _start(self, flight: InFlight, count: int, source: str | None) -> None:
        if flight.preempted:
            self.emit(Resume(request=flight.id))
            flight.preempted = False
        if source:
            flight.computed = count * self.granule
            self.emit(Hit(request=flight.id, source=source, upto=flight.computed))
            self.prefixes.hold(flight.id, flight.keys[:count])
        self.waiting.remove(flight)
        self.running.append(flight)

    def _evict(self, request: str) -> None:
        self.emit(Evict(request=request))
        self.prefixes.drop(request)
        del self.idle[request]

    def _preempt(self, flight: InFlight) -> None:
        self.emit(Preempt(request=flight.id))
        self.prefixes.drop(flight.id)
        flight.computed, flight.preempted = 0, True
        self.running.remove(flight)
        self.waiting.appendleft(flight)
