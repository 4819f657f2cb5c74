"""What all gates share: the model under its plan, the requests, the engines, and how much to do.

One model carries one plan at a time, so :meth:`Bench.on` switches: gates ask for the engines under
a plan and get them, whoever used the model before. Runs that several gates compare with (the
sampled rollout, each request alone, the trainer's packed forward) are made once.

    bench = Bench(model=load_model("tiny:llama"), plan=plan, size=QUICK, ...)
    bench.on().packed.run(...)                      # under the plan
    bench.on(with_stock(bench.plan, "linear"))      # the red control

Left out: any verdict (``base.py``).
"""

import copy
import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

import torch

from ...kernels.attention import PAGE
from ...kernels.errors import InconclusiveError, UsageError
from ...model_recipes.bindings import dtype_name
from ...model_recipes.models import LoadedModel, load_model
from ...model_recipes.plan import STOCK, Plan, stock_plan
from ...model_recipes.recurrent import recurrent_chunks
from ...trainer.engines.base import Observer, Policy, Request, Run, Scenario, Schedule, SiteCall
from ...trainer.engines.packed import PackedEngine
from ...trainer.engines.paged import PagedEngine
from ..heat import stored_heat_map
from ..localize import Options, localize
from ..plots import HeatMap
from ..records import Divergence
from ..rollouts import TokenCount
from ..sides import Side

STOCK_TRIED = ("attention", "linear", "rmsnorm")
"""Classes of which one whose stock kernels depend on the schedule is a red control."""
Try = tuple[str, Callable[[], TokenCount]]
"""A red control that may be tried: its name, and what it compares."""
Counts = dict[str, TokenCount]
STEP_TOKENS = 96
"""Rows in one rollout step: few enough that prompts are chunked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much each gate does. reply: sampled tokens per request. long: tokens of the long one.

    phase_requests: how many requests C4 takes through every phase; fuzz_requests: through random
    schedules. timed: how many C10 times. backward_tokens: leading tokens of a request that a
    backward pass runs on. ``budget.py`` makes it smaller for large models.
    """

    requests: int
    reply: int
    fuzzed: int
    fuzz_requests: int
    backward: int
    gradient_requests: int
    long: int
    rounds: int
    training_steps: int
    phase_requests: int = 8
    timed: int = 8
    backward_tokens: int = 48


QUICK = Size(
    requests=6, reply=20, fuzzed=5, fuzz_requests=3, backward=10, gradient_requests=3, long=192,
    rounds=3, training_steps=2,
)  # fmt: skip
FULL = Size(
    requests=16, reply=24, fuzzed=16, fuzz_requests=4, backward=100, gradient_requests=3, long=1024,
    rounds=5, training_steps=4,
)  # fmt: skip


class Quiet:
    """An observer that looks away: what a fault is wrapped round."""

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        """Nothing."""

    def on_site(self, call: SiteCall, /) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class Engines:
    """Both engines on one model under one plan."""

    plan: Plan
    paged: PagedEngine
    packed: PackedEngine

    def run(
        self,
        name: str | Schedule,
        requests: Sequence[Request],
        observer: Observer | None = None,
        engine: Literal["paged", "packed"] = "paged",
    ) -> Run:
        """Run a named or given schedule."""
        chosen = self.paged if engine == "paged" else self.packed
        schedule = chosen.schedule(name, requests) if isinstance(name, str) else name
        scenario = Scenario(
            model=chosen.loaded.spec,
            plan=self.plan.name,
            requests=tuple(requests),
            schedule=schedule,
        )
        return chosen.run(scenario, observer)

    def pack(self, requests: Sequence[Request], observer: Observer | None = None) -> Run:
        """Score everything in one packed forward, as the trainer does."""
        return self.run("packed", requests, observer, engine="packed")


@dataclass(slots=True, weakref_slot=True)
class _Current:
    engines: Engines | None = None


