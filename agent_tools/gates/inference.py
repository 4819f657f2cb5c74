"""C2 to C4: the rollout engine against itself.

C2 repeats one schedule, idle and under load. C3 changes who shares a step: one row of a request
alone, then among others, at several batch sizes, in prefill and in decode, with padding. C4 changes
the phase: whole prompt, decode, chunks, prefix hits, eviction, preemption, random legal schedules;
and the tokens as they were sampled. Everything is compared with each request alone and whole, on
every scored token. Red controls are one stock operator class, or one bit of one row.
"""

import random
from collections.abc import Iterator, Sequence

from ...kernels.attention import PAGE
from ...trainer.engines.base import (
    Event,
    Evict,
    Hit,
    Preempt,
    Request,
    Run,
    Schedule,
    Slice,
    Step,
)
from ...trainer.engines.legal import granule
from ...trainer.engines.paged import replay
from ...trainer.engines.schedules import prompt_length
from ..align import shorten
from ..flips import FlipBit
from ..rollouts import TokenCount, batching_facts, compare_tokens, steps_of
from .base import Findings, Gate
from .bench import Bench, Engines, Quiet, compare_scored, cut, first_red, only, with_stock
from .load import Load

BATCHES = (2, 3, 5, 8, 16)
CHUNKS = (7, PAGE, PAGE + 1, 2 * PAGE + 1)
TILES = 3
DECODED = 8
"""Tokens of each request that C3 decodes at every batch size, or a third of a short reply; those
before come whole."""
SINGLE = 3
"""Requests whose prompts, too, run one token at a time."""
FUZZED = 3
"""Random schedules, at least."""
FUZZED_GRAINS = 3.5
"""Leading tokens of a request that random schedules cut up, in granules."""


def grain(engines: Engines) -> int:
    """Positions between two places where the state of every layer may be cut: a KV page, or more
    where recurrent layers keep a state per chunk."""
    return granule(engines.paged.state_specs())


def check_repeat(bench: Bench, found: Findings) -> None:
    """C2: one mixed schedule and one sampled rollout, three times each, idle and under load."""
    engines, requests = bench.on(), bench.requests
    bench.progress("C2: the same schedule, idle")
    first = bench.mixed
    found.tokens("mixed, again", compare_scored(engines.run("mixed", requests), first))
    with Load() as load:
        bench.progress("C2: the same schedule under load")
        found.tokens("mixed, under load", compare_scored(engines.run("mixed", requests), first))
        busy = engines.paged.generate(bench.prompts, bench.policy())
    found.require("the load really ran (rounds)", load.rounds)
    idle = engines.paged.generate(bench.prompts, bench.policy())
    for name, run in (("sampled again", idle), ("sampled again, under load", busy)):
        found.tokens(name, same_rollout(run, bench.sampled))
    request = requests[0]
    flip = planted_bit(engines, request)
    moved = compare_scored(engines.run("mixed", requests, flip), first)
    rows = sum(len(r.tokens) for r in requests)
    found.require("the control's bit was flipped", flip.flips)
    found.control("one bit of one row", f"1 of {rows} rows", moved.compared, moved.differing)


def same_rollout(left: Run, right: Run) -> TokenCount:
    """Sampled tokens: the ids, then the bits; a reply that differs counts as all its tokens."""
    theirs = {request.id: request.tokens for request in right.requests}
    odd = [request for request in left.requests if theirs.get(request.id) != request.tokens]
    if not odd:
        return compare_tokens(left, right)
    lost = sum(sum(request.sampled_mask) for request in odd)
    total = sum(sum(request.sampled_mask) for request in left.requests)
    return TokenCount(compared=total, differing=lost, first=(odd[0].id, 0))


