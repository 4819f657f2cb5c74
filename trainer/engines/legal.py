"""What a schedule may do: one set of rules for the fuzzer, the engines and schedule files.

:func:`legal` replays a schedule against what every site keeps (:class:`~.base.StateSpec`) and
returns each violation as a sentence with its event's index and the next step. An empty list means
legal. The :class:`Ledger` underneath is the same rules one event at a time; the fuzzer proposes
events to it.

What each kind of state allows:

    kind                   hit at                       rolled back (keep < stop)
    kv, latent, indexer    multiples of the granule     if the spec says so
    window                 the same, while the keys     if the spec says so
                           in the window still exist
    compressed             multiples of the granule     if the spec says so; else inside the open
                                                        granule, or to a granule boundary
    recurrent, conv        snapshots                    if the spec says so; else to a snapshot

A hit whose source is the request itself means that the request is sent again ("A after A"): it
goes on from its own cached prefix. Numbers, pages and memory are not here: those are the engine's.

    pytest tests/trainer/test_legal.py
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...kernels.errors import ScheduleError
from .base import (
    Event,
    Evict,
    Hit,
    Preempt,
    Publish,
    Request,
    Resume,
    Schedule,
    Slice,
    StateSpec,
    Step,
)


@dataclass(slots=True)
class Cached:
    """What is cached of one request: positions ``[0, length)``, of which windows hold only the end.

    oldest: by site, the first position whose keys still exist.
    """

    length: int = 0
    preempted: bool = False
    oldest: dict[str, int] = field(default_factory=dict[str, int])


def legal(
    schedule: Schedule,
    state_specs: Sequence[StateSpec],
    requests: Sequence[Request],
    *,
    version: int | None = None,
) -> list[str]:
    """All violations of ``schedule``, in order; empty means legal.

    version: the engine's weight version before the schedule; the first Publish must exceed it.
    """
    ledger = Ledger(state_specs, requests, version=version)
    violations = list(ledger.complaints)
    for index, event in enumerate(schedule.events):
        violations += (f"event {index} ({type(event).__name__}): {v}" for v in ledger.apply(event))
    return violations


def require_legal(
    schedule: Schedule,
    state_specs: Sequence[StateSpec],
    requests: Sequence[Request],
    *,
    version: int | None = None,
) -> None:
    """Raise :class:`ScheduleError` with every violation, or return."""
    violations = legal(schedule, state_specs, requests, version=version)
    if violations:
        raise ScheduleError(
            f"illegal schedule, {len(violations)} violation(s):\n  " + "\n  ".join(violations)
        )


def granule(state_specs: Iterable[StateSpec]) -> int:
    """The smallest step between positions where a hit may land at every site."""
    return math.lcm(*(math.lcm(s.granule, s.snapshot_every or 1) for s in state_specs), 1)


def shared_prefix(left: Request, right: Request) -> int:
    """Number of equal leading tokens; 0 when the adapters differ."""
    if left.adapter != right.adapter:
        return 0
    for index, (a, b) in enumerate(zip(left.tokens, right.tokens, strict=False)):
        if a != b:
            return index
    return min(len(left.tokens), len(right.tokens))


class Ledger:
    """Replays events and says what is wrong with each; state after an illegal event is a guess."""

    def __init__(
        self,
        state_specs: Sequence[StateSpec],
        requests: Sequence[Request],
        *,
        version: int | None = None,
    ) -> None:
        self.specs = tuple(state_specs)
        self.requests = {request.id: request for request in requests}
        self.cached = {request.id: Cached() for request in requests}
        self.version = version
        self.complaints = [*_spec_complaints(self.specs), *_request_complaints(requests)]

    def check(self, event: Event) -> list[str]:
        """Violations of ``event`` in the present state, which is left as it is."""
        match event:
            case Step():
                return list(self._check_step(event))
            case Publish():
                return list(self._check_publish(event))
            case Hit() | Evict() | Preempt() | Resume() if event.request not in self.requests:
                return [f"unknown request {event.request!r}; {self._known()}"]
            case Hit():
                return list(self._check_hit(event))
            case Evict():
                return list(self._check_evict(event))
            case Preempt():
                return list(self._check_preempt(event))
            case Resume():
                return list(self._check_resume(event))

    def apply(self, event: Event) -> list[str]:
        """Check ``event``, then let it happen."""
        violations = self.check(event)
        match event:
            case Step():
                for piece in event.slices:
                    self._advance(piece)
            case Publish():
                self.version = event.version
                for request in self.cached:
                    self._drop(request)
            case Hit():
                self._land(event)
            case Evict():
                self._drop(event.request)
            case Preempt() | Resume():
                self._drop(event.request, preempted=isinstance(event, Preempt))
        return violations

    def _known(self) -> str:
        return "the requests are " + (", ".join(map(repr, self.requests)) or "none")

    # --- steps ---------------------------------------------------------------------------------

    def _check_step(self, step: Step) -> Iterable[str]:
        if step.padded_rows < 0:
            yield f"padded_rows is {step.padded_rows}; use 0 or more"
        if not step.slices and step.padded_rows <= 0:
            yield "the step has no rows; give it a slice or leave it out"
        seen: set[str] = set()
        for piece in step.slices:
            if piece.request in seen:
                yield (
                    f"request {piece.request!r} appears twice in one step; "
                    "join the slices or use two steps"
                )
            elif piece.request not in self.requests:
                yield f"unknown request {piece.request!r}; {self._known()}"
            else:
                yield from self._check_slice(piece)
            seen.add(piece.request)

    def _check_slice(self, piece: Slice) -> Iterable[str]:
        cached = self.cached[piece.request]
        known = len(self.requests[piece.request].tokens)
        name = f"slice [{piece.start}, {piece.stop}) of request {piece.request!r}"
        if cached.preempted:
            yield f"{name}: the request is preempted; put a Resume before this step"
        if piece.stop <= piece.start:
            yield f"{name} is empty; stop must exceed start"
        if piece.start < 0:
            yield f"{name} starts before the first token; start at 0"
        elif piece.start > cached.length:
            yield (
                f"{name} leaves a gap: the state ends at {cached.length}; "
                f"start there, or add the missing slice or Hit"
            )
        elif piece.start < cached.length:
            yield (
                f"{name} overlaps state that ends at {cached.length}; "
                f"start there, or Evict the request to compute it again"
            )
        if piece.stop > known:
            yield (
                f"{name} reaches future positions: only {known} tokens are known; "
                f"stop at {known} or give the request more tokens"
            )
        if piece.keep is not None:
            yield from self._check_keep(piece, piece.keep, name)

    def _check_keep(self, piece: Slice, keep: int, name: str) -> Iterable[str]:
        if not piece.start <= keep <= piece.stop:
            bounds = f"[{piece.start}, {piece.stop}]"
            yield f"{name}: keep {keep} is outside {bounds}; keep part of the slice"
            return
        if keep == piece.stop:
            return
        for spec in self.specs:
            if spec.rollback:
                continue
            if spec.kind in ("kv", "latent", "indexer", "window"):
                yield (
                    f"{name}: {spec.site} ({spec.kind}) cannot be rolled back to {keep}; "
                    f"keep {piece.stop}"
                )
                continue
            every = spec.snapshot_every or spec.granule
            still_open = spec.kind == "compressed" and keep // every == piece.stop // every
            if keep % every and not still_open:
                yield (
                    f"{name}: {spec.site} ({spec.kind}) can go back only to its snapshots, and "
                    f"{keep} is not a multiple of {every}; keep {keep - keep % every} if the slice "
                    f"holds it, or {piece.stop}"
                )

    def _advance(self, piece: Slice) -> None:
        cached = self.cached.get(piece.request)
        if cached is not None:
            cached.length = max(0, piece.stop if piece.keep is None else piece.keep)
            self._forget(cached)

    def _forget(self, cached: Cached) -> None:
        """Keys that fell out of a window are gone for good; a rollback brings back none."""
        for spec in self.specs:
            if spec.window is not None:
                gone = max(0, cached.length - spec.window)
                cached.oldest[spec.site] = max(cached.oldest.get(spec.site, 0), gone)

    # --- hits ----------------------------------------------------------------------------------

    def _check_hit(self, hit: Hit) -> Iterable[str]:
        if hit.source not in self.requests:
            yield f"unknown source {hit.source!r}; {self._known()}"
            return
        target, source = self.cached[hit.request], self.cached[hit.source]
        request = self.requests[hit.request]
        again = hit.request == hit.source
        if target.preempted:
            yield f"request {hit.request!r} is preempted; put its Resume before the Hit"
        if target.length and not again:
            yield (
                f"request {hit.request!r} already has state for [0, {target.length}); "
                "Evict it first"
            )
        if hit.upto <= 0:
            yield f"upto is {hit.upto}; a hit covers at least one granule"
            return
        if hit.upto > len(request.tokens):
            yield (
                f"upto {hit.upto} reaches future positions: request {hit.request!r} has "
                f"{len(request.tokens)} tokens; use a smaller upto"
            )
        if hit.upto > source.length:
            yield (
                f"source {hit.source!r} has state for [0, {source.length}), not up to {hit.upto}; "
                "hit less, or compute the source first"
            )
        yield from self._check_same_prefix(hit)
        for spec in self.specs:
            yield from self._check_landing(hit, spec, source)

    def _check_same_prefix(self, hit: Hit) -> Iterable[str]:
        request, source = self.requests[hit.request], self.requests[hit.source]
        if request.adapter != source.adapter:
            yield (
                f"request {hit.request!r} has adapter {request.adapter!r}, source {hit.source!r} "
                f"has {source.adapter!r}; hit only within one adapter"
            )
        elif (shared := shared_prefix(request, source)) < min(hit.upto, len(request.tokens)):
            yield (
                f"the tokens of {hit.request!r} and {hit.source!r} are equal only up to {shared}, "
                f"not {hit.upto}; use upto <= {shared}"
            )

    def _check_landing(self, hit: Hit, spec: StateSpec, source: Cached) -> Iterable[str]:
        if spec.granule > 0 and hit.upto % spec.granule:
            yield (
                f"upto {hit.upto} is off the granule {spec.granule} of {spec.site} ({spec.kind}); "
                f"use {hit.upto - hit.upto % spec.granule}"
            )
        elif spec.snapshot_every and hit.upto % spec.snapshot_every:
            yield (
                f"{spec.site} ({spec.kind}) has snapshots only every {spec.snapshot_every} tokens, "
                f"none at {hit.upto}; use {hit.upto - hit.upto % spec.snapshot_every}"
            )
        if spec.window is not None and hit.upto <= source.length:
            oldest, needed = source.oldest.get(spec.site, 0), max(0, hit.upto - spec.window + 1)
            if oldest > needed:
                yield (
                    f"{spec.site} (window {spec.window}) of {hit.source!r} has keys from {oldest} "
                    f"on, but going on at {hit.upto} needs them from {needed}; hit closer to the "
                    f"source's end at {source.length}"
                )

    def _land(self, hit: Hit) -> None:
        cached, source = self.cached.get(hit.request), self.cached.get(hit.source)
        if cached is not None and source is not None:
            cached.length = max(0, hit.upto)
            cached.oldest = dict(source.oldest)
            self._forget(cached)

    # --- the rest ------------------------------------------------------------------------------

    def _drop(self, request: str, *, preempted: bool | None = None) -> None:
        cached = self.cached.get(request)
        if cached is not None:
            cached.length = 0
            cached.oldest.clear()
            cached.preempted = cached.preempted if preempted is None else preempted

    def _check_evict(self, evict: Evict) -> Iterable[str]:
        if not self.cached[evict.request].length:
            yield f"request {evict.request!r} has no state to evict; leave the event out"

    def _check_preempt(self, preempt: Preempt) -> Iterable[str]:
        cached = self.cached[preempt.request]
        if cached.preempted:
            yield f"request {preempt.request!r} is already preempted; Resume it first"
        elif not cached.length:
            yield f"request {preempt.request!r} is not running (no state); leave the event out"

    def _check_resume(self, resume: Resume) -> Iterable[str]:
        if not self.cached[resume.request].preempted:
            yield f"request {resume.request!r} is not preempted; leave the event out"

    def _check_publish(self, publish: Publish) -> Iterable[str]:
        if self.version is not None and publish.version <= self.version:
            yield (
                f"version {publish.version} does not exceed version {self.version}; "
                f"use {self.version + 1} or more"
            )


def _spec_complaints(specs: Sequence[StateSpec]) -> Iterable[str]:
    for spec in specs:
        if spec.granule < 1:
            yield f"state spec {spec.site}: granule is {spec.granule}; use 1 or more"
        if spec.snapshot_every is not None and spec.snapshot_every < 1:
            yield f"state spec {spec.site}: snapshot_every is {spec.snapshot_every}; use 1 or more"
        if spec.kind == "window" and not spec.window:
            yield f"state spec {spec.site}: a window state needs a window of 1 or more; set it"


def _request_complaints(requests: Sequence[Request]) -> Iterable[str]:
    ids: set[str] = set()
    for request in requests:
        if request.id in ids:
            yield f"request id {request.id!r} is used twice; rename one"
        ids.add(request.id)
        if not request.tokens:
            yield f"request {request.id!r} has no tokens; give it a prompt of at least one token"
        if request.sampled_mask and len(request.sampled_mask) != len(request.tokens):
            yield (
                f"request {request.id!r} has {len(request.tokens)} tokens but a sampled_mask of "
                f"{len(request.sampled_mask)}; make them equally long or leave the mask empty"
            )