@dataclass
class Bench:
    """See the module. prompts: requests without a reply, each with a budget to sample.

    untouched: a copy of the model from before any plan was applied to it; None: loaded again.
    """

    model: LoadedModel
    plan: Plan
    prompts: tuple[Request, ...]
    size: Size
    quick: bool
    seed: int = 0
    progress: Callable[[str], None] = lambda stage: None
    untouched: LoadedModel | None = None
    _current: _Current = field(default_factory=_Current)
    _stock: dict[str, Counts] = field(default_factory=dict[str, Counts])
    _explained: set[str] = field(default_factory=set[str])

    def on(self, plan: Plan | None = None) -> Engines:
        """The engines under a plan, by default the one that is being gated."""
        plan = plan or self.plan
        current = self._current.engines
        if current is not None and current.plan == plan:
            return current
        self.release()
        self._current.engines = engines_on(self.model, plan)
        return self._current.engines

    def release(self) -> None:
        """Take whatever plan is on the model off it."""
        if self._current.engines is not None:
            self._current.engines.paged.close()
            self._current.engines = None

    def fresh(self) -> LoadedModel:
        """The model once more, in memory of its own and without a plan."""
        if self.model.device.type == "cpu":
            return replace(self.pristine, module=copy.deepcopy(self.pristine.module))
        return self._loaded()

    def _loaded(self) -> LoadedModel:
        dtype = cast(Literal["float32", "bfloat16"], dtype_name(self.model.dtype))
        return load_model(
            self.model.spec, dtype=dtype, device=str(self.model.device), seed=self.seed
        )

    @functools.cached_property
    def pristine(self) -> LoadedModel:
        """The model once more, as it was loaded; it never carries the plan being gated."""
        return self.untouched or self._loaded()

    @functools.cached_property
    def sampled(self) -> Run:
        """The rollout: continuous batching, chunked prefill, prefix cache, preemption."""
        return self.on().paged.generate(self.prompts, self.policy())

    @property
    def requests(self) -> tuple[Request, ...]:
        """The prompts with what the rollout sampled."""
        return self.sampled.requests

    @property
    def learned(self) -> tuple[Request, ...]:
        """A few requests cut short, every token from the second on counted as sampled."""
        few = self.requests[: self.size.gradient_requests]
        return tuple(cut(each, min(self.size.backward_tokens, len(each.tokens))) for each in few)

    def policy(self) -> Policy:
        """Chunked prompts, shared steps, and too few pages for all requests at once.

        Replies shorter than a page need a new one seldom: then there is room for one request and
        what another does not share with it, and the longest prompt does not fit a step.
        """
        lengths = [len(r.tokens) + r.sampling.max_new_tokens for r in self.prompts]
        pages = [-(-length // PAGE) for length in lengths]
        if self.size.reply < PAGE:
            longest = max(len(request.tokens) for request in self.prompts)
            return Policy(
                max_step_tokens=min(STEP_TOKENS, max(PAGE, longest * 3 // 4)),
                num_pages=max(pages) + 2,
            )
        part, of = (1, 2) if recurrent_chunks(self.model.module) else (5, 9)  # chunks grow seldom
        num_pages = max(max(pages), sum(pages) * part // of)
        return Policy(max_step_tokens=STEP_TOKENS, num_pages=num_pages)

    @functools.cached_property
    def alone(self) -> Run:
        """Every request whole, in a step of its own: what everything is compared with."""
        requests = self.requests
        return self.on().run("alone", requests)

    @functools.cached_property
    def mixed(self) -> Run:
        """All requests together: prompts in chunks beside decodes."""
        requests = self.requests
        return self.on().run("mixed", requests)

    def stock_controls(self, against: Literal["whole", "packed"]) -> Iterator[Try]:
        """Red controls: a class of operators, its stock kernels' decode against its whole prompts,
        or against its trainer.

        Attention, or the next class where stock attention gives both the same bits, as it may on
        an H200 in bf16.
        """
        for op_class in STOCK_TRIED[:1] if self.plan.is_stock else STOCK_TRIED:
            yield f"stock {op_class}", lambda name=op_class: self._stock_decode(name)[against]

    def _stock_decode(self, op_class: str) -> Counts:
        """Both comparisons, made once. A long request is among them: a fused kernel that holds all
        keys of a short one in a single tile gives decode the bits of the whole prompt."""
        if op_class not in self._stock:
            from .scale import long_request

            short = self.requests[: 1 if self.quick else 2]
            few = (*short, long_request(self.requests, self.size.long))
            red = self.on(with_stock(self.plan, op_class))
            decoded = red.run("decode", few)
            sides = {"whole": red.run("alone", few), "packed": red.pack(few)}
            self._stock[op_class] = {n: compare_scored(decoded, run) for n, run in sides.items()}
        return self._stock[op_class]

    def stock_recurrence(self, op_class: str) -> Iterator[Try]:
        """Red controls: a recurrence's stock kernels in other chunks, or decoded, against whole.

        Chunks first: of a few decoded rows, bf16 may hide all that stock does.
        """
        few = self.requests[:2]
        for schedule in ("chunk:33", "decode"):

            def run(schedule: str = schedule) -> TokenCount:
                red = self.on(with_stock(self.plan, op_class))
                return compare_scored(red.run(schedule, few), red.run("alone", few))

            yield f"stock {op_class}, {schedule} = whole", run

    @functools.cached_property
    def packed(self) -> Run:
        """The trainer's packed forward."""
        requests = self.requests  # first: sampling them may take the plan off the model
        return self.on().pack(requests)

    @functools.cached_property
    def stock_packed(self) -> Run:
        """The same with stock kernels."""
        requests = self.requests
        return self.on(stock_plan()).pack(requests)

    def culprits_and_heat(
        self, left: str, right: str, requests: Sequence[Request]
    ) -> tuple[Divergence, HeatMap | None]:
        """Which operators make two sides differ under the plan, and where, layer by token.

        Causes are searched for once: another red gate's search only where it has operator classes
        that no search before had.
        """
        self.release()
        causes = not self.quick and not self._explained
        found, heat = self._localized(left, right, requests, causes=causes)
        classes = {culprit.op_class for culprit in found.culprits}
        if not self.quick and not causes and classes - self._explained:
            found, heat = self._localized(left, right, requests, causes=True)
        self._explained |= classes
        return found, heat

    def _localized(
        self, left: str, right: str, requests: Sequence[Request], *, causes: bool
    ) -> tuple[Divergence, HeatMap | None]:
        sides = (Side.parse(left), Side.parse(right))
        with tempfile.TemporaryDirectory() as name:
            options = Options(progress=self.progress, causes=causes, out=Path(name))
            found = localize(*sides, self.model, requests, plan=self.plan, options=options)
            return found, stored_heat_map(Path(name)) if found.status == "DIVERGENT" else None


def copy_of(model: LoadedModel) -> LoadedModel | None:
    """A copy of a loaded model; None on a GPU, whose memory holds what is needed at the time."""
    if model.device.type != "cpu":
        return None
    return replace(model, module=copy.deepcopy(model.module))


def engines_on(model: LoadedModel, plan: Plan) -> Engines:
    """Both engines on ``model``, sharing one instrument; close ``paged`` when done."""
    paged = PagedEngine(model, plan)
    return Engines(plan, paged, PackedEngine(model, plan, instrument=paged.instrument))


def first_red(tries: Iterable[Try]) -> tuple[str, TokenCount]:
    """Try red controls until one turns red: its name and count.

    Whether stock kernels give other bits in another schedule is up to the processor, the dtype and
    the sizes. The last one where none turns red: that control stays green, and the gate then counts
    as inconclusive. UsageError without any.
    """
    found: tuple[str, TokenCount] | None = None
    for name, run in tries:
        found = name, run()
        if found[1].differing:
            break
    if found is None:
        raise UsageError("there is no red control to try; name an operator class")
    return found


def with_stock(plan: Plan, *op_classes: str) -> Plan:
    """The plan with some operator classes stock, overrides for other sites kept."""
    return Plan(
        name=f"{plan.name}, stock {' and '.join(op_classes)}",
        rules=plan.rules | dict.fromkeys(op_classes, STOCK),
        overrides=plan.overrides,
    )


def compare_scored(left: Run, right: Run, *, part: bool = False) -> TokenCount:
    """Compare every scored token of two runs, prompt tokens included.

    part: the left run scored fewer tokens (it took prefixes from others, or ran shorter requests).
    """
    ours, theirs = (
        {(s.request, s.position): (s.token, s.logprob_bits) for s in run.samples}
        for run in (left, right)
    )
    odd_ones = ours.keys() - theirs.keys() if part else ours.keys() ^ theirs.keys()
    if odd_ones:
        odd = min(odd_ones)
        raise InconclusiveError(
            f"token {odd[1]} of request {odd[0]} was scored in one run only; score both runs whole"
        )
    differing = sorted(token for token, value in ours.items() if theirs[token] != value)
    return TokenCount(
        compared=len(ours), differing=len(differing), first=differing[0] if differing else None
    )


def only(run: Run, requests: Sequence[Request]) -> Run:
    """The run's samples of some requests."""
    names = {request.id for request in requests}
    return replace(run, samples=tuple(each for each in run.samples if each.request in names))


def requests_digest(requests: Sequence[Request]) -> str:
    """One digest over tokens and sampling of all requests."""
    plain = [
        [r.id, r.tokens, r.sampling.temperature, r.sampling.seed, r.sampling.max_new_tokens]
        for r in requests
    ]
    return hashlib.blake2b(json.dumps(plain).encode(), digest_size=16).hexdigest()


def cut(request: Request, length: int) -> Request:
    """The request's first ``length`` tokens, all from the second on counted as sampled."""
    if length < 2:
        raise UsageError(f"a request of {length} tokens scores nothing; use 2 or more")
    tokens = request.tokens[:length]
    return Request(
        id=request.id,
        tokens=tokens,
        sampled_mask=(False,) + (True,) * (len(tokens) - 1),
        sampling=request.sampling,
    )


def gradients(model: LoadedModel) -> dict[str, torch.Tensor]:
    """The gradients that are there, by parameter name; the model's own are cleared."""
    found = {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}
    model.module.zero_grad(set_to_none=True)
    return found
