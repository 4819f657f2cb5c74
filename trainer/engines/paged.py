"""The embedded rollout engine: the transformers module graph over a paged cache.

Executes any legal schedule exactly as written (:meth:`PagedEngine.run`), or makes one by
continuous batching (:meth:`PagedEngine.generate`) and returns it with the run, so that it can be
replayed. It is the default where there is no GPU, and the zero-mismatch reference everywhere.

    engine = PagedEngine(load_model("smollm2-135m"), plan)
    run = engine.generate([Request(id="a", tokens=prompt, sampling=Sampling(max_new_tokens=48))])
    again = engine.run(replay(run))          # the same bits

Transformers' own cache is bypassed: ``use_cache=False``, explicit positions, and a batch object
that reaches the attention function and recurrent mixers. The parts: ``pages.py`` (who holds which
page), ``paged_batch.py`` (attention over pages), ``recurrent_batch.py`` (recurrent layers over
pages of one chunk), ``execution.py`` (events), ``scheduler.py`` (batching policy),
``generation.py`` (drawing tokens), ``weights.py`` (publication).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.attention import PAGE
from ...kernels.errors import ScheduleError, UsageError
from ...model_recipes.apply import Instrument, apply_plan
from ...model_recipes.models import LoadedModel
from ...model_recipes.plan import Plan
from .admission import admit
from .base import (
    Observer,
    Policy,
    Publish,
    Request,
    Run,
    Sample,
    Scenario,
    Schedule,
    StateSpec,
    Step,
)
from .environment import describe_engine
from .execution import Execution
from .generation import check_generation, generate
from .paged_batch import Caches, page_bytes
from .pages import Pools, pages_for, peak_pages
from .recurrent_batch import page_sizes, state_specs
from .rows import known_targets, last_of_each, observed, row_names, score
from .schedules import build_schedule
from .weights import Weights

CACHE_BYTES = 2 << 30


class PagedEngine:
    """See the module. ``num_pages``: cache size in pages of 16 positions; None takes what a run
    needs, up to 2 GiB. Recurrent layers have pages for as many positions."""

    name = "paged"

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        *,
        num_pages: int | None = None,
        instrument: Instrument | None = None,
    ) -> None:
        if num_pages is not None and num_pages < 1:
            raise UsageError(f"num_pages is {num_pages}; use at least 1, or None")
        self.loaded = loaded
        self.instrument = instrument or apply_plan(loaded.module, plan)
        self.num_pages = num_pages
        self.weights = Weights(loaded)
        self._caches: Caches | None = None

    @property
    def version(self) -> int:
        """Version of the installed weights."""
        return self.weights.version

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Keys and values of every attention site, in pages (windows keep all keys too); states of
        recurrent layers at the end of every chunk."""
        return state_specs(self.instrument, granule=PAGE)

    def schedule(self, name: str, requests: Sequence[Request]) -> Schedule:
        """The named schedule, fitted to this engine."""
        return build_schedule(name, requests, self.state_specs())

    def describe(self) -> dict[str, Any]:
        """Everything that goes into the environment digest."""
        return describe_engine(self.name, self.instrument, self.weights) | {
            "page_size": PAGE,
            "num_pages": self.num_pages,
        }

    @torch.no_grad()
    def run(self, scenario: Scenario, observer: Observer | None = None) -> Run:
        """Execute ``scenario.schedule`` exactly as written; score each token it has a row for."""
        schedule = admit(
            self.name,
            scenario,
            self.loaded.config,
            self.state_specs(),
            version=self.version,
            routings=self.instrument.routings,
        )
        for event in schedule.events:
            if isinstance(event, Publish):
                self.weights.require(event)
        requests = {request.id: request for request in scenario.requests}
        sizes = self._pages_for_schedule(schedule, requests)
        tokens = {name: request.tokens for name, request in requests.items()}
        pools = Pools(sizes, padded_rows=_padded_rows(schedule))
        execution = self._execution(tokens, pools, observer, requests)
        scored: list[Sample] = []
        with observed(self.instrument, observer):
            for event in schedule.events:
                hidden = execution.apply(event)
                if isinstance(event, Step) and hidden is not None:
                    scored += score(
                        self.instrument,
                        hidden,
                        known_targets(row_names(event), requests),
                        version=self.version,
                        step=execution.steps - 1,
                        observer=observer,
                    )
        return Run(
            scenario=scenario,
            executed=Schedule(events=tuple(execution.executed)),
            requests=scenario.requests,
            samples=last_of_each(scored),
            engine=self.name,
        )

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        policy: Policy | None = None,
        observer: Observer | None = None,
        *,
        between: Callable[[], Publish | None] | None = None,
    ) -> Run:
        """Sample up to ``max_new_tokens`` per request with continuous batching.

        ``between`` is asked between steps for staged weights (:meth:`stage`) to install; each
        sample says which version drew it. The run's samples are the sampled tokens; its
        ``executed`` schedule, run on its ``requests``, gives the same bits (tokens that were drawn
        before such an installation are scored again under the later version). Raises before any
        work when a request can never fit.
        """
        policy = policy or Policy()
        check_generation(self.name, requests, policy, self.loaded.config)
        num_pages = self._pages_for_generation(requests, policy)
        tokens = {request.id: list(request.tokens) for request in requests}
        execution = self._execution(tokens, Pools(self._sizes(num_pages)), observer, {})
        with observed(self.instrument, observer):
            samples = generate(execution, requests, tokens, policy, between)
        return Run(
            scenario=Scenario(
                model=self.loaded.spec,
                plan=self.instrument.plan.name,
                requests=tuple(requests),
                policy=policy,
            ),
            executed=Schedule(events=tuple(execution.executed)),
            requests=tuple(_with_reply(request, tokens[request.id]) for request in requests),
            samples=last_of_each(samples),
            engine=self.name,
        )

    def stage(self, weights: Mapping[str, Tensor], version: int) -> Publish:
        """Keep new weights for a schedule's Publish event, which is returned."""
        return self.weights.stage(weights, version)

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Install new weights in place; no cached state outlives a run."""
        self.weights.install(self.weights.stage(weights, version))

    def close(self) -> None:
        """Take the plan off the model."""
        self.instrument.remove()

    def _sizes(self, num_pages: int) -> dict[int, int]:
        """By page size, how many pages hold as many positions as ``num_pages`` pages of keys."""
        return {
            size: pages_for(num_pages * PAGE, size) for size in page_sizes(self.instrument)
        }

    def _pages_for_schedule(
        self, schedule: Schedule, requests: Mapping[str, Request]
    ) -> dict[int, int]:
        """Exactly what the schedule needs at its worst moment, if the engine has as many."""
        found: dict[int, int] = {}
        for size in page_sizes(self.instrument):
            most = sum(pages_for(len(request.tokens), size) for request in requests.values())
            needed = peak_pages(schedule.events, most, size)
            have = None if self.num_pages is None else self._sizes(self.num_pages)[size]
            if have is not None and needed > have:
                raise ScheduleError(
                    f"the schedule holds {needed} cache pages at once ({size} positions each) and "
                    f"this engine has {have}; raise num_pages, or Evict or Preempt earlier"
                )
            found[size] = have or needed
        return found

    def _pages_for_generation(self, requests: Sequence[Request], policy: Policy) -> int:
        """Pages as asked, else as the engine was built, else what all need, within 2 GiB."""
        needed = [pages_for(len(r.tokens) + r.sampling.max_new_tokens - 1) for r in requests]
        num_pages = policy.num_pages or self.num_pages
        if num_pages is None:
            affordable = CACHE_BYTES // page_bytes(self.loaded, self.instrument)
            num_pages = min(sum(needed), max(affordable, *needed))
        for request, pages in zip(requests, needed, strict=True):
            if pages > num_pages:
                raise UsageError(
                    f"request {request.id!r} can never fit: it needs {pages} cache pages and there "
                    f"are {num_pages}; raise num_pages, or lower its max_new_tokens"
                )
        return num_pages

    def _execution(
        self,
        tokens: Mapping[str, Sequence[int]],
        pools: Pools,
        observer: Observer | None,
        requests: Mapping[str, Request],
    ) -> Execution:
        if self._caches is None or not self._caches.hold(pools):
            self._caches = None  # the old ones go before the new ones come
            self._caches = Caches(self.loaded, self.instrument, pools)
        return Execution(
            self.instrument, self.weights, pools, self._caches, tokens, observer, requests
        )


def _padded_rows(schedule: Schedule) -> int:
    """Padding rows of the step that has most."""
    steps = (event for event in schedule.events if isinstance(event, Step))
    return max((step.padded_rows for step in steps), default=0)


def _with_reply(request: Request, tokens: list[int]) -> Request:
    """The request with its sampled tokens appended."""
    known = len(request.tokens)
    mask = request.sampled_mask or (False,) * known
    reply = len(tokens) - known
    return replace(
        request,
        tokens=tuple(tokens),
        sampled_mask=mask + (True,) * reply,
        turns=(*request.turns, (known, len(tokens))),
    )


def replay(run: Run) -> Scenario:
    """The scenario that executes a run's schedule again, its sampled tokens now given."""
    return Scenario(
        model=run.scenario.model,
        plan=run.scenario.plan,
        requests=run.requests,
        schedule=run.executed,
    )
