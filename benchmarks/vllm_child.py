"""What ``vllm_gpu.py`` starts for a model and a plan: vLLM and the trainer's model in a process.

It reads one command a line on stdin and answers each with one JSON line; vLLM's own prints go to
stderr. Lengths of prompts are the same in every round of a command and only their tokens change, so
that no round meets shapes that an earlier one has not met.
"""

import argparse
import gc
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from zeromismatch.trainer.engines.base import Policy

PROMPTS = (20, 1500)
NEW = 256
PROFILED = 33
"""New tokens of the profiled decode: 32 steps beyond the first."""
TRAINED = (8, 1024)
"""Sequences and tokens of each, of the timed forward and backward."""
WHOLE = Policy(max_step_tokens=8192)


class Child:
    """One model under one plan: vLLM, and the trainer's packed engine when it is asked for."""

    def __init__(self, path: str, plan: str, device: str, cache: int, small: bool) -> None:
        from zeromismatch.model_recipes.models import load_model
        from zeromismatch.trainer.engines.build import make_engine

        self.began, self.small, self.path = time.perf_counter(), small, path
        self.dtype = "bfloat16" if device == "cuda" else "float32"
        self.model = load_model(path, dtype=self.dtype, device=device)
        self.plan = plan
        settings = {} if small else {"max_len": 2048, "max_rows": 8192, "cache_gib": cache}
        self.engine = make_engine("vllm", self.model, plan, **settings)
        self.trainer: Any = None
        self.sampled: Any = None

    def start(self) -> dict[str, Any]:
        described = self.engine.describe()
        return {"seconds": time.perf_counter() - self.began, "environment": described}

    def prompts(self, count: int, longest: int, new: int, seed: int) -> list[Any]:
        """Lengths from 20 to ``longest``, always the same; tokens by ``seed``."""
        from zeromismatch.trainer.engines.base import Request, Sampling

        lengths, tokens_of = random.Random(0), random.Random(seed)
        top = int(self.model.config.vocab_size)
        shared = [tokens_of.randrange(3, top) for _ in range(64)]
        requests = []
        for index in range(count):
            length = lengths.randrange(PROMPTS[0], longest + 1)
            tokens = shared[: length // 2] if index % 4 == 0 else []
            tokens = tokens + [tokens_of.randrange(3, top) for _ in range(length - len(tokens))]
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
        found = 0
        for sample in run.samples:
            if (sample.request, sample.position) in order:
                theirs[order[sample.request, sample.position]] = sample.logprob_bits
                found += 1
        if found != len(order):
            raise RuntimeError(f"{found} of {len(order)} tokens were scored by the rollout")
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
        from dataclasses import replace

        from zeromismatch.agent_tools.rollouts import compare_tokens
        from zeromismatch.trainer.engines.base import Scenario

        requests = self.sampled.requests[:64]
        scenario = Scenario(
            model="", plan="", requests=requests, schedule=self.engine.schedule("batched", requests)
        )
        again = self.engine.run(scenario)
        names = {request.id for request in requests}
        kept = [sample for sample in self.sampled.samples if sample.request in names]
        few = replace(self.sampled, requests=requests, samples=tuple(kept))
        count = compare_tokens(few, again)
        return {"tokens": count.compared, "differing": count.differing, "first": count.first}

    # -- speed -----------------------------------------------------------------------------------

    def _rollout(self, prompts: Sequence[Any], new: int) -> float:
        """Seconds for sampling ``new`` tokens of each, from an empty prefix cache."""
        from vllm import SamplingParams

        given = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, logprobs=0)
        llm = self.engine.live.llm
        llm.reset_prefix_cache()
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": list(each)} for each in prompts], given, use_tqdm=False)
        seconds = time.perf_counter() - began
        self.engine.live.recorder.take()
        return seconds

    def speed(self, seed: str) -> dict[str, Any]:
        count, length, new = (4, 30, 8) if self.small else (256, 512, NEW)
        requests = self.prompts(count, length, new, int(seed))
        seconds = self._rollout([request.tokens for request in requests], new)
        rate = count * new / seconds
        return {"tokens": count * new, "seconds": seconds, "tokens_per_second": rate}

    def profile(self, _: str) -> dict[str, Any]:
        """GPU kernel time of a prompt token and of a decode step, at 256 requests of 512 tokens.

        A run with one new token is all prefill; one with more differs by its decode steps.
        """
        import torch
        from torch.profiler import ProfilerActivity, profile

        count, length = (4, 30) if self.small else (256, 512)
        draw = random.Random(5)
        top = int(self.model.config.vocab_size)
        prompts = [[draw.randrange(3, top) for _ in range(length)] for _ in range(count)]
        spent, wall, tops = {}, {}, {}
        for new in (1, PROFILED):
            self._rollout(prompts, new)
            wall[new] = self._rollout(prompts, new)
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                self._rollout(prompts, new)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            totals: dict[str, float] = {}
            for event in profiler.key_averages():
                totals[event.key] = totals.get(event.key, 0.0) + event.self_device_time_total / 1e3
            spent[new], tops[new] = sum(totals.values()), totals
        steps = PROFILED - 1
        decode = {k: (v - tops[1].get(k, 0.0)) / steps for k, v in tops[PROFILED].items()}
        return {
            "prefill_microseconds_per_token": spent[1] * 1e3 / (count * length),
            "decode_milliseconds_per_step": (spent[PROFILED] - spent[1]) / steps,
            "prefill_wall_seconds": wall[1],
            "decode_wall_milliseconds_per_step": (wall[PROFILED] - wall[1]) * 1e3 / steps,
            "prefill_top": _largest(tops[1]), "decode_top": _largest(decode),
        }  # fmt: skip

    def trainer_speed(self, rounds: str) -> dict[str, Any]:
        """Forward and backward on equal tokens: packed under the plan, and untouched transformers.

        Stock runs a batch of equal lengths without padding or mask, through torch's SDPA with each
        of its backends, and the logprob of every token from fp32 logits, as a trainer needs it.
        """
        import torch

        from zeromismatch.model_recipes.models import load_model
        from zeromismatch.trainer.engines.base import Request

        count, length = (2, 40) if self.small else TRAINED
        device = self.model.device
        draw = torch.Generator().manual_seed(3)
        top = int(self.model.config.vocab_size)
        ids = torch.randint(3, top, (count, length), generator=draw)
        requests = [Request(id=f"t{i}", tokens=tuple(row.tolist())) for i, row in enumerate(ids)]
        packed = self.packed()
        stock = load_model(self.path, dtype=self.dtype, device=str(device)).module
        stock.set_attn_implementation("sdpa")
        ids = ids.to(device)

        def ours() -> Any:
            return packed.logprobs(requests)

        def theirs() -> Any:
            logits = stock(input_ids=ids, use_cache=False).logits[:, :-1].float()
            return -torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
            )

        works = {"ours": (ours, self.model.module, None)}
        gpu = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
        for name in gpu if device.type == "cuda" else ("MATH",):
            works[f"stock {name.lower()}"] = (theirs, stock, name)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
        failed: dict[str, str] = {}
        for turn in range(int(rounds) + 1):
            for name, work in works.items():
                if name in failed:
                    continue
                try:
                    pair = _forward_backward(*work, device)
                except RuntimeError as error:  # a backend that does not take this shape
                    failed[name] = str(error)[:300]
                    continue
                times[name] += [pair] if turn else []
        found = {
            name: {
                "forward_ms": median(f for f, _ in pairs), "both_ms": median(b for _, b in pairs),
                "rounds_ms": [round(b, 2) for _, b in pairs],
            }
            for name, pairs in times.items() if pairs
        }  # fmt: skip
        best = min((v["both_ms"] for k, v in found.items() if k != "ours"), default=0.0)
        works.clear()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        ratio = found["ours"]["both_ms"] / best if best else 0.0
        return {"tokens": count * length, "sequences": count, "ours / best stock": ratio,
                "failed": failed} | found  # fmt: skip

    # -- weights ---------------------------------------------------------------------------------

    def publish(self, _: str) -> dict[str, Any]:
        import torch

        from zeromismatch.model_recipes.state import named_state, state_digest

        live = self.engine.live
        places = self._places()
        times, compared, digests = [], [], []
        for _round in range(3):
            with torch.no_grad():
                for tensor in named_state(self.model.module).values():
                    tensor.mul_(1.0 + 2.0**-6)
            began = time.perf_counter()
            done = self.engine.publish(named_state(self.model.module), self.engine.version + 1)
            times.append({
                "seconds": time.perf_counter() - began, "install_seconds": done.seconds,
                "copy_seconds": done.copy_seconds,
            })  # fmt: skip
            digests.append(live.digests() == state_digest(self.model.module))
            compared.append(self.compare(self.engine.generate(self.prompts(16, 200, 16, 7), WHOLE)))
        return {
            "times": times, "after": compared, "nbytes": done.nbytes, "digests_equal": digests,
            "addresses_unchanged": places == self._places(),
        }  # fmt: skip

    def _places(self) -> dict[str, int]:
        tensors = self.engine.live.llm.apply_model(_tensors)[0]
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}

    def train(self, asked: str) -> dict[str, Any]:
        """Optimiser steps (``STEPS SECONDS``): sample, compare every token, learn, publish."""
        import torch

        from zeromismatch.model_recipes.state import named_state

        steps, most = (int(word) for word in asked.split())
        trainer = self.packed()
        optimiser = torch.optim.AdamW(self.model.module.parameters(), lr=1e-4)
        tokens = differing = 0
        memory, roots, publishing = [], set(), []
        began = time.perf_counter()
        for step in range(steps):
            run = self.engine.generate(self.prompts(16, 200, 16, 1000 + step), WHOLE)
            logprobs = trainer.logprobs(run.requests, max_rows=16384)
            compared = self.compare(run)
            tokens, differing = tokens + compared["tokens"], differing + compared["differing"]
            weights = torch.linspace(-1, 1, len(logprobs), device=logprobs.device)
            optimiser.zero_grad(set_to_none=True)
            (-(logprobs * weights).mean()).backward()
            optimiser.step()
            started = time.perf_counter()
            self.engine.publish(named_state(self.model.module), self.engine.version + 1)
            publishing.append(time.perf_counter() - started)
            roots.add(self.engine.live.root)
            if torch.cuda.is_available():
                memory.append(torch.cuda.memory_allocated())
            if time.perf_counter() - began > most:
                break
        return {
            "steps": len(publishing), "tokens": tokens, "differing": differing,
            "distinct_weights": len(roots), "publish_median_seconds": median(publishing),
            "memory_after_step": {str(n + 1): memory[n] for n in range(0, len(memory), 10)},
            "memory_last": memory[-1:], "seconds": time.perf_counter() - began,
        }  # fmt: skip


def _tensors(model: Any) -> Any:
    from zeromismatch.trainer.engines.vllm.models import hf_tensors

    return hf_tensors(model)


def _largest(totals: dict[str, float]) -> list[tuple[str, float]]:
    ordered = sorted(totals.items(), key=lambda entry: -entry[1])[:24]
    return [(key[:70], round(value, 3)) for key, value in ordered]


def _forward_backward(
    forward: Callable[[], Any], module: Any, backend: str | None, device: Any
) -> tuple[float, float]:
    """Milliseconds of the forward, and of forward and backward."""
    import contextlib

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3

    module.zero_grad(set_to_none=True)
    chosen = (
        contextlib.nullcontext() if backend is None else sdpa_kernel(getattr(SDPBackend, backend))
    )
    with chosen:
        began = now()
        logprobs = forward()
        middle = now()
        logprobs.mean().backward()
        end = now()
    module.zero_grad(set_to_none=True)
    return middle - began, end - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", required=True)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--cache", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
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


if __name__ == "__main__":
    main()
