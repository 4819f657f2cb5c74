"""The records that every engine speaks: requests, schedules, scenarios, runs, observations.

A **schedule is data**: which tokens of which requests go through which forward pass, in which
order, on top of which cached state. Whole prefill, chunked prefill, decode, prefix hits, eviction,
preemption, mixed batches, rejected drafts and the trainer's packed forward are all schedules.
Aligned means: for one set of weights and tokens, every legal schedule on every engine yields the
same logprob bits.

    Schedule(events=(
        Step(slices=(Slice(request="a", start=0, stop=32),)),
        Hit(request="b", source="a", upto=16),
        Step(slices=(Slice(request="b", start=16, stop=40), Slice(request="a", start=32, stop=33))),
    ))

Engines accept an :class:`Observer` and never import the recorder. ``legal`` is in ``legal.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from ...model_recipes.sites import Site, SiteCall

__all__ = ["Site", "SiteCall"]

Mode = Literal["eager", "compiled", "graph"]
StateKind = Literal["kv", "window", "latent", "compressed", "recurrent", "conv", "indexer"]
ObservationKind = Literal["value", "choice", "state", "weight", "grad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn: ``temperature`` 0 is greedy (lowest id on ties); noise is keyed by
    (seed, position, token id), so that it does not depend on the batch."""

    temperature: float = 1.0
    seed: int = 0
    max_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence.

    tokens: prompt, then the response as far as it is known (forced tokens when replaying).
    sampled_mask: same length; True where the policy sampled the token. Empty means all False.
    turns: (start, stop) of each model turn.
    adapter: LoRA adapter name or None.
    forced: ``{site name: choices}`` for replayed discrete choices (expert ids).

        Request(id="a", tokens=(1, 5, 9), sampled_mask=(False, False, True))
    """

    id: str
    tokens: tuple[int, ...]
    sampled_mask: tuple[bool, ...] = ()
    turns: tuple[tuple[int, int], ...] = ()
    adapter: str | None = None
    sampling: Sampling = Sampling()
    forced: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Tokens ``[start, stop)`` of a request go through a forward on top of state ``[0, start)``.

    keep: state kept afterwards covers ``[0, keep)``; None keeps all. ``keep < stop``: rejected
        drafts.
    """

    request: str
    start: int
    stop: int
    keep: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass over several slices, plus padding rows that belong to no request."""

    slices: tuple[Slice, ...]
    padded_rows: int = 0
    mode: Mode = "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Prefix hit: ``request`` starts from the cached state of ``source`` for ``[0, upto)``.

    ``source`` equal to ``request``: the request is sent again and goes on from its own prefix.
    """

    request: str
    source: str
    upto: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """The cached state of a request (finished or waiting) is dropped."""

    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """A running request loses its state and may not run before its Resume."""

    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A preempted request may run again, from position 0 or from a Hit."""

    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """New weights: every cached state from before is invalid."""

    version: int
    digest: str


Event = Step | Hit | Evict | Preempt | Resume | Publish


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Ordered events."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """What kind of state a site keeps between steps, and where it may be cut.

    granule: prefix hits land only on multiples of it (page size for kv, chunk for recurrent).
    snapshot_every: a snapshot exists only at these multiples; None: at every granule.
    window: keys older than this are not kept; None: all are.
    rollback: whether rejected drafts can be undone without a snapshot.

        StateSpec(site="model.layers.0.self_attn", kind="kv", granule=16, rollback=True)
    """

    site: str
    kind: StateKind
    granule: int
    snapshot_every: int | None = None
    window: int | None = None
    rollback: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel layout. ``owners`` says which rank owns what, where that matters (experts)."""

    tp: int = 1
    ep: int = 1
    dp: int = 1
    cp: int = 1
    pp: int = 1
    fsdp: int = 1
    owners: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A flag's value, and whether its effect was proven on this engine."""

    value: Any
    effect_proven: bool


Settings = Mapping[str, Setting]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How ``generate`` forms batches. The schedule it leads to is returned with the run.

    max_step_tokens: rows in one step at most; longer prompts are chunked.
    max_running: requests in flight at most.
    num_pages: cache pages; too few of them leads to preemption.
    prefix_cache: reuse cached prefixes of other requests.
    """

    max_step_tokens: int = 256
    max_running: int = 64
    num_pages: int | None = None
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What to run: exactly one of ``schedule`` and ``policy`` is given.

    model, plan: names or digests, for the record; the engine already holds the loaded model.
    """

    model: str
    plan: str
    requests: tuple[Request, ...]
    schedule: Schedule | None = None
    policy: Policy | None = None
    layout: Layout = Layout()
    settings: Settings = field(default_factory=dict[str, Setting])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One scored token: ``logprob_bits`` is the int32 view of the fp32 logprob.

    position: index of the token in its request (its logprob comes from row ``position - 1``).
    version: weight version that computed it.
    """

    request: str
    position: int
    token: int
    logprob_bits: int
    version: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What really happened: executed schedule, one sample per scored token, the trace if any."""

    scenario: Scenario
    executed: Schedule
    requests: tuple[Request, ...]  # with the sampled tokens appended
    samples: tuple[Sample, ...]
    engine: str
    trace: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One row of one site. ``digest`` is 128 bits in hex; ``blob`` names the stored tensor."""

    run: str
    site: str
    call: int
    request: str
    position: int
    kind: ObservationKind
    dtype: str
    shard: str
    digest: str
    blob: str | None = None


class Observer(Protocol):
    """Watches a run. The engine calls ``begin_rows`` before each forward (and before the head,
    whose rows are a subset), then every site calls ``on_site``; row i of every tensor there is
    ``rows[i]``. Padding rows have request ``""`` and position -1."""

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None: ...

    def on_site(self, call: SiteCall, /) -> Tensor | None: ...


class Engine(Protocol):
    """One way to compute logprobs. Engines are built around a loaded model with a plan applied."""

    name: str
    version: int

    def state_specs(self) -> tuple[StateSpec, ...]:
        """State this engine keeps, per site; ``legal`` needs it."""
        ...

    def describe(self) -> dict[str, Any]:
        """Everything that goes into the environment digest."""
        ...

    def run(self, scenario: Scenario, observer: Observer | None = None) -> Run:
        """Execute ``scenario.schedule`` exactly as written, or raise."""
        ...

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Install new weights in place and drop every cached state."""
        ...
