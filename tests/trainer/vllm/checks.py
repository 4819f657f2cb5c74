"""What the tests ask of a real vLLM, in a process of its own: ``checks.py NAME ARGUMENTS``.

Prints one JSON document as its last line. Run by vLLM's Python (see ``conftest.py``).
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from zeromismatch.agent_tools.localize import localize
from zeromismatch.agent_tools.rollouts import batching_facts, compare_tokens
from zeromismatch.agent_tools.scenarios import default_requests
from zeromismatch.agent_tools.sides import Side
from zeromismatch.kernels.errors import ZeroMismatchError
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.state import named_state
from zeromismatch.trainer.engines.base import Policy, Request, Run, Scenario
from zeromismatch.trainer.engines.build import make_engine

POLICIES = ("alone", "batched", "chunk:7", "decode", "mixed", "prefix-hit")


def score(engine: Any, name: str, requests: tuple[Request, ...]) -> Run:
    scenario = Scenario(
        model="", plan="", requests=requests, schedule=engine.schedule(name, requests)
    )
    return engine.run(scenario)


def bits_of(run: Run) -> dict[tuple[str, int], int]:
    return {(s.request, s.position): s.logprob_bits for s in run.samples}


def only_prompts(requests: tuple[Request, ...]) -> list[Request]:
    return [
        replace(r, tokens=r.tokens[: r.sampled_mask.index(True)], sampled_mask=(), turns=())
        for r in requests
    ]


def aligned(path: str) -> dict[str, Any]:
    """One engine under a plan: bits by policy, sampling, localizing, publication, refusals."""
    model = load_model(path)
    requests = default_requests(model, count=4, max_reply=12)
    engine = make_engine("vllm", model, "aligned")
    answer: dict[str, Any] = {"described": engine.describe(), "policies": {}}
    trainer = make_engine("packed", model, "aligned")
    expected = bits_of(score(trainer, "packed", requests))
    for name in POLICIES:
        run = score(engine, name, requests)
        found = bits_of(run)
        facts = batching_facts(run.executed, requests)
        answer["policies"][name] = {
            "tokens": len(found),
            "differing": sum(expected[at] != value for at, value in found.items()),
            "hits": facts.hits,
            "steps": facts.steps,
            "chunked": facts.chunked_prompts,
        }
    rollout = engine.generate(only_prompts(requests), Policy(max_step_tokens=48))
    count = compare_tokens(rollout, score(trainer, "packed", rollout.requests))
    facts = batching_facts(rollout.executed, rollout.requests)
    answer["sampled"] = count.model_dump() | {"facts": facts.model_dump()}
    answer["publication"] = published(engine, trainer, model, requests)
    trainer.close()
    return answer


def recurrent(path: str) -> dict[str, Any]:
    """A model with recurrent layers, too few blocks for all its requests at once; and misfits."""
    model = load_model(path)
    requests = default_requests(model, count=4, max_reply=40)
    prompts = sum(-(-len(request.tokens) // 32) for request in only_prompts(requests))
    engine = make_engine("vllm", model, "aligned", blocks=prompts + 2, max_len=192)
    trainer = make_engine("packed", model, "aligned")
    expected = bits_of(score(trainer, "packed", requests))
    answer: dict[str, Any] = {"described": engine.describe(), "policies": {}}
    answer["states"] = [[spec.kind, spec.granule] for spec in engine.state_specs()]
    for name in ("alone", "chunk:7", "decode", "prefix-hit", "preempt"):
        run = score(engine, name, requests)
        found = bits_of(run)
        facts = batching_facts(run.executed, requests)
        differing = sum(expected[at] != value for at, value in found.items())
        answer["policies"][name] = facts.model_dump() | {
            "tokens": len(found), "differing": differing
        }  # fmt: skip
    answer["publication"] = published(engine, trainer, model, requests)
    trainer.close()
    return answer | {"misfits": misfits(engine, path)}


def misfits(engine: Any, path: str) -> list[str]:
    """What our architecture refuses: no plan, other blocks than chunks, no recurrent layer."""
    import tempfile

    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    from zeromismatch.trainer.engines.vllm.adoption import adoption
    from zeromismatch.trainer.engines.vllm.recurrent_model import AlignedModule
    from zeromismatch.trainer.engines.vllm.recurrent_options import FORMAT

    found = []
    plan = adoption(engine.instrument.plan)
    for spec, block, told in ((path, 32, {}), (path, 16, plan), ("tiny:llama", 16, plan)):
        with tempfile.TemporaryDirectory() as folder:
            load_model(spec).module.save_pretrained(folder)
            arguments = EngineArgs(
                folder, dtype="float32", config_format=FORMAT, block_size=block,
                skip_tokenizer_init=True, max_model_len=128, additional_config=told,
            )  # fmt: skip
            config = arguments.create_engine_config()
            try:
                with set_current_vllm_config(config):
                    AlignedModule(vllm_config=config)
            except ZeroMismatchError as error:
                found.append(str(error))
    return found


def published(engine: Any, trainer: Any, model: Any, requests: Any) -> dict[str, Any]:
    """Refusals leave the old version; a whole one serves at once, and an old one never again."""
    before = engine.live.root
    weights = {name: t * (1.0 + 2.0**-6) for name, t in named_state(model.module).items()}
    refused = []
    for name, wrong in (
        ("partial", dict(list(weights.items())[1:])),
        ("foreign", weights | {"nobody": torch.ones(1)}),
        ("late", weights),
    ):
        try:
            offer = engine.stage(wrong, 1)
            engine.live.install(offer, seconds=0.0 if name == "late" else 60.0)
        except ZeroMismatchError as error:
            refused.append(f"{name}: {type(error).__name__}")
    kept = engine.live.root == before and engine.live.digests() == model.state_digest
    places = {n: t.data_ptr() for n, t in engine.live.llm.apply_model(tensors)[0].items()}
    engine.publish(weights, 1)
    trainer.publish(weights, 1)
    moved = {n: t.data_ptr() for n, t in engine.live.llm.apply_model(tensors)[0].items()}
    rollout = engine.generate(only_prompts(requests))
    count = compare_tokens(rollout, score(trainer, "packed", rollout.requests))
    versions = sorted({sample.version for sample in rollout.samples})
    return {
        "refused": refused, "kept": kept, "addresses": places == moved, "versions": versions,
        "after": count.model_dump(), "root": engine.live.root == trainer.weights.root,
    }  # fmt: skip


def continued(path: str) -> dict[str, Any]:
    """New weights between two steps of running requests: every token has its version's bits."""
    model = load_model(path)
    prompts = only_prompts(default_requests(model, count=4, max_reply=12))
    engine = make_engine("vllm", model, "aligned")
    trainer = make_engine("packed", model, "aligned")
    offers = {
        at: {name: t * (1.0 + at * 2.0**-6) for name, t in named_state(model.module).items()}
        for at in (1, 2)
    }
    steps = 0

    def between() -> Any:
        nonlocal steps
        steps += 1
        return engine.stage(offers[steps // 4], steps // 4) if steps in (4, 8) else None

    rollout = engine.generate(prompts, between=between)
    answer: dict[str, Any] = {"versions": {}, "replies": [len(r.tokens) for r in rollout.requests]}
    for version in (0, 1, 2):
        if version:
            trainer.publish(offers[version], version)
        expected = bits_of(score(trainer, "packed", rollout.requests))
        drawn = [s for s in rollout.samples if s.version == version]
        differing = sum(expected[s.request, s.position] != s.logprob_bits for s in drawn)
        answer["versions"][str(version)] = {"tokens": len(drawn), "differing": differing}
    trainer.close()
    return answer


def tensors(model: Any) -> Any:
    from zeromismatch.trainer.engines.vllm.models import hf_tensors

    return hf_tensors(model)


def located(path: str, plan: str) -> dict[str, Any]:
    """``zm localize`` between vLLM and the trainer, of two requests that begin alike."""
    model = load_model(path)
    requests = default_requests(model, count=4, max_reply=8)[1::2]
    sides = (Side.parse("vllm:mixed"), Side.parse("packed"))
    found = localize(*sides, model, requests, plan=plan)
    return json.loads(found.model_dump_json())


def gated(path: str) -> dict[str, Any]:
    """``zm gate``: phases agree with each other, rollout and trainer with each other."""
    from zeromismatch.agent_tools.gates import run_gates

    report = run_gates(load_model(path), "aligned", rollout="vllm", only=["C4", "C5"], quick=True)
    return {
        "exit_code": report.exit_code,
        "gates": [
            {"id": gate.id, "verdict": gate.result, "reason": gate.reason,
             "compared": gate.compared, "differing": gate.differing,
             "red_controls": len(gate.controls)}
            for gate in report.gates
        ],
    }  # fmt: skip


def tapped(path: str) -> dict[str, Any]:
    """What operators' own taps say, as inside graphs: all equal, then with an operator replaced.

    A gated product that is rounded once: in bf16, stock's has the contract's bits.
    """
    from zeromismatch.trainer.engines.vllm import operators
    from zeromismatch.trainer.engines.vllm.live import forget_engines

    model = load_model(path)
    requests = default_requests(model, count=3, max_reply=5)
    sides = (Side.parse("vllm+graphs:mixed"), Side.parse("packed"))
    plain = localize(*sides, model, requests, plan="aligned")
    forget_engines()
    own = operators.silu_mul
    operators.silu_mul = lambda gate, up: (
        torch.nn.functional.silu(gate.double()) * up.double()
    ).to(gate.dtype)
    planted = localize(*sides, model, requests, plan="aligned")
    operators.silu_mul = own
    return {name: json.loads(found.model_dump_json())
            for name, found in (("plain", plain), ("planted", planted))}  # fmt: skip


def live_class(model: Any) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def trained(path: str, folder: str) -> dict[str, Any]:
    """A recipe proven for vLLM, its claims repeated, and short runs whose rollouts are vLLM's."""
    from pathlib import Path

    from zeromismatch.agent_tools.align import Options, align
    from zeromismatch.agent_tools.commands.measure import requests_for
    from zeromismatch.agent_tools.recipe_verify import verify_recipe

    model = load_model(path)
    requests = requests_for(model, prompts=None, seed=0, quick=True)
    command = f"zm align {path} --rollout vllm --quick"
    options = Options(out=Path(folder) / "align", command=command, rollout="vllm")
    made = align(model, requests, options)
    recipe = Path(folder) / "align" / "recipe"
    verified = verify_recipe(recipe)
    runs = {
        "deterministic": short_run(folder, "deterministic", lag=1, share_weights=True),
        "recorded": short_run(
            folder, "recorded", lag=2, mode="free", partial="recorded", max_new_tokens=12
        ),
    }
    return {
        "align": made.status, "reason": made.reason,
        "claims": [claim.model_dump() for claim in made.claims],
        "verified": verified.status, "why": verified.reason, "runs": runs,
    }  # fmt: skip


def short_run(folder: str, name: str, **more: Any) -> dict[str, Any]:
    """Four updates under the recipe of :func:`trained`."""
    from pathlib import Path

    from zeromismatch.agent_tools.training import settings, start

    given = {
        "task": "even", "updates": 4, "groups": 2, "group_size": 2, "max_new_tokens": 4,
        "rollout": "vllm", "learning_rate": 1e-3, "audit": 4,
    }  # fmt: skip
    config = settings(Path(folder) / "align" / "recipe", given | more, file=None, resume=None)
    return json.loads(start(config, Path(folder) / name).model_dump_json())


def over_ray(folder: str) -> dict[str, Any]:
    """vLLM in a Ray actor, the learner sharded over two FSDP2 ranks, the first of them here; then
    the same in a process that has a process group already."""
    import os

    from torch import distributed

    for name, value in (
        ("raylet_start_wait_time_s", "300"), ("agent_register_timeout_ms", "300000")
    ):  # fmt: skip
        os.environ[f"RAY_{name}"] = value  # a busy machine
    found = short_run(folder, "over_ray", lag=1, placement="ray", ranks=2)
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        short_run(folder, "twice", lag=1, placement="ray", ranks=2)
    except ZeroMismatchError as error:
        found["refused"] = str(error)
    distributed.destroy_process_group()
    return found


def inert(path: str) -> dict[str, Any]:
    """Without a recipe: vLLM's own classes and functions, bit for bit what they were."""
    model = load_model(path)
    engine = make_engine("vllm", model, "stock")
    from zeromismatch.trainer.engines.vllm import logprobs, plugin
    from zeromismatch.trainer.engines.vllm.models import evidence

    llm = engine.live.llm
    return {
        "loaded": plugin.loaded(),
        "class": llm.apply_model(live_class)[0],
        "evidence": llm.apply_model(evidence)[0],
        "replaced": logprobs.replaced(),
    }


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    from adoption_checks import adopted, refused, told, unloaded

    offered = (aligned, continued, trained, located, gated, tapped, inert, recurrent)
    offered += (adopted, told, refused, unloaded, over_ray)
    checks = {f.__name__: f for f in offered}
    print(json.dumps(checks[name](*rest), default=str))
