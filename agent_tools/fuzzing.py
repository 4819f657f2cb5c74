"""Schedule fuzzing: draw legal schedules, compare every logprob's bits, shrink what fails.

    report = fuzz(loaded, "aligned", examples=500, corpus=Path("tests/trainer/corpus"))
    report.failure                      # None, or the smallest schedule that still differs

The right side is the packed trainer forward of the same requests, once. The left side is the paged
engine, which executes each schedule as written. Past failures (a folder of schedule files) are
replayed first; an entry that cannot be read or is no longer legal is an error that names it.
Examples are the same in every run (hypothesis, derandomised); a failure is shrunk over the moves
of :mod:`.moves`: fewer events first, then fewer tokens, requests, padding rows.

``rollouts=8`` also samples under that many random policies. What was drawn is then forced: the
executed schedule runs again on those tokens, and the trainer scores them; all three must agree.

hypothesis is not part of the base install; without it :func:`fuzz` says how to get it.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..kernels.attention import PAGE
from ..kernels.errors import CapabilityError, DiskError, ScheduleError
from ..model_recipes.models import LoadedModel
from ..trainer.engines.base import Policy, Request, Run, Sampling, Scenario, Schedule, Step
from ..trainer.engines.build import make_engine
from ..trainer.engines.legal import require_legal
from ..trainer.engines.packed import PackedEngine
from ..trainer.engines.paged import PagedEngine, replay
from ..trainer.engines.schedule_file import load_schedule, to_json
from ..trainer.engines.schedules import build_schedule
from .moves import Advance, Drop, Move, Start, schedule_of

LENGTHS = (53, 37, 61)
SHARED = 33
LONGEST_PIECE = 61
REPEATS = 3  # different moves may make the same schedule, so more are drawn than run
Token = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A schedule whose logprobs differ. tokens: (request, position) of those that do."""

    schedule: Schedule
    tokens: tuple[Token, ...]
    shrunk: bool
    source: str

    @property
    def steps(self) -> int:
        """Forward passes."""
        return sum(isinstance(event, Step) for event in self.schedule.events)

    @property
    def requests(self) -> tuple[str, ...]:
        """Requests that it runs."""
        return used_requests(self.schedule)

    def save(self, corpus: Path) -> Path:
        """Add it to a corpus, under a name made from its content."""
        text = to_json(self.schedule)
        name = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        try:
            corpus.mkdir(parents=True, exist_ok=True)
            (corpus / f"{name}.json").write_text(text, encoding="utf-8")
        except OSError as error:
            raise DiskError(f"cannot write to {corpus}: {error}; choose another folder") from error
        return corpus / f"{name}.json"


@dataclass(slots=True, kw_only=True)
class FuzzReport:
    """What was run: schedules (distinct ones), compared logprobs, and how often each kind of event.

    kinds: ``step``, ``mixed`` (several requests in a step), ``decode``, ``draft``, ``padded``,
    ``hit``, ``again`` (a hit on itself), ``evict``, ``preempt``, ``resume``.
    """

    schedules: int = 0
    distinct: int = 0
    replayed: int = 0
    compared: int = 0
    rollouts: int = 0
    """Sampled under a random policy, then forced through the executed schedule."""
    kinds: Counter[str] = field(default_factory=Counter[str])
    failure: Failure | None = None


def fuzz_requests(vocab_size: int) -> tuple[Request, ...]:
    """Three requests of three or four pages, two pages of them shared; every token is scored."""
    rng = random.Random(20)
    shared = [rng.randrange(3, vocab_size) for _ in range(SHARED)]
    made: list[Request] = []
    for index, length in enumerate(LENGTHS):
        rest = [rng.randrange(3, vocab_size) for _ in range(length - SHARED)]
        tokens = (*shared, *rest)
        mask = (False, *(True,) * (length - 1))
        made.append(Request(id=f"r{index}", tokens=tokens, sampled_mask=mask))
    return tuple(made)


