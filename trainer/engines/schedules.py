"""Named schedules: the few batch shapes that every comparison starts from.

    name         what it does
    alone        each request in a step of its own, whole
    batched      whole requests share steps under a row budget (what stock transformers can batch)
    mixed        requests arrive one by one; prompt chunks and decodes share steps under a budget
    decode       each request alone: prompt whole, then one token per step
    chunk:N      each request alone, N tokens per step
    prefix-hit   later requests start from the cached prefix of earlier ones, then each request is
                 sent again and starts from its own ("A after A")
    preempt      as mixed, but every request loses its state in mid-decode and is recomputed
    packed       all requests whole in one step
    fuzz:SEED    a random legal schedule (fuzz.py)
    FILE.json    a schedule file (schedule_file.py)

The prompt of a request ends at its first sampled token, or in its middle when no token was sampled.
Every schedule runs every token, the last one too. Which of these an engine can run is its own
business: it says so when asked.

    pytest tests/trainer/test_schedules.py
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ...kernels.errors import ScheduleError, UsageError
from .base import Event, Hit, Preempt, Request, Resume, Schedule, Slice, StateSpec, Step
from .fuzz import fuzz_schedule
from .legal import Ledger, granule, shared_prefix
from .schedule_file import load_schedule

NAMES = (
    "alone",
    "batched",
    "mixed",
    "decode",
    "chunk:N",
    "prefix-hit",
    "preempt",
    "packed",
    "fuzz:SEED",
)
STEP_TOKENS = 96
STEPS_PARKED = 2


def build_schedule(
    name: str, requests: Sequence[Request], state_specs: Sequence[StateSpec]
) -> Schedule:
    """The named schedule for these requests, or the one in the file ``name``.

    state_specs: from the engine that will run it; they say where prefix hits may land.
    """
    kind, _, argument = name.partition(":")
    if kind == "chunk":
        return Schedule(events=tuple(_chunked(requests, _natural(name, argument, least=1))))
    if kind == "fuzz":
        return fuzz_schedule(_natural(name, argument, least=0), requests, state_specs)
    if name.endswith(".json") or Path(name).is_file():
        return load_schedule(Path(name))
    match name:
        case "alone":
            events = [_step(Slice(request=r.id, start=0, stop=len(r.tokens))) for r in requests]
        case "packed":
            events = [_step(*(Slice(request=r.id, start=0, stop=len(r.tokens)) for r in requests))]
        case "batched":
            events = _batched(requests)
        case "mixed":
            events = _mixed(requests, preempt=False)
        case "preempt":
            events = _mixed(requests, preempt=True)
        case "decode":
            events = _decode(requests)
        case "prefix-hit":
            events = _prefix_hit(requests, state_specs)
        case _:
            raise UsageError(
                f"unknown schedule {name!r}; use one of {', '.join(NAMES)}, or a JSON file"
            )
    return Schedule(events=tuple(events))


def prompt_length(request: Request) -> int:
    """Tokens before the first sampled one; half of them (rounded up) when none was sampled."""
    if True in request.sampled_mask:
        return max(1, request.sampled_mask.index(True))
    return (len(request.tokens) + 1) // 2


def _natural(name: str, argument: str, *, least: int) -> int:
    if not argument.isdecimal() or int(argument) < least:
        kind = name.partition(":")[0]
        raise UsageError(
            f"schedule {name!r} needs a whole number of at least {least} after the colon, "
            f"for example {kind}:7"
        )
    return int(argument)


def _step(*slices: Slice) -> Step:
    return Step(slices=slices)


def _chunked(requests: Sequence[Request], size: int) -> list[Event]:
    return [
        _step(Slice(request=r.id, start=start, stop=min(start + size, len(r.tokens))))
        for r in requests
        for start in range(0, len(r.tokens), size)
    ]


def _decode(requests: Sequence[Request]) -> list[Event]:
    events: list[Event] = []
    for request in requests:
        prompt = prompt_length(request)
        events.append(_step(Slice(request=request.id, start=0, stop=prompt)))
        for start in range(prompt, len(request.tokens)):
            events.append(_step(Slice(request=request.id, start=start, stop=start + 1)))
    return events


def _batched(requests: Sequence[Request]) -> list[Event]:
    """Whole requests, as many per step as fit into four step budgets; at least one."""
    groups: list[list[Slice]] = []
    room = 0
    for request in requests:
        size = len(request.tokens)
        if size > room or not groups:
            groups.append([])
            room = 4 * STEP_TOKENS
        groups[-1].append(Slice(request=request.id, start=0, stop=size))
        room -= size
    return [_step(*group) for group in groups]


def _mixed(requests: Sequence[Request], *, preempt: bool) -> list[Event]:
    """One request arrives per step; decodes go first, prompt chunks fill up the budget."""
    events: list[Event] = []
    waiting, running = deque(requests), list[Request]()
    parked: deque[tuple[int, Request]] = deque()
    done = {r.id: 0 for r in requests}
    prefill = {r.id: prompt_length(r) for r in requests}
    victims = {r.id for r in requests if len(r.tokens) - prefill[r.id] > 1} if preempt else set()
    now = 0
    while waiting or running or parked:
        now += 1
        if waiting:
            running.append(waiting.popleft())
        while parked and (parked[0][0] <= now or not running):
            back = parked.popleft()[1]
            events.append(Resume(request=back.id))
            running.append(back)
        step = _fill(running, done, prefill)
        events.append(step)
        done |= {piece.request: piece.stop for piece in step.slices}
        running = [r for r in running if done[r.id] < len(r.tokens)]
        for request in [r for r in running if r.id in victims]:
            if done[request.id] > (prefill[request.id] + len(request.tokens)) // 2 - 1:
                events.append(Preempt(request=request.id))
                victims.remove(request.id)
                running.remove(request)
                parked.append((now + STEPS_PARKED, request))
                prefill[request.id], done[request.id] = done[request.id], 0
    return events


def _fill(running: Sequence[Request], done: dict[str, int], prefill: dict[str, int]) -> Step:
    slices: list[Slice] = []
    room = STEP_TOKENS
    for request in sorted(running, key=lambda r: done[r.id] < prefill[r.id]):
        start = done[request.id]
        size = min(room, max(1, prefill[request.id] - start))
        if size:
            slices.append(Slice(request=request.id, start=start, stop=start + size))
            room -= size
    return Step(slices=tuple(slices))


def _prefix_hit(requests: Sequence[Request], specs: Sequence[StateSpec]) -> list[Event]:
    """Each request in turn, from the longest cached prefix of an earlier one; then each again."""
    ledger = Ledger(specs, requests)
    grain = granule(specs)
    events: list[Event] = []

    def run(request: Request, hit: Hit | None) -> None:
        start = hit.upto if hit else 0
        step = _step(Slice(request=request.id, start=start, stop=len(request.tokens)))
        for event in (hit, step) if hit else (step,):
            ledger.apply(event)
            events.append(event)

    for index, request in enumerate(requests):
        run(request, _longest_hit(ledger, request, requests[:index], grain))
    for request in requests:
        hit = _longest_hit(ledger, request, [request], grain)
        if hit:
            run(request, hit)
    if not any(isinstance(event, Hit) for event in events):
        raise ScheduleError(
            f"prefix-hit: nothing can be hit; use requests longer than the granule of {grain} "
            "tokens (and an engine that still holds the keys there, if it keeps only a window)"
        )
    return events


def _longest_hit(
    ledger: Ledger, request: Request, sources: Sequence[Request], grain: int
) -> Hit | None:
    best: Hit | None = None
    for source in sources:
        longest = min(shared_prefix(request, source), len(request.tokens) - 1)
        for upto in range(longest - longest % grain, best.upto if best else 0, -grain):
            hit = Hit(request=request.id, source=source.id, upto=upto)
            if not ledger.check(hit):
                best = hit
                break
    return best
