"""The gates with vLLM as the rollout engine: what C0 to C10 claim, on the batches that vLLM forms.

C1, C6 and C8 are about operators and the trainer and stay as they are. The others run vLLM (``zm
gate MODEL --rollout vllm``): policies in the place of schedules, because vLLM decides what shares
a step, and every precondition read from what it executed. Red controls are vLLM's own kernels
(another engine under the stock plan), or one bit of one row where steps are eager.

    run_gates(load_model("smollm2-135m"), "aligned", rollout="vllm", only=["C4"])
"""

import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from ...kernels.errors import ZeroMismatchError
from ...model_recipes.plan import Plan, stock_plan
from ...model_recipes.state import named_state, state_digest
from ...trainer.engines.base import Hit, Observer, Policy, Request, Run, Scenario
from ...trainer.engines.build import make_engine
from ...trainer.engines.vllm.engine import VllmEngine
from ...trainer.engines.vllm.recurrent_options import is_recurrent
from ..align import shorten
from ..rollouts import TokenCount, batching_facts, compare_tokens, steps_of
from . import cost, environment, inference, lifecycle, scale, training
from .base import Check, Findings, Gate
from .bench import Bench, compare_scored, first_red
from .gradient import loss_weights
from .learner import Learner
from .load import Load

CHUNKS = (7, 33)
FEW = 3
MAX_LEN, CACHE_GIB = 4096, 2
FORCED = ("decode", "mixed", "prefix-hit", "preempt")
"""Policies under which replies are forced, which the first model runner alone can do."""


@dataclass
class VllmBench(Bench):
    """A bench whose rollout is vLLM's; the other gates' comparisons then are about its tokens."""

    def vllm(self, plan: Plan | None = None, **settings: int | bool) -> VllmEngine:
        """vLLM under a plan; the trainer's plan comes off the model for the moment."""
        self.release()
        if self.model.device.type == "cuda":  # up to three engines live beside the trainer's models
            settings = {"max_len": MAX_LEN, "cache_gib": CACHE_GIB} | settings
        return cast(VllmEngine, make_engine("vllm", self.model, plan or self.plan, **settings))

    def score(
        self,
        policy: str,
        requests: Sequence[Request],
        plan: Plan | None = None,
        observer: Observer | None = None,
        **settings: int | bool,
    ) -> Run:
        """Known tokens under one of vLLM's policies."""
        plan = plan or self.plan
        if self.model.device.type == "cuda" and (
            plan.is_stock or policy.partition(":")[0] in FORCED
        ):  # the second model runner takes no logits processor
            settings = {"runner": 1} | settings
        engine = self.vllm(plan, **settings)
        scenario = Scenario(
            model=self.model.spec,
            plan=engine.instrument.plan.name,
            requests=tuple(requests),
            schedule=engine.schedule(policy, requests),
        )
        return engine.run(scenario, observer)

    @functools.cached_property
    def sampled(self) -> Run:
        """vLLM's rollout: continuous batching, chunked prefill, prefix cache."""
        return self.vllm().generate(self.prompts, self.policy())

    @functools.cached_property
    def alone(self) -> Run:
        """Every request whole, by itself, in vLLM."""
        return self.score("alone", self.requests)

    @functools.cached_property
    def stock(self) -> tuple[TokenCount, TokenCount]:
        """vLLM's own kernels on a few prompts: decode against whole, and against the trainer."""
        few = self.prompts[:FEW]
        whole, decoded = (self.score(name, few, stock_plan()) for name in ("alone", "decode"))
        trainer = self.on(stock_plan()).pack(few)
        return compare_scored(decoded, whole), compare_scored(whole, trainer)