def fuzz(
    loaded: LoadedModel,
    plan: str = "aligned",
    *,
    examples: int = 500,
    corpus: Path | None = None,
    requests: Sequence[Request] | None = None,
    rollouts: int = 0,
) -> FuzzReport:
    """Replay the corpus, then draw schedules until one differs or ``examples`` were equal.

    examples: how many different schedules. rollouts: how many random policies to sample under.
    Raises CapabilityError without hypothesis, ScheduleError for an unusable corpus entry.
    """
    hypothesis = _hypothesis()
    chosen = tuple(requests or fuzz_requests(loaded.config.vocab_size))
    packed = make_engine("packed", loaded, plan)
    paged = make_engine("paged", loaded, plan, instrument=packed.instrument)
    assert isinstance(paged, PagedEngine)
    assert isinstance(packed, PackedEngine)
    try:
        whole = build_schedule("packed", chosen, packed.state_specs())
        wanted = _bits(packed.run(_scenario(loaded, chosen, whole)))
        trial = _Trial(loaded, paged, chosen, wanted)
        for path in corpus_entries(corpus):
            trial.replay(path)
        if trial.report.failure is None:
            _search(hypothesis, trial, examples)
        for seed in range(rollouts):
            if trial.report.failure is None:
                trial.report.failure = _rollout(trial, packed, seed)
        return trial.report
    finally:
        packed.close()


def _rollout(trial: "_Trial", packed: PackedEngine, seed: int) -> Failure | None:
    """Sample under a random policy; then force what was drawn, in the same steps and packed."""
    rng, report = random.Random(seed), trial.report
    prompts = [
        Request(
            id=request.id, tokens=request.tokens[: SHARED + rng.randrange(1, 5)],
            sampling=Sampling(temperature=1.0, seed=seed, max_new_tokens=rng.randrange(8, 25)),
        )
        for request in trial.requests
    ]  # fmt: skip
    longest = max(len(p.tokens) + p.sampling.max_new_tokens for p in prompts)
    policy = Policy(
        max_step_tokens=rng.choice((7, 19, 33, 64)),
        max_running=rng.choice((1, 2, 3)),
        num_pages=-(-longest // PAGE) + rng.randrange(0, 4),
    )
    drawn = trial.engine.generate(prompts, policy)
    wanted = _bits(drawn)
    whole = build_schedule("packed", drawn.requests, packed.state_specs())
    forced = [
        _bits(trial.engine.run(replay(drawn))),
        _bits(packed.run(_scenario(trial.loaded, drawn.requests, whole))),
    ]
    report.rollouts += 1
    report.compared += len(forced) * len(wanted)
    report.kinds.update(event_kinds(drawn.executed))
    odd = sorted({t for t, bits in wanted.items() for other in forced if other.get(t) != bits})
    if not odd:
        return None
    source = f"rollout {seed} under {policy}"
    return Failure(schedule=drawn.executed, tokens=tuple(odd), shrunk=False, source=source)


def corpus_entries(corpus: Path | None) -> list[Path]:
    """Schedule files of a corpus, sorted; a folder that does not exist has none."""
    return sorted(corpus.glob("*.json")) if corpus is not None else []


def used_requests(schedule: Schedule) -> tuple[str, ...]:
    """Ids of the requests that a schedule runs, in order of appearance."""
    steps = (event for event in schedule.events if isinstance(event, Step))
    return tuple(dict.fromkeys(piece.request for step in steps for piece in step.slices))


class _Trial:
    """Runs schedules on one engine against known bits, and keeps the report."""

    def __init__(
        self,
        loaded: LoadedModel,
        engine: PagedEngine,
        requests: tuple[Request, ...],
        wanted: dict[Token, int],
    ) -> None:
        self.loaded = loaded
        self.engine = engine
        self.requests = requests
        self.wanted = wanted
        self.report = FuzzReport()
        self.seen: dict[str, tuple[Token, ...]] = {}
        self.first: Schedule | None = None

    def schedule(self, moves: Sequence[Move]) -> Schedule:
        return schedule_of(moves, self.requests, self.engine.state_specs())

    def differing(self, schedule: Schedule) -> tuple[Token, ...]:
        """Tokens whose bits differ; remembered, so that a schedule runs once."""
        text = to_json(schedule)
        if text not in self.seen:
            got = _bits(self.engine.run(_scenario(self.loaded, self.requests, schedule)))
            self.seen[text] = tuple(token for token in got if got[token] != self.wanted[token])
            self.report.compared += len(got)
            self.report.distinct += 1
            self.report.kinds.update(event_kinds(schedule))
        self.report.schedules += 1
        tokens = self.seen[text]
        if tokens and self.first is None:
            self.first = schedule
        return tokens

    def replay(self, path: Path) -> None:
        schedule = load_schedule(path)
        try:
            require_legal(schedule, self.engine.state_specs(), self.requests)
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}; delete or rewrite the entry") from error
        self.report.replayed += 1
        tokens = self.differing(schedule)
        if tokens and self.report.failure is None:
            self.report.failure = Failure(
                schedule=schedule, tokens=tokens, shrunk=False, source=str(path)
            )


