"""Schedules made from moves: small numbers that always mean something legal, and shrink well.

A **move** is what a batching policy might do next, in relative terms ("give request 1 seven more
tokens", "start request 2 from request 0's first page"). :func:`schedule_of` turns moves into a
legal schedule: what is not possible in the state reached so far is left out, so that any move may
be deleted or made smaller and the rest keeps its meaning. That is what lets a failing schedule
shrink to a few steps (:mod:`.fuzzing` draws moves with hypothesis; nothing here needs it).

    moves = (Advance(pieces=((0, 20, 0),)), Start(request=1, source=0, granules=1),
             Advance(pieces=((1, 1, 0), (0, 1, 0)), padded_rows=3))
    schedule_of(moves, requests, state_specs)

A schedule need not reach the end of a request: every token that it scores is compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..trainer.engines.base import (
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
from ..trainer.engines.legal import Ledger, granule, shared_prefix

Piece = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """One forward pass. pieces: (request, tokens, of which rejected afterwards) of each slice."""

    pieces: tuple[Piece, ...]
    padded_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A prefix hit, ``granules`` long where the shared prefix and the cache allow it.

    A request with state of its own can only go on from itself (source equal to request), or drops
    its state first ("A after B").
    """

    request: int
    source: int
    granules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Evict a request's state; preempt: it may not run until it is resumed (a second Drop does)."""

    request: int
    preempt: bool = False


Move = Advance | Start | Drop


def schedule_of(
    moves: Sequence[Move], requests: Sequence[Request], state_specs: Sequence[StateSpec]
) -> Schedule:
    """The legal schedule that the moves describe; it has no step when no move was possible."""
    return _Builder(requests, state_specs).build(moves)


class _Builder:
    def __init__(self, requests: Sequence[Request], specs: Sequence[StateSpec]) -> None:
        self.requests = requests
        self.ledger = Ledger(specs, requests)
        self.grain = granule(specs)

    def build(self, moves: Sequence[Move]) -> Schedule:
        events: list[Event] = []
        for move in moves:
            for event in self._events(move):
                if not self.ledger.check(event):
                    self.ledger.apply(event)
                    events.append(event)
        return Schedule(events=tuple(events))

    def _events(self, move: Move) -> Iterator[Event]:
        match move:
            case Advance():
                yield from self._step(move)
            case Start():
                yield from self._hit(move)
            case Drop():
                name = self._name(move.request)
                if self.ledger.cached[name].preempted:
                    yield Resume(request=name)
                else:
                    yield Preempt(request=name) if move.preempt else Evict(request=name)

    def _name(self, index: int) -> str:
        return self.requests[index % len(self.requests)].id

    def _step(self, move: Advance) -> Iterator[Step]:
        slices: dict[str, Slice] = {}
        for piece in move.pieces:
            cut = self._slice(*piece)
            if cut is not None and not self.ledger.check(Step(slices=(cut,))):
                slices.setdefault(cut.request, cut)
        if slices:
            yield Step(slices=tuple(slices.values()), padded_rows=move.padded_rows)

    def _slice(self, index: int, tokens: int, rejected: int) -> Slice | None:
        request = self.requests[index % len(self.requests)]
        start = self.ledger.cached[request.id].length
        stop = min(start + tokens, len(request.tokens))
        if stop <= start:
            return None
        keep = stop - rejected if 0 < rejected < stop - start else None
        return Slice(request=request.id, start=start, stop=stop, keep=keep)

    def _hit(self, move: Start) -> Iterator[Event]:
        target = self.requests[move.request % len(self.requests)]
        source = self.requests[move.source % len(self.requests)]
        cached = self.ledger.cached[target.id]
        if cached.length and source is not target:
            yield Evict(request=target.id)
        shared = min(
            shared_prefix(target, source),
            self.ledger.cached[source.id].length,
            len(target.tokens) - 1,
        )
        upto = min(move.granules * self.grain, shared - shared % self.grain)
        if upto > 0:
            yield Hit(request=target.id, source=source.id, upto=upto)
