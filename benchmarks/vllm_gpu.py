"""vLLM beside the packed trainer on one GPU: bits, throughput, publication, optimiser steps.

    python benchmarks/vllm_gpu.py --out OUT --folder /tmp/models [--only smollm2] [--seconds 500]

One process per model and plan, all alive at once, so that rounds of one and the other alternate on
the same machine. Each starts vLLM with its own defaults (CUDA graphs, torch.compile, chunked
prefill, prefix caching), answers commands on stdin with one JSON line each, and prints what it
runs with. The parent gives commands until its time is used up, and writes results as it goes.

Models: ``smollm2`` (SmolLM2-135M-Instruct, real weights, from its GGUF) and ``qwen3`` (Qwen3-1.7B's
shape at full depth, seeded random weights whose next-token entropy is that of a real model).
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Any

from zeromismatch.trainer.engines.base import Policy

COMMANDS = ("bits", "scored", "speed", "profile", "publish", "train")
PROMPTS = (20, 1500)
NEW = 256
WHOLE = Policy(max_step_tokens=8192)


# -- the child: one model, one plan -------------------------------------------------------------


def make_qwen3(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
        max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            scale = 0.08 if "embed" in name else 0.02
            if tensor.dim() == 1:
                tensor.normal_(1.0, 0.1, generator=generator)
            else:
                tensor.normal_(0.0, scale, generator=generator)
    model.save_pretrained(folder)


def prepare(name: str, folder: Path, gguf: str | None) -> Path:
    target = folder / name
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    if name == "qwen3":
        make_qwen3(target)
    elif gguf is not None:
        from zeromismatch.model_recipes import smollm2

        smollm2.convert(Path(gguf), target, lambda *_: None)
    else:
        import shutil

        from zeromismatch.model_recipes import smollm2

        shutil.copytree(smollm2.fetch("smollm2-135m"), target, dirs_exist_ok=True)
    return target


class Child:
    def __init__(self, path: str, plan: str, device: str, cache: int, small: bool) -> None:
        from zeromismatch.model_recipes.models import load_model
        from zeromismatch.trainer.engines.build import make_engine

        self.began, self.small = time.perf_counter(), small
        dtype = "bfloat16" if device == "cuda" else "float32"
        self.model = load_model(path, dtype=dtype, device=device)
        self.plan = plan
        settings = {} if small else {"max_len": 2048, "max_rows": 8192, "cache_gib": cache}
        self.engine = make_engine("vllm", self.model, plan, **settings)
        self.trainer: Any = None
        self.sampled: Any = None

    def start(self) -> dict[str, Any]:
        described = self.engine.describe()
        return {"seconds": time.perf_counter() - self.began, "environment": described}

    def prompts(self, count: int, longest: int, new: int, seed: int) -> list[Any]:
        import random

        from zeromismatch.trainer.engines.base import Request, Sampling

        rng = random.Random(seed)
        top = int(self.model.config.vocab_size)
        shared = [rng.randrange(3, top) for _ in range(64)]
        requests = []
        for index in range(count):
            length = rng.randrange(PROMPTS[0], longest + 1)
            tokens = shared[: length // 2] if index % 4 == 0 else []
            tokens = tokens + [rng.randrange(3, top) for _ in range(length - len(tokens))]
            sampling = Sampling(temperature=1.0, seed=seed + index, max_new_tokens=new)
            requests.append(Request(id=f"r{index:03d}", tokens=tuple(tokens), sampling=sampling))
        return requests

    def packed(self) -> Any:
        from zeromismatch.trainer.engines.packed import PackedEngine

        if self.trainer is None:
            self.trainer = PackedEngine(self.model, self.engine.instrument.plan)
        return self.trainer

    def compare(self, run: Any) -> dict[str, Any]:
        """Every sampled token of a run against the packed forward."""
        import numpy as np
        import torch

        trainer = self.packed()
        with torch.no_grad():
            ours = [
                trainer.logprobs(group).cpu()
                for group in trainer.micro_batches(run.requests, max_rows=16384)
            ]
        ours = torch.cat(ours).numpy()
        order = {at: i for i, at in enumerate(trainer.scored(run.requests))}
        theirs = np.empty(len(order), np.int32)
        for sample in run.samples:
            if (sample.request, sample.position) in order:
                theirs[order[sample.request, sample.position]] = sample.logprob_bits
        wrong = ours.view(np.int32) != theirs
        values = theirs.view(np.float32)
        gap = np.abs(ours - values)
        return {
            "tokens": len(order), "differing": int(wrong.sum()), "max": float(gap.max()),
            "mean": float(gap.mean()), "mean_logprob": float(values.mean()),
        }  # fmt: skip

    def bits(self, _: str) -> dict[str, Any]:
        from zeromismatch.agent_tools.rollouts import batching_facts

        count, longest, new = (6, 60, 8) if self.small else (256, PROMPTS[1], NEW)
        requests = self.prompts(count, longest, new, 1)
        began = time.perf_counter()
        self.sampled = self.engine.generate(requests, WHOLE)
        rollout = time.perf_counter() - began
        compared = self.compare(self.sampled)
        facts = batching_facts(self.sampled.executed, self.sampled.requests).model_dump()
        entropy = -compared["mean_logprob"]
        return compared | {"rollout_seconds": rollout, "facts": facts, "entropy": entropy}

    def scored(self, _: str) -> dict[str, Any]:
        """The prompt logprobs of prompt and reply together: the same bits as when it was drawn."""
        from zeromismatch.agent_tools.rollouts import compare_tokens
        from zeromismatch.trainer.engines.base import Scenario

        requests = self.sampled.requests[:64]
        scenario = Scenario(
            model="", plan="", requests=requests, schedule=self.engine.schedule("batched", requests)
        )
        again = self.engine.run(scenario)
        names = {request.id for request in requests}
        kept = [sample for sample in self.sampled.samples if sample.request in names]
        from dataclasses import replace

        few = replace(self.sampled, requests=requests, samples=tuple(kept))
        count = compare_tokens(few, again)
        return {"tokens": count.compared, "differing": count.differing, "first": count.first}

    def speed(self, seed: str) -> dict[str, Any]:
        from vllm import SamplingParams

        count, length, new = (4, 30, 8) if self.small else (256, 512, NEW)
        requests = self.prompts(count, length, new, int(seed))
        given = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, logprobs=0)
        prompts = [{"prompt_token_ids": list(request.tokens)} for request in requests]
        llm = self.engine.live.llm
        llm.reset_prefix_cache()
        began = time.perf_counter()
        llm.generate(prompts, given, use_tqdm=False)
        seconds = time.perf_counter() - began
        self.engine.live.recorder.take()
        return {
            "tokens": count * new,
            "seconds": seconds,
            "tokens_per_second": count * new / seconds,
        }

    def profile(self, _: str) -> dict[str, Any]:
        """GPU kernel time: of decode steps (256 requests), and of prefill, from two profiles."""
        import torch
        from torch.profiler import ProfilerActivity, profile
        from vllm import SamplingParams

        llm = self.engine.live.llm
        found: dict[str, Any] = {}
        for name, length, new in (("prefill", 512, 1), ("decode", 32, 33)):
            requests = self.prompts(256 if not self.small else 4, length, new, 99)
            prompts = [{"prompt_token_ids": list(r.tokens[:length])} for r in requests]
            given = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, logprobs=0)
            llm.reset_prefix_cache()
            llm.generate(prompts, given, use_tqdm=False)
            llm.reset_prefix_cache()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                llm.generate(prompts, given, use_tqdm=False)
                torch.cuda.synchronize()
            totals: dict[str, float] = {}
            for event in profiler.key_averages():
                totals[event.key] = totals.get(event.key, 0.0) + event.self_device_time_total
            top = sorted(totals.items(), key=lambda entry: -entry[1])[:14]
            tokens = sum(len(p["prompt_token_ids"]) for p in prompts)
            found[name] = {
                "milliseconds": sum(totals.values()) / 1e3, "prompt_tokens": tokens, "new": new,
                "top": [(key[:70], round(value / 1e3, 2)) for key, value in top],
            }  # fmt: skip
        self.engine.live.recorder.take()
        return found

    def publish(self, _: str) -> dict[str, Any]:
        import torch

        from zeromismatch.model_recipes.state import named_state

        times, compared = [], []
        for _round in range(3):
            with torch.no_grad():
                for tensor in named_state(self.model.module).values():
                    tensor.mul_(1.0 + 2.0**-6)
            done = self.engine.publish(named_state(self.model.module), self.engine.version + 1)
            times.append({"seconds": done.seconds, "copy_seconds": done.copy_seconds})
            compared.append(self.compare(self.engine.generate(self.prompts(16, 200, 16, 7), WHOLE)))
        return {"times": times, "after": compared, "nbytes": done.nbytes}

    def train(self, steps: str) -> dict[str, Any]:
        import torch

        from zeromismatch.model_recipes.state import named_state

        trainer = self.packed()
        optimiser = torch.optim.AdamW(self.model.module.parameters(), lr=1e-4)
        tokens = differing = 0
        memory, roots, publishing = [], set(), []
        began = time.perf_counter()
        for step in range(int(steps)):
            run = self.engine.generate(self.prompts(16, 200, 16, 1000 + step), WHOLE)
            logprobs = trainer.logprobs(run.requests, max_rows=16384)
            compared = self.compare(run)
            tokens, differing = tokens + compared["tokens"], differing + compared["differing"]
            weights = torch.linspace(-1, 1, len(logprobs), device=logprobs.device)
            optimiser.zero_grad(set_to_none=True)
            (-(logprobs * weights).mean()).backward()
            optimiser.step()
            done = self.engine.publish(named_state(self.model.module), self.engine.version + 1)
            publishing.append(done.seconds)
            roots.add(self.engine.live.root)
            if torch.cuda.is_available():
                memory.append(torch.cuda.memory_allocated())
            if time.perf_counter() - began > 150:
                break
        return {
            "steps": len(publishing), "tokens": tokens, "differing": differing,
            "distinct_weights": len(roots), "publish_median_seconds": median(publishing),
            "memory_first": memory[:1], "memory_last": memory[-1:],
            "seconds": time.perf_counter() - began,
        }  # fmt: skip


def child(args: argparse.Namespace) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to stdout
    try:
        worker = Child(args.path, args.plan, args.device, args.cache, args.small)
        answers.write(json.dumps(worker.start(), default=str) + "\n")
    except Exception:  # noqa: BLE001  reported to the parent, which goes on with the others
        answers.write(json.dumps({"error": traceback.format_exc()[-3000:]}) + "\n")
        return
    for line in sys.stdin:
        name, _, argument = line.strip().partition(" ")
        try:
            answer = getattr(worker, name)(argument)
        except Exception:  # noqa: BLE001  as above
            answer = {"error": traceback.format_exc()[-3000:]}
        answers.write(json.dumps(answer, default=str) + "\n")


# -- the parent ---------------------------------------------------------------------------------


class Remote:
    def __init__(self, name: str, plan: str, path: Path, cache: int, args: Any) -> None:
        self.label = f"{name}-{plan}"
        log = (args.out / f"{self.label}.log").open("w")
        command = [sys.executable, __file__, "--child", "--path", str(path), "--plan", plan]
        command += ["--device", args.device, "--cache", str(cache)]
        command += ["--small"] if args.small else []
        environment = os.environ | {"VLLM_CACHE_ROOT": f"/tmp/vllm-cache-{self.label}"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=environment,
        )  # fmt: skip
        self.alive = True

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            self.alive = False
            return {"error": "the process ended; see its log"}
        return json.loads(line)

    def ask(self, command: str) -> dict[str, Any]:
        if not self.alive:
            return {"error": "not running"}
        self.process.stdin.write(command + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return self.answer()


def parent(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    models = args.only.split(",")
    results: dict[str, Any] = {"command": " ".join(sys.argv), "models": models}
    share = {"smollm2": 10, "qwen3": 30}
    remotes: dict[str, Remote] = {}
    for name in models:
        path = prepare(name, args.folder, args.gguf)
        for plan in ("aligned", "stock"):
            remotes[f"{name}-{plan}"] = Remote(name, plan, path, share.get(name, 8), args)
    print(f"{time.perf_counter() - began:6.1f} s  {len(remotes)} processes", flush=True)

    def keep(label: str, what: str, answer: dict[str, Any]) -> None:
        results.setdefault(label, {}).setdefault(what, []).append(answer)
        (args.out / "vllm_results.json").write_text(json.dumps(results, indent=1, default=str))
        short = {key: value for key, value in answer.items() if key not in ("environment", "top")}
        print(
            f"{time.perf_counter() - began:6.1f} s  {label} {what}: {str(short)[:900]}", flush=True
        )

    started: set[str] = set()
    plan: list[tuple[str, str]] = []
    for name in models:
        plan += [(f"{name}-aligned", "bits"), (f"{name}-aligned", "scored")]
        plan += [(f"{name}-aligned", "publish")]
        plan += [(f"{name}-stock", "bits"), (f"{name}-stock", "scored")]
    for name in models:
        plan += [(f"{name}-{p}", f"speed {r}") for r in range(3) for p in ("aligned", "stock")]
        plan += [(f"{name}-{p}", "profile") for p in ("aligned", "stock")]
    plan += [(f"{name}-aligned", f"train {args.steps}") for name in models]
    for label, command in plan:
        if time.perf_counter() - began > args.seconds:
            print("out of time", flush=True)
            break
        if label not in started:  # others go on starting meanwhile
            started.add(label)
            keep(label, "start", remotes[label].answer())
        if "error" not in results[label]["start"][0]:
            keep(label, command.partition(" ")[0], remotes[label].ask(command))
    for remote in remotes.values():
        remote.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--path", default="")
    parser.add_argument("--plan", default="aligned")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache", type=int, default=8, help="GiB of keys and values")
    parser.add_argument("--small", action="store_true", help="a trial on a CPU")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--only", default="smollm2,qwen3")
    parser.add_argument("--gguf")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=540)
    args = parser.parse_args()
    child(args) if args.child else parent(args)


if __name__ == "__main__":
    main()
