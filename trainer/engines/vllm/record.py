"""The schedule that vLLM really executed, read from its own scheduler.

vLLM takes a scheduler class as an engine argument; :func:`recording_scheduler` gives it its own
with one method that remembers what was decided. :func:`executed` turns that into a
:class:`Schedule`: a request that begins above position 0 hit a cached prefix, one that begins again
was preempted, and every step carries the weight version that was installed when it was formed.

Nothing is recorded in other processes: the engine core must run in this one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....kernels.errors import InconclusiveError
from ..base import Event, Evict, Hit, Mode, Preempt, Publish, Request, Resume, Schedule, Slice, Step
from . import compat


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """One step as formed: (vLLM's request id, first position, tokens), and the weight version."""

    pieces: tuple[tuple[str, int, int], ...]
    version: int


def starts_of(output: Any) -> dict[str, int]:
    """Where each request of a ``SchedulerOutput`` goes on: vLLM's id -> first position."""
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    return starts | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


class Recorder:
    """What the scheduler of one engine decided since the last :meth:`take`.

    A recording scheduler finds the recorder of its engine by name, because vLLM constructs it.
    """

    def __init__(self) -> None:
        self.version = 0
        self._formed: list[Formed] = []

    def add(self, output: Any) -> None:
        """Remember a ``SchedulerOutput``; empty ones are left out."""
        starts = starts_of(output)
        pieces = tuple(
            (name, starts[name], count) for name, count in output.num_scheduled_tokens.items()
        )
        if pieces:
            self._formed.append(Formed(pieces=pieces, version=self.version))

    def take(self) -> list[Formed]:
        """All of it, once."""
        formed, self._formed = self._formed, []
        return formed


def recording_scheduler(recorder: Recorder, *, asynchronous: bool) -> type[Any]:
    """A subclass of vLLM's scheduler that tells ``recorder`` about every step."""
    base = compat.scheduler_class(asynchronous=asynchronous)

    class RecordingScheduler(base):
        def schedule(self, *arguments: Any, **keywords: Any) -> Any:
            output = super().schedule(*arguments, **keywords)
            recorder.add(output)
            return output

    return RecordingScheduler


def executed(
    formed: Sequence[Formed], names: Mapping[str, str], requests: Sequence[Request], mode: Mode
) -> tuple[Schedule, dict[tuple[str, int], int]]:
    """The schedule, and the weight version that first computed every (request, position).

    That version drew the next token; later ones may have computed the position anew. names: vLLM's
    id -> request id. Positions past a request's tokens (a step in flight when it finished) are left
    out.
    """
    known = {request.id: request for request in requests}
    covered: dict[str, int] = {}
    last: dict[str, str] = {}
    versions: dict[tuple[str, int], int] = {}
    events: list[Event] = []
    version = formed[0].version if formed else 0
    for step in formed:
        if step.version != version:
            version = step.version
            events.append(Publish(version=version, digest=""))
            covered.clear()  # nothing that was cached outlives it
        slices: list[Slice] = []
        for theirs, start, count in step.pieces:
            name = names[theirs]
            stop = min(start + count, len(known[name].tokens))
            if stop <= start:
                continue
            events += _restarts(known[name], start, covered, known, again=theirs != last.get(name))
            last[name] = theirs
            covered[name] = stop
            for position in range(start, stop):
                versions.setdefault((name, position), version)
            slices.append(Slice(request=name, start=start, stop=stop))
        if slices:
            events.append(Step(slices=tuple(slices), mode=mode))
    return Schedule(events=tuple(events)), versions


def _restarts(
    request: Request,
    start: int,
    covered: Mapping[str, int],
    known: Mapping[str, Request],
    *,
    again: bool,
) -> Iterator[Event]:
    """What must have happened before a slice that begins at ``start``; again: it was sent anew."""
    before = covered.get(request.id)
    if before == start and not again:
        return
    if before is not None and not again:
        yield Preempt(request=request.id)
        yield Resume(request=request.id)
    if start:
        yield Hit(request=request.id, source=_source(request, start, covered, known), upto=start)
    elif before is not None and again:
        yield Evict(request=request.id)


def _source(
    request: Request, upto: int, covered: Mapping[str, int], known: Mapping[str, Request]
) -> str:
    """A request whose state for these tokens was computed before."""
    for name, reached in covered.items():
        if reached >= upto and known[name].tokens[:upto] == request.tokens[:upto]:
            return name
    raise InconclusiveError(
        f"vLLM started {request.id!r} at position {upto}, but no request of this run computed its "
        "prefix; reset the prefix cache before the run"
    )
