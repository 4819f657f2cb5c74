"""The claims behind a recipe: rollout = trainer = scored again, and still the right model.

One rollout samples real tokens with everything on: continuous batching, chunked prefill, prefix
cache. Then the trainer's packed forward scores the same tokens, and so does the rollout engine in
another way: token by token (``paged``), or as one prompt (``vllm``, which forms its own batches).
Each claim asserts its preconditions from the executed schedule, counts its tokens, and names a red
control from the same run: stock kernels on the same tokens.

    proof = prove(load_model("smollm2-135m"), plan, prompts, pristine=load_model("smollm2-135m"))
    [claim.status for claim in proof.claims]

Left out: the gates C0-C10, which ask much more. ``zm align`` exercises it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..kernels.errors import InconclusiveError
from ..model_recipes.models import LoadedModel
from ..model_recipes.plan import Plan, stock_plan
from ..trainer.engines.base import Policy, Request, Run
from ..trainer.engines.build import make_engine
from ..trainer.engines.paged import PagedEngine
from ..trainer.engines.vllm.engine import VllmEngine
from .accuracy import Accuracy, measure_accuracy, reference_logprobs
from .report import Claim
from .rollouts import TokenCount, batching_facts, compare_tokens, logprob_digest
from .sides import Runner, Side

STEP_TOKENS = 96
"""Rows in one step of the proof's rollout: few enough that prompts are chunked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """How a rollout engine scores its tokens a second time. red: the side of the red control."""

    side: str
    red: str
    claim: str
    means: str


OTHERS = {
    "paged": Other(
        side="paged:decode",
        red="paged:mixed",
        claim="decoded alone, token by token",
        means="each request in steps of its own",
    ),
    "vllm": Other(
        side="vllm:batched",
        red="vllm+eager:batched",  # compiling for a red control would take a minute
        claim="scored as a prompt",
        means="all requests at once, each one prompt",
    ),
}

T = TypeVar("T")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenClaim:
    """A claim with what repeats it: the digest of the compared logprobs and the time it took."""

    claim: Claim
    digest: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """All claims, the rollout they are about, and the measured rates in tokens per second."""

    claims: tuple[ProvenClaim, ...]
    rollout: Run
    accuracy: Accuracy
    rates: dict[str, float]

    @property
    def passed(self) -> bool:
        """Every claim passed."""
        return all(entry.claim.status == "pass" for entry in self.claims)


def prove(
    model: LoadedModel,
    plan: Plan,
    prompts: Sequence[Request],
    *,
    pristine: LoadedModel,
    rollout: str = "paged",
    progress: Progress = lambda stage: None,
) -> Proof:
    """Sample ``prompts`` under ``plan`` and prove all claims on the sampled tokens.

    prompts: requests without a reply, with ``sampling.max_new_tokens`` > 0. rollout: the engine
    that samples, ``paged`` or ``vllm``.
    pristine: the same model freshly loaded, for the fp64 reference.
    """
    rates: dict[str, float] = {}
    progress("rollout: continuous batching, chunked prefill, prefix cache")
    sampled, seconds = _timed(lambda: _sample(rollout, model, plan, prompts))
    rates["rollout tokens/s"] = sum(map(sum, (r.sampled_mask for r in sampled.requests))) / seconds
    requests = sampled.requests
    progress("trainer: packed forward")
    packed, packed_seconds = _timed(lambda: _score(model, plan, "packed:packed", requests))
    rates["packed tokens/s"] = sum(len(r.tokens) for r in requests) / packed_seconds
    other = OTHERS[rollout]
    progress(f"rollout engine, {other.means}")
    again, again_seconds = _timed(lambda: _score(model, plan, other.side, requests))
    progress("red control: stock kernels on the same tokens")
    stock = stock_plan()
    stock_packed, stock_seconds = _timed(lambda: _score(model, stock, "packed:packed", requests))
    rates["packed tokens/s, stock"] = sum(len(r.tokens) for r in requests) / stock_seconds
    red = compare_tokens(_score(model, stock, other.red, requests), stock_packed)
    control = f"stock kernels: {red.differing} of {red.compared} differ"
    facts = batching_facts(sampled.executed, requests)
    absent = facts.missing()
    claims = [
        _claim(
            "rollout (mixed, chunked, prefix hits) = packed trainer",
            sampled,
            packed,
            red,
            control,
            packed_seconds,
            absent,
            f"{facts.mixed_steps} mixed steps, "
            f"{facts.chunked_prompts} chunked prompts, {facts.hits} prefix hits, "
            f"at least {facts.tiles} KV tiles",
        ),
        _claim(
            f"rollout = {other.claim}",
            sampled,
            again,
            red,
            control,
            again_seconds,
            absent,
            other.means,
        ),
    ]
    progress("accuracy: untouched transformers in fp64")
    began = time.perf_counter()
    reference = reference_logprobs(pristine, requests)
    accuracy = measure_accuracy(reference, ours=packed, stock=stock_packed)
    claims.append(_accuracy_claim(accuracy, logprob_digest(packed), time.perf_counter() - began))
    return Proof(claims=tuple(claims), rollout=sampled, accuracy=accuracy, rates=rates)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def _sample(rollout: str, model: LoadedModel, plan: Plan, prompts: Sequence[Request]) -> Run:
    engine = make_engine(rollout, model, plan)
    assert isinstance(engine, PagedEngine | VllmEngine)  # OTHERS has no other
    try:
        return engine.generate(prompts, Policy(max_step_tokens=STEP_TOKENS))
    finally:
        engine.close()


def _score(model: LoadedModel, plan: Plan, side: str, requests: Sequence[Request]) -> Run:
    runner = Runner(side=Side.parse(side), model=model, requests=tuple(requests), plan=plan)
    return runner.run()


def _claim(
    name: str,
    left: Run,
    right: Run,
    red: TokenCount,
    control: str,
    seconds: float,
    absent: Sequence[str],
    detail: str,
) -> ProvenClaim:
    count = compare_tokens(left, right)
    status = "pass" if count.equal else "fail"
    if count.equal and (absent or not red.differing):
        status = "inconclusive"  # a green without its preconditions or its red control is void
    claim = Claim(
        name=name,
        status=status,
        compared=count.compared,
        differing=count.differing,
        control=control,
        detail="; ".join([detail, *absent]),
    )
    return ProvenClaim(claim=claim, digest=logprob_digest(right), seconds=seconds)


def _accuracy_claim(accuracy: Accuracy, digest: str, seconds: float) -> ProvenClaim:
    if not accuracy.compared:
        raise InconclusiveError("no token was compared with fp64; sample at least one token")
    ours, stock = accuracy.ours, accuracy.stock
    claim = Claim(
        name="error against untouched transformers in fp64 is at most twice stock's",
        status="pass" if accuracy.passed else "fail",
        compared=accuracy.compared,
        differing=accuracy.beyond,
        control="",
        detail=f"mean {ours.mean:.2e} (stock {stock.mean:.2e}), "
        f"largest {ours.largest:.2e} (stock {stock.largest:.2e}); "
        "'differing' counts tokens beyond twice stock's largest error",
    )
    return ProvenClaim(claim=claim, digest=digest, seconds=seconds)