def check_environment(bench: VllmBench, found: Findings) -> None:
    """C0: as for every engine, and the plug-in is alive in the engine that runs."""
    if not bench.plan.is_stock and not is_recurrent(bench.model):
        # First, since an engine under another plan ends this one.
        bench.progress("red control: vLLM's own kernels")
        found.notes.append(f"vLLM's own kernels: {bench.stock[1].differing} of "
                           f"{bench.stock[1].compared} tokens differ from the trainer")  # fmt: skip
    engine = bench.vllm()
    told = engine.describe()
    trainer = bench.on().packed.describe()
    odd = [name for name in environment.SAME if told[name] != trainer[name]]
    found.part("vLLM and the trainer describe one set-up", len(environment.SAME), len(odd),
               "fields", ", ".join(odd))  # fmt: skip
    layers = told["plugin"]
    found.require("the plug-in serves live layers", layers, bool(layers) or bench.plan.is_stock)
    found.require("attention backend", told["vllm_attention"],
                  bench.plan.is_stock or told["vllm_attention"] == ["AlignedImpl"])  # fmt: skip
    found.notes += [f"{name}: {told[name]}" for name in sorted(told) if name.startswith("vllm")]
    for part in environment.SHARED:
        part(bench, found)


def check_repeat(bench: VllmBench, found: Findings) -> None:
    """C2: one policy and one sampled rollout, again, idle and under load."""
    requests = bench.requests
    first = bench.score("mixed", requests)
    found.tokens("mixed, again", compare_scored(bench.score("mixed", requests), first))
    again = bench.vllm().generate(bench.prompts, bench.policy())
    found.tokens("sampled again", inference.same_rollout(again, bench.sampled))
    with Load() as load:
        bench.progress("C2: under load")
        found.tokens("mixed, under load", compare_scored(bench.score("mixed", requests), first))
    found.require("the load really ran (rounds)", load.rounds)
    _bit_control(bench, found, "mixed", first)


def _bit_control(bench: VllmBench, found: Findings, policy: str, plain: Run) -> None:
    """One bit of one row where steps are eager; elsewhere vLLM's own kernels."""
    if not bench.vllm().settings.eager:
        _stock_control(bench, found)
        return
    request = bench.requests[0]
    flip = inference.planted_bit(bench.on(), request)
    moved = compare_scored(bench.score(policy, bench.requests, observer=flip), plain)
    found.require("the control's bit was flipped", flip.flips)
    rows = sum(len(r.tokens) for r in bench.requests)
    found.control("one bit of one row", f"1 of {rows} rows", moved.compared, moved.differing)


def _stock_control(bench: VllmBench, found: Findings) -> None:
    if is_recurrent(bench.model):  # vLLM's own class may not take these sizes
        bench.progress("red control: transformers' own kernels in the trainer")
        few = bench.prompts[:FEW]
        red = compare_scored(bench.score("alone", few), bench.on(stock_plan()).pack(few))
        found.control("transformers' own kernels in the trainer, rollout = trainer",
                      "stock operators", red.compared, red.differing)  # fmt: skip
        return
    bench.progress("red control: vLLM's own kernels")
    name, count = first_red([
        ("vLLM's own kernels, decode = whole", lambda: bench.stock[0]),
        ("vLLM's own kernels, rollout = trainer", lambda: bench.stock[1]),
    ])  # fmt: skip
    found.control(name, "stock operators", count.compared, count.differing)


def check_batch(bench: VllmBench, found: Findings) -> None:
    """C3: alone, and in groups of every size, as prompts and in decode."""
    requests, alone = bench.requests, bench.alone
    sizes = sorted({size for size in (2, 3, 5, 8) if size <= len(requests)} | {len(requests)})
    for size in sizes:
        few = requests[:size]
        names = {request.id for request in few}
        expected = replace(alone, samples=tuple(s for s in alone.samples if s.request in names))
        for policy in ("batched", "mixed"):
            bench.progress(f"C3: {policy}, {size} requests")
            run = bench.score(policy, few)
            found.tokens(f"{policy}, {size} requests", compare_scored(run, expected))
            steps = steps_of(run.executed)
            found.require(f"{policy}: steps of {size} requests",
                          sum(len(step.slices) == size for step in steps))  # fmt: skip
    _bit_control(bench, found, "mixed", bench.score("mixed", requests))