def event_kinds(schedule: Schedule) -> Iterator[str]:
    """What happens in a schedule, for the report's counts."""
    for event in schedule.events:
        kind = type(event).__name__.lower()
        yield kind
        if kind == "hit" and event.request == event.source:  # type: ignore[union-attr]
            yield "again"
        if not isinstance(event, Step):
            continue
        if len(event.slices) > 1:
            yield "mixed"
        if event.padded_rows:
            yield "padded"
        if any(piece.keep is not None for piece in event.slices):
            yield "draft"
        if any(piece.start and piece.stop - piece.start == 1 for piece in event.slices):
            yield "decode"


def _search(hypothesis: Any, trial: _Trial, examples: int) -> None:
    """Let hypothesis look for moves whose schedule differs, and shrink them."""

    def differs(moves: list[Move]) -> bool:
        schedule = trial.schedule(moves)
        hypothesis.assume(bool(used_requests(schedule)))
        if trial.report.distinct >= examples and trial.first is None:
            return False  # enough; hypothesis knows no way to stop early
        return bool(trial.differing(schedule))

    settings = hypothesis.settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=REPEATS * examples,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        moves = hypothesis.find(moves_strategy(len(trial.requests)), differs, settings=settings)
    except hypothesis.errors.NoSuchExample:
        return
    except hypothesis.errors.Flaky:
        schedule, shrunk = trial.first, False  # it depends on what ran before it
    else:
        schedule, shrunk = trial.schedule(moves), True
    assert schedule is not None
    tokens = trial.seen[to_json(schedule)]
    trial.report.failure = Failure(schedule=schedule, tokens=tokens, shrunk=shrunk, source="fuzz")


def moves_strategy(num_requests: int) -> Any:
    """A hypothesis strategy for lists of moves; simpler means fewer and smaller."""
    st = _hypothesis().strategies
    request = st.integers(0, num_requests - 1)
    tokens = st.one_of(st.just(1), st.integers(1, 9), st.integers(1, LONGEST_PIECE))
    piece = st.tuples(request, tokens, st.sampled_from((0, 0, 1, 5)))
    advance = st.builds(
        Advance,
        pieces=st.lists(
            piece, min_size=1, max_size=num_requests, unique_by=lambda drawn: drawn[0]
        ).map(tuple),
        padded_rows=st.sampled_from((0, 0, 0, 1, 3, 17)),
    )
    start = st.builds(Start, request=request, source=request, granules=st.integers(1, 3))
    drop = st.builds(Drop, request=request, preempt=st.booleans())
    part = st.lists(st.one_of(advance, advance, advance, start, start, start, drop), max_size=6)
    return st.tuples(part, part, part).map(lambda parts: [*parts[0], *parts[1], *parts[2]])


def _hypothesis() -> Any:
    try:
        import hypothesis
    except ImportError as error:
        raise CapabilityError(
            "schedule fuzzing needs hypothesis; install it with `pip install hypothesis`"
        ) from error
    return hypothesis


def _scenario(loaded: LoadedModel, requests: tuple[Request, ...], schedule: Schedule) -> Scenario:
    return Scenario(model=loaded.spec, plan="", requests=requests, schedule=schedule)


def _bits(run: Run) -> dict[Token, int]:
    return {(sample.request, sample.position): sample.logprob_bits for sample in run.samples}
