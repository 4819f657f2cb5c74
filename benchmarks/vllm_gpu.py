"""vLLM beside the packed trainer on one GPU: bits, throughput, publication, optimiser steps.

    python benchmarks/vllm_gpu.py --out OUT --folder /tmp/models --only qwen3 [--seconds 540]

One process per model and plan (``vllm_child.py``), all alive at once, so that rounds of one and the
other alternate on the same machine. Each starts vLLM with its own defaults (CUDA graphs,
torch.compile, chunked prefill, prefix caching) and answers one command at a time. This process
gives commands until its time is used up, and writes results as it goes.

Models: ``smollm2`` (SmolLM2-135M-Instruct, real weights, from its GGUF) and ``qwen3`` (Qwen3-1.7B's
shape at full depth, seeded random weights whose next-token entropy is that of a real model).
``--make-only`` writes them and ends.
"""

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("vllm_child.py")
COMMAND_SECONDS = 200


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


class Remote:
    """One child, asked one thing at a time; each answer within a time limit."""

    def __init__(self, name: str, plan: str, path: Path, cache: int, args: Any) -> None:
        self.label = f"{name}-{plan}"
        log = (args.out / f"{self.label}.log").open("w")
        command = [sys.executable, str(CHILD), "--path", str(path), "--plan", plan]
        command += ["--device", args.device, "--cache", str(cache)]
        command += ["--small"] if args.small else []
        environment = os.environ | {"VLLM_CACHE_ROOT": f"/tmp/vllm-cache-{self.label}"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=environment,
        )  # fmt: skip
        self.alive = True

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next line; an error once ``seconds`` have passed, after which nobody is asked."""
        pipe = self.process.stdout
        assert pipe is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            ready = selector.select(max(1.0, seconds))
        line = pipe.readline() if ready else ""
        if not line:
            self.alive = False
            self.process.kill()
            what = "the process ended" if ready else f"no answer in {seconds:.0f} s"
            return {"error": f"{what}; see its log"}
        return json.loads(line)

    def ask(self, command: str, seconds: float) -> dict[str, Any]:
        if not self.alive:
            return {"error": "not running"}
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer(seconds)


def commands_for(name: str, args: argparse.Namespace) -> list[tuple[str, str]]:
    """(process, command), in the order of their worth; the first speed rounds are warm-ups."""
    ours, stock = f"{name}-aligned", f"{name}-stock"
    both = (ours, stock)
    speed = [(label, f"speed {turn}") for turn in range(args.rounds + 1) for label in both]
    profile = [(label, "profile") for label in both]
    plan = [(ours, "bits"), (ours, "scored")]
    if name == "qwen3":
        plan += [*speed, *profile, (ours, "trainer_speed 5"), (ours, "publish"), (stock, "bits")]
        plan += [(stock, "scored"), (ours, f"train {args.steps}")]
    else:
        plan += [(ours, "publish"), (ours, f"train {args.steps}"), *speed, *profile]
        plan += [(ours, "trainer_speed 5"), (stock, "bits"), (stock, "scored")]
    asked = args.commands.split(",") if args.commands else []
    return [each for each in plan if not asked or each[1].partition(" ")[0] in asked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a trial on a CPU")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--only", default="smollm2,qwen3")
    parser.add_argument("--gguf")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=4, help="timed ones, after one to warm up")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--commands", help="only these, for example speed,profile")
    parser.add_argument("--make-only", action="store_true", help="write the models and end")
    args = parser.parse_args()
    began = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    models = args.only.split(",")
    paths = {name: prepare(name, args.folder, args.gguf) for name in models}
    if args.make_only:
        print(f"{time.perf_counter() - began:6.1f} s  {paths}", flush=True)
        return
    results: dict[str, Any] = {"command": " ".join(sys.argv), "models": models}
    file = args.out / f"vllm_{'_'.join(models)}.json"
    share = {"smollm2": 8, "qwen3": 24}
    remotes: dict[str, Remote] = {}
    for name, path in paths.items():
        for label in dict.fromkeys(label for label, _ in commands_for(name, args)):
            plan = label.rpartition("-")[2]
            remotes[label] = Remote(name, plan, path, share.get(name, 8), args)
    print(f"{time.perf_counter() - began:6.1f} s  {len(remotes)} processes", flush=True)

    def left() -> float:
        return args.seconds - (time.perf_counter() - began)

    def keep(label: str, what: str, answer: dict[str, Any]) -> None:
        results.setdefault(label, {}).setdefault(what, []).append(answer)
        file.write_text(json.dumps(results, indent=1, default=str))
        long = ("environment", "prefill_top", "decode_top")
        short = {key: value for key, value in answer.items() if key not in long}
        print(f"{time.perf_counter() - began:6.1f} s  {label} {what}: {str(short)[:900]}",
              flush=True)  # fmt: skip

    for name in models:
        for label, command in commands_for(name, args):
            if left() < 10:
                print("out of time", flush=True)
                break
            if label not in results:  # others go on starting meanwhile
                keep(label, "start", remotes[label].answer(left()))
            if "error" not in results[label]["start"][0]:
                if command.startswith("train "):
                    command += f" {max(5, int(min(150, left() - 20)))}"
                answer = remotes[label].ask(command, min(COMMAND_SECONDS, left()))
                keep(label, command.partition(" ")[0], answer)
    for remote in remotes.values():
        remote.process.kill()


if __name__ == "__main__":
    main()
