"""A side of a comparison: which engine, with which settings, on which schedule.

    Side.parse("paged:fuzz:1")            engine paged, schedule fuzz:1
    Side.parse("transformers:decode")     the untouched model, one token at a time
    Side.parse("packed")                  each engine has a schedule of its own if none is named
    Side.parse("paged+num_pages=9:mixed") settings are the engine's own, by name

``stock`` and ``aligned`` as settings choose the plan of one side, where the two differ. A
:class:`Runner` runs a side on a model with an observer and returns the trace; it puts the plan on
the model for that time only, so that both sides may share one model.
"""

import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from ..kernels.errors import UsageError
from ..model_recipes.models import LoadedModel
from ..model_recipes.plan import Plan
from ..trainer.engines.base import (
    Hit,
    Observer,
    Publish,
    Request,
    Run,
    Scenario,
    Schedule,
    Site,
    Step,
)
from ..trainer.engines.build import ENGINES, AnyEngine, make_engine
from .trace import Digests, Trace, Tracer, weight_digests

DEFAULT_SCHEDULES = {"transformers": "alone", "packed": "packed"}
"""Every other engine runs ``mixed`` unless the side says otherwise."""
PLAN_SETTINGS = ("stock", "aligned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """``ENGINE[+SETTING...][:SCHEDULE]``, parsed."""

    engine: str
    settings: tuple[str, ...] = ()
    schedule: str

    @classmethod
    def parse(cls, text: str) -> "Side":
        """Read a side; UsageError says what is wrong with it."""
        name, _, schedule = text.partition(":")
        engine, *settings = name.split("+")
        if engine not in ENGINES:
            known = ", ".join(ENGINES)
            raise UsageError(f"side {text!r} names engine {engine!r}; use one of {known}")
        names = [setting.partition("=")[0] for setting in settings]
        if not all(names) or len(set(names)) != len(names) or set(PLAN_SETTINGS) <= set(names):
            raise UsageError(f"side {text!r} has an empty or repeated setting; remove it")
        if text.endswith(":"):
            raise UsageError(f"side {text!r} ends with a colon; name a schedule or remove it")
        schedule = schedule or DEFAULT_SCHEDULES.get(engine, "mixed")
        return cls(engine=engine, settings=tuple(settings), schedule=schedule)

    @property
    def plan(self) -> str | None:
        """The plan this side asks for by a setting."""
        return next((setting for setting in self.settings if setting in PLAN_SETTINGS), None)

    @property
    def engine_settings(self) -> dict[str, int | str | bool]:
        """The rest of the settings, as the engine's keyword arguments."""
        pairs = (s.partition("=") for s in self.settings if s not in PLAN_SETTINGS)
        return {
            name: True if not sign else int(value) if value.isdecimal() else value
            for name, sign, value in pairs
        }

    def __str__(self) -> str:
        return "+".join([self.engine, *self.settings]) + f":{self.schedule}"


class TracingObserver(Observer, Protocol):
    """An observer that records what it sees with a tracer."""

    tracer: Tracer


@dataclass(slots=True)
class Runner:
    """Runs one side of a comparison, any number of times, always by the same plan and schedule.

    plan: what the caller asked for; the side's own setting wins. schedule, resolved, sites: the
    schedule, the plan and the engine's operator sites, known after the first run.
    """

    side: Side
    model: LoadedModel
    requests: tuple[Request, ...]
    plan: str | Plan
    schedule: Schedule | None = None
    resolved: Plan | None = None
    sites: tuple[Site, ...] = ()
    seconds: float = 0.0
    _held: AnyEngine | None = None
    _digests: tuple[int, dict[str, Digests]] | None = None

    @contextmanager
    def held(self) -> Generator[None]:
        """Several runs on one embedded engine: only runs may touch the model in this block."""
        if self.side.engine not in ("paged", "packed"):
            yield
            return
        with self.engine() as engine:
            before, self._held = self._held, engine
            try:
                yield
            finally:
                self._held, self._digests = before, None

    @contextmanager
    def engine(self) -> Generator[AnyEngine]:
        """The engine with its plan applied, until the block ends."""
        if self._held is not None:
            yield self._held
            return
        plan = self.side.plan or self.plan
        engine = make_engine(
            self.side.engine, self.model, self.resolved or plan, **self.side.engine_settings
        )
        self.resolved, self.sites = engine.instrument.plan, engine.instrument.sites
        try:
            yield engine
        finally:
            engine.close()

    def traced(
        self,
        observer: Observer,
        tracer: Tracer,
        *,
        only: Iterable[str] | None = None,
    ) -> Trace:
        """Run with ``observer`` and close ``tracer``'s trace. only: ids of the requests to run."""
        started = time.perf_counter()
        with self.engine() as engine:
            run = self._run(engine, observer, only)
            trace = tracer.finish(run, engine.describe(), self._weights(engine))
        self.seconds = time.perf_counter() - started
        return trace

    def _weights(self, engine: AnyEngine) -> dict[str, Digests]:
        """Digests of every row of the weights; of a held engine, once a version."""
        if self._held is None:
            return weight_digests(self.model.module)
        if self._digests is None or self._digests[0] != engine.version:
            self._digests = engine.version, weight_digests(self.model.module)
        return self._digests[1]

    def run(self) -> Run:
        """Run without watching."""
        with self.engine() as engine:
            return self._run(engine)

    def _run(
        self,
        engine: AnyEngine,
        observer: Observer | None = None,
        only: Iterable[str] | None = None,
    ) -> Run:
        if self.schedule is None:
            self.schedule = engine.schedule(self.side.schedule, self.requests)
        schedule, requests = self.schedule, self.requests
        if only is not None:
            names = frozenset(only)
            requests = tuple(request for request in requests if request.id in names)
            schedule = restrict(schedule, names)
        scenario = Scenario(
            model=self.model.spec,
            plan=engine.instrument.plan.name,
            requests=requests,
            schedule=schedule,
        )
        return engine.run(scenario, observer)


def restrict(schedule: Schedule, names: frozenset[str]) -> Schedule:
    """The same schedule without the other requests; ``names`` must be closed (see ``closure``)."""
    events = []
    for event in schedule.events:
        if isinstance(event, Step):
            slices = tuple(piece for piece in event.slices if piece.request in names)
            if slices:
                events.append(Step(slices=slices, padded_rows=event.padded_rows, mode=event.mode))
        elif isinstance(event, Publish) or event.request in names:
            events.append(event)
    return replace(schedule, events=tuple(events))  # keeps what an engine added to it


def closure(schedules: Sequence[Schedule], names: Iterable[str]) -> list[str]:
    """``names`` and every request whose cached state one of them uses, directly or not."""
    closed = list(dict.fromkeys(names))
    hits = [e for schedule in schedules for e in schedule.events if isinstance(e, Hit)]
    for name in closed:  # grows while it is walked
        closed += [h.source for h in hits if h.request == name and h.source not in closed]
    return closed
