"""What a publication takes where learner and vLLM share a GPU, part by part, in two processes.

    python benchmarks/vllm_publication.py --model /tmp/models/smollm2 --out OUT/smollm2.json

The learner's process holds the model; vLLM lives in another one, as in ``zm train``. Each round the
weights change, are put on the shelf (:mod:`zeromismatch.trainer.publication.shelf`) and installed
over vLLM's; a few rounds go through a file instead, the way for readers elsewhere. At the end vLLM
samples and the packed trainer scores its tokens: none may differ. Times are medians in
milliseconds, the first round of each kind left out; nothing else runs on the GPU.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zeromismatch.kernels.errors import ZeroMismatchError
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import aligned_plan
from zeromismatch.model_recipes.state import Digests, named_state
from zeromismatch.trainer.engines.base import Policy, Request, Sampling
from zeromismatch.trainer.loop.versions import Versions
from zeromismatch.trainer.publication.flat import copy_all
from zeromismatch.trainer.publication.in_place import wait_for
from zeromismatch.trainer.publication.shelf import Shelf

SECONDS = 240.0
Times = dict[str, float]


def load(asked: argparse.Namespace) -> LoadedModel:
    dtype = "bfloat16" if asked.device == "cuda" else "float32"
    return load_model(asked.model, dtype=dtype, device=asked.device)


def clock(times: Times, name: str, work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = work()
    times[name] = (time.perf_counter() - began) * 1e3
    return result


def drained(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- vLLM's process --------------------------------------------------------------------------------


class Reader:
    """Answers (command, argument) with something that pickles."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        from zeromismatch.trainer.engines.build import make_engine

        self.model = load(asked)
        settings = {"max_len": 512, "cache_gib": 2} if asked.device == "cuda" else {}
        self.engine: Any = make_engine("vllm", self.model, "aligned", eager=True, **settings)
        self.versions = Versions(folder)

    def memory(self, version: int) -> Times:
        """From the shelf."""
        times: Times = {}
        there = clock(times, "find", lambda: self.versions.shelved(version, self.model.device))
        if there is None:
            raise RuntimeError(f"version {version} is not on the shelf for this process")
        clock(times, "install", lambda: self.engine.install(there.offer()))
        return times

    def file(self, version: int) -> Times:
        """From the version's file."""
        times: Times = {}
        weights = clock(times, "read", lambda: self.versions.read(version, self.model.device))
        clock(times, "install", lambda: self.engine.publish(weights, version))
        return times

    def parts(self, _: int) -> Times:
        """What an installation is made of, each alone."""
        live, times = self.engine.live, Times()
        tensors = clock(times, "walk the modules", lambda: live._apply("hf_tensors"))
        spare = live.weights.empty_copy()
        device = self.model.device
        clock(times, "copy, enqueued", lambda: copy_all(spare, tensors))
        clock(times, "copy, done", lambda: drained(device))
        taken = clock(times, "digests, enqueued", lambda: Digests(tensors))
        clock(times, "digests, done", lambda: wait_for(taken, time.perf_counter() + SECONDS))
        clock(times, "digests, folded", taken.read)
        clock(times, "clear caches", live._clear)
        return times

    def root(self, _: int) -> str:
        return self.engine.live.root

    def sample(self, count: int) -> Any:
        draw = random.Random(3)
        top = int(self.model.config.vocab_size)
        prompts = [
            Request(id=f"r{i}", tokens=tuple(draw.randrange(3, top) for _ in range(20 + 9 * i)),
                    sampling=Sampling(seed=i, max_new_tokens=24))
            for i in range(count)
        ]  # fmt: skip
        run = self.engine.generate(prompts, Policy(max_step_tokens=512))
        return run.requests, {(s.request, s.position): s.logprob_bits for s in run.samples}


def serve(connection: Any, asked: argparse.Namespace, folder: Path) -> None:
    reader = Reader(asked, folder)
    connection.send("ready")
    while (told := connection.recv()) is not None:
        name, argument = told
        try:
            connection.send(getattr(reader, name)(argument))
        except (ZeroMismatchError, RuntimeError) as error:
            connection.send(f"{type(error).__name__}: {error}")


