"""Two processes on two GPUs: FSDP2 has the bits of one rank, publication over NCCL is at diff 0.

    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --model /tmp/models/smollm2 --out OUT
    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --model tiny:qwen3 --device cpu --out OUT

1. A bf16 model with fp32 masters and gradient checkpointing, sharded over both: the packed
   forward's logprobs against one rank's, before and after each optimiser step.
2. Rank 0 trains, rank 1 reads: whole, partial, old and broken-off publications, each followed by
   what rank 1 computes, compared with rank 0's own forward. With ``--vllm`` rank 1 is a vLLM engine
   that samples.
"""

import argparse
import json
import os
import random
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

if os.environ.get("LOCAL_RANK") and os.environ.get("CUDA_VISIBLE_DEVICES", "0,1") != "":
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = shown[int(os.environ.pop("LOCAL_RANK")) % len(shown)]

import torch
import torch.distributed as dist

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import ZeroMismatchError
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import aligned_plan
from zeromismatch.model_recipes.state import named_state, weights_root
from zeromismatch.trainer.engines.base import Policy, Request, Sampling
from zeromismatch.trainer.engines.packed import PackedEngine
from zeromismatch.trainer.publication.across import Channel, Receiver, Sender
from zeromismatch.trainer.publication.in_place import LiveWeights

RANK = int(os.environ.get("RANK", "0"))


def requests_for(model: LoadedModel, count: int, longest: int, new: int = 0) -> list[Request]:
    draw = random.Random(11)
    top = int(model.config.vocab_size)
    return [
        Request(
            id=f"r{index}",
            tokens=tuple(draw.randrange(3, top) for _ in range(draw.randrange(20, longest))),
            sampling=Sampling(temperature=1.0, seed=index, max_new_tokens=new),
        )
        for index in range(count)
    ]


def differing(left: torch.Tensor, right: torch.Tensor) -> int:
    return int((bits.int_view(left.cpu()) != bits.int_view(right.cpu())).sum())