def check_phase(bench: VllmBench, found: Findings) -> None:
    """C4: decode, chunks, prefix hits, and the tokens as they were sampled."""
    requests, alone, sampled = bench.requests, bench.alone, bench.sampled
    facts = batching_facts(sampled.executed, sampled.requests)
    found.require("steps that mix prompt and decode rows", facts.mixed_steps)
    found.require("prompts in chunks", facts.chunked_prompts)
    found.tokens("sampled = scored", compare_tokens(sampled, alone))
    hits = facts.hits
    for policy in ("decode", *(f"chunk:{size}" for size in CHUNKS), "prefix-hit"):
        bench.progress(f"C4: {policy}")
        run = bench.score(policy, requests)
        here = sum(isinstance(event, Hit) for event in run.executed.events)
        hits += here
        found.tokens(f"{policy} = whole", compare_scored(run, alone, part=policy == "prefix-hit"))
    found.require("prefix hits", hits)
    shortest = min(len(request.tokens) for request in requests)
    found.require(f"the shortest request crosses {inference.TILES} KV tiles", f"{shortest} tokens",
                  shortest > (inference.TILES - 1) * inference.PAGE)  # fmt: skip
    found.not_applicable.append("fuzzed schedules: vLLM forms its own; `paged` is fuzzed")
    _stock_control(bench, found)


def check_trainer(bench: VllmBench, found: Findings) -> None:
    """C5: as ever on vLLM's tokens, and vLLM itself site by site where steps can be traced."""
    if bench.vllm().settings.eager:
        few = shorten(bench.requests, 2)
        verdict, heat = bench.culprits_and_heat("vllm:mixed", "packed:packed", few)
        coverage = verdict.coverage
        if coverage is not None:
            detail = f"{coverage.shared} sites, coverage {coverage.share:.0%}"
            found.part("vLLM = packed, site by site", coverage.rows, coverage.differing_rows,
                       "site rows", detail)  # fmt: skip
        found.require("vLLM and the trainer may be compared",
                      f"{verdict.status}: {verdict.reason}",
                      verdict.status in ("EQUAL", "DIVERGENT"))  # fmt: skip
        if verdict.status != "EQUAL":
            found.divergence, found.heat = verdict, heat
            found.culprits += inference.culprit_lines(found)
    else:
        found.not_applicable.append("vLLM site by site: captured graphs call no hook")
    training.check(bench, found)
    _stock_control(bench, found)


def check_update(bench: VllmBench, found: Findings) -> None:
    """C7: a trainer's step, published into the running engine; refusals leave it as it was."""
    engine, trainer = bench.vllm(), bench.fresh()
    learner = Learner(trainer, bench.plan, lifecycle.RATES[bench.model.dtype])
    requests = bench.requests[: bench.size.gradient_requests]
    before = engine.live.root
    learner.step(requests, loss_weights(requests, bench.seed))
    wanted = named_state(trainer.module)
    version = engine.version + 1
    accepted = [
        name
        for name, weights in {
            "one tensor missing": dict(list(wanted.items())[1:]),
            "a foreign tensor": wanted | {"nobody": torch.zeros(1)},
        }.items()
        if _published(engine, weights, version)
    ]
    done = engine.publish(wanted, version)
    accepted += ["the same version again"] if _published(engine, wanted, version) else []
    found.part("unfit publications are refused", 3, len(accepted), "publications",
               ", ".join(accepted))  # fmt: skip
    digests, live = state_digest(trainer.module), engine.live.digests()
    odd = [name for name, digest in digests.items() if live.get(name) != digest]
    found.part("every tensor as published", len(digests), len(odd), "tensors", ", ".join(odd[:3]))
    found.require("the step moved the weights", before != engine.live.root)
    rollout = engine.generate(bench.prompts, bench.policy())
    found.tokens("first rollout after it = trainer",
                 compare_tokens(rollout, learner.engines.pack(rollout.requests)))  # fmt: skip
    found.notes.append(f"published {done.nbytes} bytes in {done.seconds:.3f} s")
    name = cost.one_tensor_ahead(learner)
    red = compare_tokens(rollout, learner.engines.pack(rollout.requests))
    found.control("one tensor ahead", f"1 tensor, {name}", red.compared, red.differing)
    learner.close()
    engine.publish(named_state(bench.model.module), version + 1)  # as the other gates expect it


