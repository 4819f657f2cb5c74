"""vLLM as a rollout engine: the same protocol as the others, its own batches.

    engine = VllmEngine(load_model("smollm2-135m", dtype="bfloat16", device="cuda"), "aligned")
    run = engine.generate(requests)                      # sampled tokens, exact fp32 logprobs
    run.executed                                         # the batches that vLLM really formed

vLLM decides which tokens share a step, so a schedule cannot be prescribed: ``schedule(name)`` gives
a *policy* (:class:`Asked`), and the run says what was executed.

    alone       each request by itself, whole               batched     all at once, whole
    chunk:N     by itself, at most N tokens a step          decode      by itself, reply forced
    mixed       all at once, replies forced                 prefix-hit  decode, then each again
    preempt     as mixed, with too few cache blocks

Forced replies go through a logits processor, which the first model runner alone takes; so does
tracing, which needs eager steps. ``graphs=True`` keeps compilation and CUDA graphs and digests what
operators give inside them (:mod:`.graph_tap`). ``generate`` runs with whatever vLLM chooses.

The engine core lives in this process. Nothing here imports vLLM before an engine is built.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from ....kernels.errors import CapabilityError, InconclusiveError, UsageError
from ....model_recipes.apply import find_sites
from ....model_recipes.models import LoadedModel
from ....model_recipes.plan import STOCK, Plan
from ....model_recipes.sites import Site
from ...publication.in_place import Installed, Offer
from ..admission import check_requests
from ..base import Observer, Policy, Request, Run, Scenario, Schedule, StateSpec
from ..environment import describe_engine
from .graph_tap import Seen
from .live import live_engine
from .recurrent_options import is_recurrent
from .start import Settings

POLICIES = ("alone", "batched", "chunk:N", "decode", "mixed", "prefix-hit", "preempt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Schedule):
    """A policy for vLLM in the place of a schedule; its events are not known beforehand."""

    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What a plan became here. sites: the trainer's, by the names that traces use."""

    plan: Plan
    sites: tuple[Site, ...]