class Trial:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.on_gpu = args, args.device == "cuda"
        self.device = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(0)  # the only one that this process sees
        self.found: dict[str, Any] = {"world": 2, "model": args.model, "device": args.device}
        self.longest = 60 if args.small else 400

    def load(self) -> LoadedModel:
        return load_model(self.args.model, dtype="bfloat16", device=str(self.device))

    def note(self, name: str, value: Any) -> None:
        if RANK == 0:
            self.found[name] = value
            print(f"{name}: {json.dumps(value, default=str)[:600]}", flush=True)
            file = self.args.out / "two_gpus.json"
            file.write_text(json.dumps(self.found, indent=1, default=str))

    def expected(self, weights: dict[str, torch.Tensor] | None, requests: list[Request]) -> Any:
        """One rank's logprobs, with its own or with given weights."""
        model = self.load()
        if weights is not None:
            with torch.no_grad():
                for name, tensor in named_state(model.module).items():
                    tensor.copy_(weights[name])
        engine = PackedEngine(model, aligned_plan(model.dtype, model.device))
        with torch.no_grad():
            return engine.logprobs(requests).cpu()

    def sharded(self) -> None:
        from zeromismatch.trainer.fsdp.shard import Shard
        from zeromismatch.trainer.loop.config import TrainConfig

        dist.init_process_group(
            "nccl" if self.on_gpu else "gloo", init_method=f"file://{self.args.meet}-fsdp",
            rank=RANK, world_size=2, timeout=timedelta(seconds=120),
        )  # fmt: skip
        model = self.load()
        requests = requests_for(model, 12, self.longest)
        plan = aligned_plan(model.dtype, model.device)
        config = TrainConfig(recipe="-", task="-", learning_rate=1e-3, ranks=2)
        shard = Shard(model, plan, config, None)  # type: ignore[arg-type]
        module: Any = model.module
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        module.train()
        first, last = shard.own(len(requests))
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        watched = next(m for m in module.modules() if isinstance(m, torch.nn.Linear))
        watched.register_forward_hook(count)
        weights = None
        steps = []
        for step in range(3):
            wanted = self.expected(weights, requests)
            began = time.perf_counter()
            logp = shard.forward(requests[first:last])
            before = forwards
            parts: list[Any] = [None, None]
            dist.all_gather_object(parts, logp.detach().cpu())
            wrong = differing(torch.cat(parts), wanted)
            (logp * torch.linspace(-1, 1, len(logp), device=logp.device)).mean().backward()
            shard.optimiser.step()
            shard.optimiser.zero_grad(set_to_none=True)
            weights = shard.weights()
            root = weights_root({n: bits.digest_tensor(t) for n, t in weights.items()})
            dist.all_gather_object(parts, root)
            steps.append({
                "step": step, "tokens": len(wanted), "differing": wrong,
                "recomputed_forwards": forwards - before, "same_weights": parts[0] == parts[1],
                "root": root, "seconds": time.perf_counter() - began,
            })  # fmt: skip
        master = next(iter(shard.parameters.values()))
        self.note("fsdp", {
            "steps": steps, "master_dtype": str(master.dtype), "compute_dtype": str(shard.dtype),
            "backend": dist.get_backend(), "changed": len({s["root"] for s in steps}),
        })  # fmt: skip
        dist.destroy_process_group()

    # -- publication -----------------------------------------------------------------------------

    def published(self) -> None:
        """Rank 1 computes the packed forward with what arrived; rank 0 does with what it sent."""
        model = self.load()
        requests = requests_for(model, 8, self.longest)
        engine = PackedEngine(model, aligned_plan(model.dtype, model.device))

        def computed() -> torch.Tensor:
            with torch.no_grad():
                return engine.logprobs(requests).cpu()

        live = LiveWeights(named_state(model.module), cleared=lambda: True)
        self._rounds("packed", model, live, live.install, computed, computed)

    def vllm(self) -> None:
        """Rank 1 samples with vLLM; rank 0 scores what it sampled."""
        from zeromismatch.trainer.engines.build import make_engine

        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        model = self.load()
        plan = aligned_plan(model.dtype, model.device)
        prompts = requests_for(model, 16, self.longest, 16)
        told = Path(f"{self.args.meet}-samples")
        if RANK == 0:
            trainer = PackedEngine(model, plan)

            def scored() -> Any:
                run = torch.load(told, weights_only=False)
                with torch.no_grad():
                    ours = trainer.logprobs(run["requests"]).cpu()
                return dict(zip(trainer.scored(run["requests"]), ours, strict=True))

            self._rounds("vllm", model, None, None, None, scored)
            return
        eager = {"eager": True} if self.args.eager else {}
        engine: Any = make_engine("vllm", model, plan, max_len=2048, cache_gib=8, **eager)

        def sampled() -> Any:
            run = engine.generate(prompts, Policy(max_step_tokens=512))
            torch.save({"requests": run.requests}, told)
            values = [s.logprob_bits for s in run.samples]
            numbers = torch.tensor(values, dtype=torch.int32).view(torch.float32)
            return {(s.request, s.position): v for s, v in zip(run.samples, numbers, strict=True)}

        self._rounds("vllm", model, engine.live.weights, engine.live.install, sampled, None)

    def _rounds(
        self, name: str, model: LoadedModel, live: Any, install: Any, reads: Any, scores: Any
    ) -> None:
        """Whole, partial, old, broken off, whole again; after each, both sides compute."""
        answers = []
        channel = Channel(f"{self.args.meet}-{name}-0", RANK, device=self.device)
        state = named_state(model.module)
        old = {n: t.clone() for n, t in state.items()}
        for index, kind in enumerate(("whole", "partial", "old", "broken", "whole"), 1):
            outcome: Any
            began = time.perf_counter()
            limit = 8.0 if kind == "broken" else 300.0 if index == 1 else 30.0
            try:
                if RANK == 0:
                    new = {n: t * (1.0 + index * 2.0**-6) for n, t in old.items()}
                    sent = dict(list(new.items())[1:]) if kind == "partial" else new
                    outcome = _send(channel, kind, sent, 0 if kind == "old" else index, limit)
                    with torch.no_grad():
                        for tensor, value in zip(state.values(), new.values(), strict=True):
                            tensor.copy_(value)
                else:
                    done = Receiver(channel, live, install).receive(seconds=limit)
                    outcome = {"installed": done.publish.version, "install_seconds": done.seconds,
                               "tensors": done.tensors, "nbytes": done.nbytes}  # fmt: skip
            except ZeroMismatchError as error:
                outcome = {"refused": f"{type(error).__name__}: {error}"[:200]}
            if kind == "broken":
                channel = Channel(f"{self.args.meet}-{name}-{index}", RANK, device=self.device)
            seconds = time.perf_counter() - began
            answers.append(self._compared(name, index, kind, outcome, seconds, live, reads, scores))
        self.note(f"publication to {name}", answers)

    def _compared(
        self, name: str, index: int, kind: str, outcome: Any, seconds: float, live: Any,
        reads: Any, scores: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Rank 1 leaves its numbers in a file; rank 0 compares them with its own."""
        file = Path(f"{self.args.meet}-{name}-values-{index}")
        if RANK == 1:
            values = reads()
            whole = {"values": values, "outcome": outcome, "version": live.version,
                     "root": live.root, "seconds": seconds}  # fmt: skip
            torch.save(whole, file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)
            return whole
        deadline = time.monotonic() + 120
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        told = torch.load(file, weights_only=False)
        values, ours = told.pop("values"), scores()
        if isinstance(values, dict):
            values = torch.stack([values[at] for at in ours])
            ours = torch.stack(list(ours.values()))
        return {"kind": kind, "trainer": outcome, "trainer_seconds": seconds, "reader": told,
                "tokens": len(ours), "differing": differing(values, ours)}  # fmt: skip


def _send(channel: Channel, kind: str, new: Any, version: int, limit: float) -> dict[str, Any]:
    if kind == "broken":
        half = len(new) // 2
        own = channel.broadcast
        channel.broadcast = lambda tensors, deadline: own(tensors[:half], deadline)  # type: ignore[method-assign]
    sent = Sender(channel).publish(new, version, seconds=limit)
    return {"sent": sent.version, "root": sent.root, "seconds": sent.seconds, "nbytes": sent.nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny:qwen3")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--meet", required=True, help="a fresh file name that both can open")
    parser.add_argument("--only", default="sharded,published")
    parser.add_argument("--eager", action="store_true", help="vLLM without graphs: starts sooner")
    parser.add_argument("--small", action="store_true", help="a trial on a CPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    trial = Trial(args)
    for part in args.only.split(","):
        began = time.perf_counter()
        try:
            getattr(trial, part)()
        except Exception:  # noqa: BLE001  the other parts go on
            trial.note(f"{part} failed", traceback.format_exc()[-2500:])
            print(f"rank {RANK}: {traceback.format_exc()[-2500:]}", flush=True)
        trial.note(f"{part} seconds", round(time.perf_counter() - began, 1))


if __name__ == "__main__":
    main()