def _published(engine: VllmEngine, weights: dict[str, torch.Tensor], version: int) -> bool:
    try:
        engine.publish(weights, version)
    except ZeroMismatchError:
        return False
    return True


def check_scale(bench: VllmBench, found: Findings) -> None:
    """C9: graphs and compilation where there are any; a long context; unclaimed settings."""
    engine = bench.vllm()
    told = engine.describe()
    long = scale.long_request(bench.requests, min(bench.size.long, 1024))
    for policy in ("chunk:97", "decode"):
        run = bench.score(policy, [long])
        packed = bench.on().pack([long])
        found.tokens(f"{len(long.tokens)} tokens, {policy} = packed", compare_scored(run, packed))
    if engine.settings.eager:
        found.not_applicable += ["graphs = eager = compiled: this engine runs eagerly"]
    else:
        found.require("CUDA graphs and compilation on", f"{told['vllm_graphs']}, "
                      f"{told['vllm_compilation']}", "NONE" not in told["vllm_graphs"])  # fmt: skip
        eager = bench.score("batched", bench.requests[:FEW], eager=True)
        names = {request.id for request in bench.requests[:FEW]}
        expected = replace(
            bench.alone, samples=tuple(s for s in bench.alone.samples if s.request in names)
        )
        found.tokens("graphs = eager", compare_scored(eager, expected))
    _stock_control(bench, found)


def check_cost(bench: VllmBench, found: Findings) -> None:
    """C10: training steps, each published, all at diff 0. Speed: ``benchmarks/vllm_gpu.py``."""
    engine = bench.vllm()
    learner = Learner(bench.fresh(), bench.plan, cost.RATE)
    prompts = bench.prompts[: bench.size.gradient_requests]
    compared = differing = 0
    roots, seconds = {engine.live.root}, []
    for step in range(1, bench.size.training_steps + 1):
        bench.progress(f"C10: training step {step}")
        began = time.perf_counter()
        sampled = engine.generate(prompts, Policy(max_step_tokens=512))
        count = compare_tokens(sampled, learner.engines.pack(sampled.requests))
        compared, differing = compared + count.compared, differing + count.differing
        learner.step(sampled.requests, loss_weights(sampled.requests, step))
        engine.publish(named_state(learner.model.module), engine.version + 1)
        roots.add(engine.live.root)
        seconds.append(time.perf_counter() - began)
    found.part("training steps at diff 0", compared, differing)
    found.require("every step changed the weights", len(roots), len(roots) == len(seconds) + 1)
    found.notes.append(f"{len(seconds)} steps, median {statistics.median(seconds):.2f} s")
    name = cost.one_tensor_ahead(learner)
    final = engine.generate(prompts, Policy(max_step_tokens=512))
    red = compare_tokens(final, learner.engines.pack(final.requests))
    found.control("one tensor one update ahead", f"1 tensor, {name}", red.compared,
                  red.differing)  # fmt: skip
    learner.close()


_CHECKS = {
    "C0": check_environment,
    "C2": check_repeat,
    "C3": check_batch,
    "C4": check_phase,
    "C5": check_trainer,
    "C7": check_update,
    "C9": check_scale,
    "C10": check_cost,
}


def gates_for_vllm(gates: Sequence[Gate]) -> tuple[Gate, ...]:
    """The same claims, checked on vLLM where they are about a rollout."""
    return tuple(
        replace(gate, check=cast(Check, _CHECKS.get(gate.id, gate.check))) for gate in gates
    )