def check_batch(bench: Bench, found: Findings) -> None:
    """C3: whole prompts and decodes, alone and in groups, in other orders, beside padding."""
    engines, requests = bench.on(), bench.requests
    last = min(DECODED, bench.size.reply // 3)
    alone, decoded = bench.alone, engines.run(_lockstep(requests, 1, last), requests)
    sizes = sorted({size for size in BATCHES if size <= len(requests)} | {len(requests)})
    for size in sizes:
        bench.progress(f"C3: batches of {size}")
        whole = engines.run(_groups(requests, size), requests)
        found.tokens(f"whole, {size} requests a step", compare_scored(whole, alone))
        together = engines.run(_lockstep(requests, size, last), requests)
        found.tokens(f"decode, {size} requests a step", compare_scored(together, decoded))
        found.require(f"steps of {size} requests", _steps_of(whole.executed, size)
                      + _steps_of(together.executed, size))  # fmt: skip
    bench.progress("C3: every batch size")
    ramp = engines.run(_ramp(requests), requests)
    absent = [n for n in range(1, len(requests) + 1) if not _steps_of(ramp.executed, n)]
    found.tokens(f"decode, 1 to {len(requests)} requests a step", compare_scored(ramp, decoded))
    found.require("a step of every size", f"missing: {absent or 'none'}", not absent)
    order = list(requests)
    random.Random(bench.seed).shuffle(order)
    mixed = engines.run(_groups(order, len(order), padded=7), requests)
    found.tokens("whole, shuffled, beside 7 padding rows", compare_scored(mixed, alone))
    found.tokens("mixed", compare_scored(bench.mixed, alone))
    found.require("requests in all", len(requests), len(requests) > 2)
    _company_leak(engines, requests, decoded, last, found)
    if bench.quick:
        return
    bench.progress("C3: stock linear layers, for comparison")
    red = bench.on(with_stock(bench.plan, "linear"))
    few = requests[:3]
    together, apart = (red.run(_lockstep(few, size, last), few) for size in (3, 1))
    control = compare_scored(together, apart)
    found.notes.append(
        f"with stock linear layers, decode alone = decode together fails for {control.differing} "
        f"of {control.compared} tokens"
    )


class LeakInCompany(FlipBit):
    """One bit of one row, only in steps where that row is not alone."""

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        """As in FlipBit; a row alone stays as it is."""
        super().begin_rows(step, rows)
        if len(rows) == 1:
            self._row = None


def _company_leak(
    engines: Engines, requests: Sequence[Request], decoded: Run, last: int, found: Findings
) -> None:
    """Red control: a row that depends on having neighbours. decoded: every request alone."""
    few = requests[:3]
    rows = sum(len(request.tokens) for request in few)
    leak = planted_bit(engines, few[0], LeakInCompany)
    together = engines.run(_lockstep(few, 3, last), few, leak)
    control = compare_scored(together, only(decoded, few))
    found.require("the control's row was disturbed", leak.flips)
    found.control("one bit of one row where it has neighbours", f"1 of {rows} rows",
                  control.compared, control.differing)  # fmt: skip


def planted_bit(engines: Engines, request: Request, kind: type[FlipBit] = FlipBit) -> FlipBit:
    """One mantissa bit of the last norm's output, in the row that predicts the last token.

    Of the last linear layer's, where a recipe brings the norms as operators of its own.
    """
    sites = engines.paged.instrument.sites
    norms = [site for site in sites if site.op_class.startswith("rmsnorm")]
    norms = norms or [site for site in sites if site.op_class == "linear"]
    small = engines.paged.loaded.dtype.itemsize == 2
    return kind(
        Quiet(),
        site=norms[-1].name,
        request=request.id,
        position=len(request.tokens) - 2,
        bit=3 if small else 16,
    )


def _steps_of(schedule: Schedule, size: int) -> int:
    return sum(len(step.slices) == size for step in steps_of(schedule))


def _groups(requests: Sequence[Request], size: int, padded: int = 0) -> Schedule:
    """Whole requests, ``size`` a step."""
    return Schedule(
        events=tuple(
            Step(
                slices=tuple(
                    Slice(request=r.id, start=0, stop=len(r.tokens))
                    for r in requests[first : first + size]
                ),
                padded_rows=padded,
            )
            for first in range(0, len(requests), size)
        )
    )


def _lockstep(requests: Sequence[Request], size: int, last: int) -> Schedule:
    """Groups of ``size``: each prompt alone, then one token of every member a step.

    The ``last`` tokens, where the reply has as many.
    """
    events: list[Event] = []
    for first in range(0, len(requests), size):
        group = requests[first : first + size]
        starts = {r.id: max(prompt_length(r), len(r.tokens) - last) for r in group}
        events += [Step(slices=(Slice(request=r.id, start=0, stop=starts[r.id]),)) for r in group]
        while left := [r for r in group if starts[r.id] < len(r.tokens)]:
            slices = (Slice(request=r.id, start=starts[r.id], stop=starts[r.id] + 1) for r in left)
            events.append(Step(slices=tuple(slices)))
            starts |= {r.id: starts[r.id] + 1 for r in left}
    return Schedule(events=tuple(events))


def _ramp(requests: Sequence[Request]) -> Schedule:
    """Each request's beginning alone; one token each of 1, 2, 3 ... of them a step; the rest."""
    tail = (len(requests) + 1) // 2 + 1  # as many tokens as the steps take, and one more
    left = {r.id: min(tail, len(r.tokens) - 1) for r in requests}
    stop = {r.id: len(r.tokens) for r in requests}
    events: list[Event] = [
        Step(slices=(Slice(request=name, start=0, stop=stop[name] - left[name]),)) for name in left
    ]
    for size in range(1, len(requests) + 1):
        longest = sorted((name for name in left if left[name]), key=lambda name: -left[name])
        at = {name: stop[name] - left[name] for name in longest[:size]}
        events.append(Step(slices=tuple(Slice(request=n, start=p, stop=p + 1)
                                        for n, p in at.items())))  # fmt: skip
        left |= {name: left[name] - 1 for name in at}
    events += [
        Step(slices=(Slice(request=name, start=stop[name] - rest, stop=stop[name]),))
        for name, rest in left.items()
        if rest
    ]
    return Schedule(events=tuple(events))


def check_phase(bench: Bench, found: Findings) -> None:
    """C4: every way to reach a token's state, and the tokens as sampled."""
    engines, requests = bench.on(), bench.requests[: bench.size.phase_requests]
    alone = only(bench.alone, requests)
    _as_sampled(bench, found)
    shortest = max(len(request.tokens) for request in requests)
    for name, schedule in _phases(engines, requests):
        bench.progress(f"C4: {name}")
        run = engines.run(schedule, requests)
        facts = batching_facts(run.executed, requests)
        what, count = _happened(name, run.executed)
        found.require(f"{name}: {what}", count)
        shortest = min(shortest, *_reached(run.executed).values())
        found.tokens(f"{name} = whole", compare_scored(run, alone, part=facts.hits > 0))
    if not bench.quick:
        bench.progress("C4: one token at a time")
        few = requests[:SINGLE]
        found.tokens("one token at a time = whole",
                     compare_scored(engines.run("chunk:1", few), only(alone, few)))  # fmt: skip
    _fuzz(bench, found)
    size = grain(engines)
    what = "KV tiles" if size == PAGE else f"state chunks of {size}"
    found.require(f"the shortest request ran through {TILES} {what}", f"{shortest} tokens",
                  shortest > (TILES - 1) * size)  # fmt: skip
    layers = engines.paged.instrument.recurrent.values()
    bench.progress("C4: red control, a stock operator")
    found.stock_control(*first_red(bench.stock_controls("whole")))
    for op_class in sorted({f"recurrence_{layer.kind}" for layer in layers}):
        bench.progress(f"C4: red control, stock {op_class}")
        found.stock_control(*first_red(bench.stock_recurrence(op_class)))
    if found.differs():
        few = shorten(requests, 2, 8)
        found.divergence, found.heat = bench.culprits_and_heat("paged:decode", "paged:alone", few)
        found.culprits += culprit_lines(found)


def culprit_lines(found: Findings) -> list[str]:
    """Groups of culprits in words."""
    groups = found.divergence.groups if found.divergence else ()
    return [
        f"{entry.op_class}: {entry.count} sites, {entry.affected} of {entry.compared} rows, "
        f"first {entry.sites[0]}"
        for entry in groups
    ]


def _as_sampled(bench: Bench, found: Findings) -> None:
    """The logprob recorded when a token was drawn is the one that scoring gives."""
    sampled, engines = bench.sampled, bench.on()
    facts = batching_facts(sampled.executed, sampled.requests)
    found.require("steps that mix prompt and decode rows", facts.mixed_steps)
    found.require("prompts in chunks", facts.chunked_prompts)
    found.require("prefix hits while sampling", facts.hits)
    found.require("preemptions while sampling", facts.preemptions)
    found.tokens("sampled = scored alone", compare_tokens(sampled, bench.alone))
    again = engines.paged.run(replay(sampled))
    found.tokens("sampled = its schedule replayed", compare_tokens(sampled, again))


def _phases(engines: Engines, requests: Sequence[Request]) -> Iterator[tuple[str, Schedule]]:
    yield "decode", engines.paged.schedule("decode", requests)
    size = grain(engines)
    for rows in CHUNKS if size == PAGE else (size // 4 - 1, size - 1, size, size + 1):
        yield f"chunks of {rows}", engines.paged.schedule(f"chunk:{rows}", requests)
    for name in ("prefix-hit", "preempt"):
        yield name, engines.paged.schedule(name, requests)
    yield "evict", Schedule(events=tuple(_evicted(requests)))


def _happened(name: str, executed: Schedule) -> tuple[str, int]:
    """What makes a phase that phase, and how often it was executed."""
    kind: type[Event] | None = {"prefix-hit": Hit, "preempt": Preempt, "evict": Evict}.get(name)
    if kind is not None:
        return kind.__name__.lower() + "s", sum(isinstance(e, kind) for e in executed.events)
    pieces = [piece for step in steps_of(executed) for piece in step.slices]
    rows = 1 if name == "decode" else int(name.rpartition(" ")[2])
    later = sum(piece.start > 0 and piece.stop - piece.start <= rows for piece in pieces)
    return f"steps of at most {rows} rows on cached state", later


def _reached(executed: Schedule) -> dict[str, int]:
    """How far each request was run."""
    reached: dict[str, int] = {}
    for step in steps_of(executed):
        for piece in step.slices:
            reached[piece.request] = max(reached.get(piece.request, 0), piece.stop)
    return reached


def _evicted(requests: Sequence[Request]) -> Iterator[Event]:
    """Half of each request, dropped; all of it in chunks, dropped; then whole."""
    for request in requests:
        half, stop = len(request.tokens) // 2, len(request.tokens)
        bounds = [(0, half), None, (0, half), (half, stop), None, (0, stop)]
        for bound in bounds:
            if bound is None:
                yield Evict(request=request.id)
            else:
                piece = Slice(request=request.id, start=bound[0], stop=bound[1])
                yield Step(slices=(piece,))


def _fuzz(bench: Bench, found: Findings) -> None:
    engines, chosen = bench.on(), bench.requests[: bench.size.fuzz_requests]
    most = int(FUZZED_GRAINS * grain(engines))
    few = [cut(request, min(most, len(request.tokens))) for request in chosen]
    compared = differing = hits = 0
    first = ""
    for seed in range(bench.seed, bench.seed + bench.size.fuzzed):
        bench.progress(f"C4: fuzzed schedule {seed}")
        run = engines.run(f"fuzz:{seed}", few)
        count = compare_scored(run, bench.alone, part=True)
        compared, differing = compared + count.compared, differing + count.differing
        hits += batching_facts(run.executed, few).hits
        if count.first is not None:
            first = first or f"first: paged:fuzz:{seed}, {count.first[0]} at {count.first[1]}"
    detail = f"{hits} prefix hits" + (f"; {first}" if first else "")
    found.part(f"{bench.size.fuzzed} fuzzed schedules = whole", compared, differing, detail=detail)
    found.require("random schedules", bench.size.fuzzed, bench.size.fuzzed >= FUZZED)


REPEAT = Gate(
    id="C2",
    title="Repeat",
    claim="The same schedule gives the same bits, again and again, idle and under load.",
    check=check_repeat,
)
BATCH = Gate(
    id="C3",
    title="Batch",
    claim="A request alone gives the bits that it has in any mix, at every batch size.",
    check=check_batch,
)
PHASE = Gate(
    id="C4",
    title="Phase",
    claim="Prefill, decode, any chunking, prefix hit, eviction and preemption give the same bits; "
    "the sampled logprob is the scored one.",
    check=check_phase,
)