# -- the learner's process ------------------------------------------------------------------------


class Remote:
    """The reader, asked one thing at a time."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, asked, folder), daemon=True)
        self.process.start()
        theirs.close()
        self.answer()

    def ask(self, name: str, argument: int = 0) -> Any:
        self.connection.send((name, argument))
        return self.answer()

    def answer(self) -> Any:
        if not self.connection.poll(SECONDS):
            raise SystemExit("vLLM's process gave no answer in time")
        return self.connection.recv()


def changed(weights: dict[str, torch.Tensor], turn: int) -> None:
    """Something like an optimiser's step."""
    for tensor in weights.values():
        tensor.mul_(1.0 + (1 if turn % 2 else -1) * 2.0**-7)
    drained(next(iter(weights.values())).device)


def through_memory(shelf: Shelf, weights: Any, version: int, remote: Remote) -> Times:
    times: Times = {}
    placed = clock(times, "learner: copy, enqueued", lambda: shelf.begin(weights, version))
    clock(times, "learner: digests, card", lambda: shelf.announce(placed))
    theirs = remote.ask("memory", version)
    if isinstance(theirs, str):
        raise SystemExit(theirs)
    times |= {f"vLLM: {name}": value for name, value in theirs.items()}
    return times | {"all": sum(times.values())}


def through_file(versions: Versions, weights: Any, version: int, remote: Remote) -> Times:
    times: Times = {}
    clock(times, "learner: copy, digest, file", lambda: versions.publish(
        {name: tensor.clone() for name, tensor in weights.items()}, version))  # fmt: skip
    theirs = remote.ask("file", version)
    if isinstance(theirs, str):
        raise SystemExit(theirs)
    times |= {f"vLLM: {name}": value for name, value in theirs.items()}
    return times | {"all": sum(times.values())}


def medians(rounds: list[Times]) -> dict[str, list[float]]:
    """Median, least and most of each part, without the first round."""
    later = rounds[1:] or rounds
    columns = {name: [each[name] for each in later] for name in later[0]}
    return {
        name: [round(statistics.median(c), 2), round(min(c), 2), round(max(c), 2)]
        for name, c in columns.items()
    }


def compared(model: LoadedModel, remote: Remote) -> dict[str, int]:
    """vLLM's sampled tokens against the packed trainer with the weights that were published."""
    from zeromismatch.trainer.engines.packed import PackedEngine

    requests, theirs = remote.ask("sample", 16)
    engine = PackedEngine(model, aligned_plan(model.dtype, model.device))
    with torch.no_grad():
        ours = engine.logprobs(requests).cpu().view(torch.int32).tolist()
    scored = dict(zip(engine.scored(requests), ours, strict=True))
    wrong = sum(scored[at] != value for at, value in theirs.items())
    return {"tokens": len(theirs), "differing": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--files", type=int, default=3, help="rounds through a file")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zm-publication-") as name:
        folder = Path(name)
        began = time.perf_counter()
        remote = Remote(asked, folder)
        found: dict[str, Any] = {"model": asked.model, "start_seconds": time.perf_counter() - began}
        model = load(asked)
        weights, shelf, versions = named_state(model.module), Shelf(folder), Versions(folder)
        found["bytes"] = sum(tensor.nbytes for tensor in weights.values())
        found["tensors"] = len(weights)
        rounds: dict[str, list[Times]] = {"memory": [], "file": []}
        with torch.no_grad():
            shared = asked.rounds + 1 if asked.device == "cuda" else 0  # a trial on a CPU: files
            for turn in range(1, shared + asked.files + 2):
                changed(weights, turn)
                if turn <= shared:
                    rounds["memory"].append(through_memory(shelf, weights, turn, remote))
                else:
                    rounds["file"].append(through_file(versions, weights, turn, remote))
                    versions.keep_from(turn)
        found |= {kind: medians(times) for kind, times in rounds.items() if times}
        found["first"] = {kind: times[0] for kind, times in rounds.items() if times}
        found["parts"] = medians([remote.ask("parts") for _ in range(4)])
        found |= compared(model, remote)
        shelf.close()
        remote.connection.send(None)
        remote.process.join(30)
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