class VllmEngine:
    """See the module."""

    name = "vllm"

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        *,
        eager: bool | None = None,
        runner: int | None = None,
        max_len: int | None = None,
        max_rows: int = 2048,
        max_running: int = 256,
        blocks: int | None = None,
        cache_gib: int | None = None,
        graphs: bool = False,
    ) -> None:
        on_cpu, recurrent = loaded.device.type == "cpu", is_recurrent(loaded)
        self.settings = Settings(
            eager=on_cpu or recurrent if eager is None else eager,
            runner=1 if on_cpu or recurrent or graphs else runner,
            max_len=max_len,
            max_rows=max_rows,
            max_running=max_running,
            blocks=blocks,
            cache_gib=cache_gib,
            taps=graphs,
        )
        self.loaded = loaded
        sites = (
            replace(site, contract=None if plan.choice(site) == STOCK else plan.choice(site))
            for site in find_sites(loaded.module)
        )
        self.instrument = Applied(plan=plan, sites=tuple(sites))
        self.live = live_engine(loaded, plan, self.settings)
        self.weights = _Weights(self)

    @property
    def version(self) -> int:
        """Version of the installed weights."""
        return self.live.version

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Keys and values, and states of recurrent layers, in vLLM's own blocks."""
        kinds = {"attention": "kv", "convolution": "conv"}
        kept = (
            (site.path, "recurrent" if site.op_class.startswith("recurrence_")
             else kinds.get(site.op_class))
            for site in self.instrument.sites
        )  # fmt: skip
        granule = self.live.block_size
        return tuple(
            StateSpec(site=path, kind=cast(Any, kind), granule=granule, rollback=kind == "kv")
            for path, kind in kept
            if kind is not None
        )

    def schedule(self, name: str, requests: Sequence[Request]) -> Asked:
        """The policy of that name; UsageError for one that vLLM cannot follow."""
        kind, _, argument = name.partition(":")
        if kind not in {each.partition(":")[0] for each in POLICIES}:
            raise UsageError(
                f"vLLM forms its own batches and cannot follow {name!r}; use one of "
                f"{', '.join(POLICIES)}"
            )
        if kind == "chunk" and not (argument.isdecimal() and int(argument) > 0):
            raise UsageError(f"schedule {name!r} needs a number of tokens, for example chunk:7")
        return Asked(events=(), policy=name)

    def describe(self) -> dict[str, Any]:
        """Everything that goes into the environment digest."""
        own = describe_engine(self.name, cast(Any, self.instrument), cast(Any, self.weights))
        return own | self.live.facts()

    def run(self, scenario: Scenario, observer: Observer | None = None) -> Run:
        """Score known tokens under a policy (:meth:`schedule`); returns what was executed."""
        if not isinstance(scenario.schedule, Asked):
            raise CapabilityError(
                "vLLM forms its own batches: give the policy from engine.schedule(name, requests), "
                "or replay on the paged engine what vLLM executed"
            )
        check_requests(self.name, scenario.requests, self.loaded.config)
        self._follow_trainer()
        return self.live.score(
            scenario,
            scenario.schedule.policy,
            scenario.requests,
            {site.name: site for site in self.instrument.sites},
            observer,
        )

    def generate(
        self,
        requests: Sequence[Request],
        policy: Policy | None = None,
        observer: Observer | None = None,
        *,
        between: Callable[[], Offer | None] | None = None,
    ) -> Run:
        """Sample up to ``max_new_tokens`` per request; the samples are the sampled tokens.

        ``between`` is asked before every step for staged weights (:meth:`stage`) to install;
        running requests are then computed anew, and each sample says which version drew it.
        """
        if observer is not None:
            raise CapabilityError(
                "vLLM is not watched while it samples; score its tokens with `run`, or sample with "
                "the paged engine"
            )
        check_requests(self.name, requests, self.loaded.config, generating=True)
        self._follow_trainer()
        scenario = Scenario(
            model=self.loaded.spec,
            plan=self.instrument.plan.name,
            requests=tuple(requests),
            policy=policy or Policy(),
        )
        return self.live.sample(scenario, requests, policy or Policy(), between)

    def run_tapped(self, scenario: Scenario, keep: Callable[[Seen], None]) -> Run:
        """As :meth:`run`, of an engine with ``graphs=True``; ``keep`` gets every step's digests."""
        if not isinstance(scenario.schedule, Asked):
            raise CapabilityError("vLLM forms its own batches: give the policy from "
                                  "engine.schedule(name, requests)")  # fmt: skip
        check_requests(self.name, scenario.requests, self.loaded.config)
        self._follow_trainer()
        return self.live.score_tapped(scenario, scenario.schedule.policy, keep)

    def faulty(self) -> AbstractContextManager[str]:
        """In the block, one bit is computed wrong inside captured graphs; yields the site.

        CapabilityError before :meth:`run_tapped`.
        """
        if self.live.taps is None:
            raise CapabilityError("this engine has no taps in its graphs; ask for vllm+graphs")
        return self.live.taps.faulty()

    def stage(self, weights: Mapping[str, Tensor], version: int) -> Offer:
        """Check and digest complete new weights; nothing changes yet."""
        return self.live.stage(weights, version)

    def publish(self, weights: Mapping[str, Tensor], version: int) -> Installed:
        """Install new weights in place and drop every cached state, or leave the old ones."""
        return self.install(self.stage(weights, version))

    def install(self, offer: Offer) -> Installed:
        """Install what was staged here, or what a learner on this machine offers."""
        return self.live.install(offer)

    def close(self) -> None:
        """Leave the engine alive for the next run of the same model, plan and settings."""

    def _follow_trainer(self) -> None:
        """Unless weights were published, this engine computes with the loaded module's."""
        if self.version:
            return
        root = self.loaded.weights_root
        if root != self.live.root:
            raise InconclusiveError(
                f"vLLM loaded weights {self.live.root}, the trainer's model has {root}; "
                "publish the trainer's weights first"
            )


class _Weights:
    """What :func:`describe_engine` asks of an engine's weights."""

    def __init__(self, engine: VllmEngine) -> None:
        self.loaded = engine.loaded
        self._engine = engine

    @property
    def root(self) -> str:
        return self._engine.live.root

    @property
    def version(self) -> int:
        return self._engine.live.version
