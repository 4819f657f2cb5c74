"""Asynchronous training of SmolLM2-135M, measured: vLLM and learner on one GPU, or one GPU each.

    python benchmarks/training_gpu.py --model FOLDER --out DIR --seconds 200
    python benchmarks/training_gpu.py --model FOLDER --out DIR --seconds 200      # goes on
    python benchmarks/training_gpu.py --model FOLDER --out DIR --apart            # two GPUs, NCCL

Task: reasoning-gym's `chain_sum`, two numbers of one or two digits (``--digits``), after four
solved sums, a line each: the model answers with the rest of the line. The run is deterministic, so
each stretch continues the same one without changing a bit. After a stretch the
rollout is timed alone (same worker, newest version, nothing else on the GPU), then the learner's
step alone on responses of the run. ``--plan stock`` is the twin on stock kernels, which does not
stop at a kernel term that is not 0. What the interpreter did in one more rollout and one more step,
each alone, lies in ``*.profile.txt``, what an update took in ``metrics.jsonl``, all else in
``facts.json`` of DIR.
"""

import argparse
import cProfile
import json
import os
import pstats
import random
import statistics
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch

from zeromismatch.agent_tools.training import rise
from zeromismatch.kernels.files import replace_whole
from zeromismatch.model_recipes.apply import find_sites
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import plan_from, stock_plan
from zeromismatch.trainer.diagnostics.journal import Journal, read_journal
from zeromismatch.trainer.loop import hosts
from zeromismatch.trainer.loop.config import TrainConfig
from zeromismatch.trainer.loop.crossing import Crossing
from zeromismatch.trainer.loop.evaluation import HELD_OUT, Evaluation, read_evaluations
from zeromismatch.trainer.loop.journal import Journal as Arrived
from zeromismatch.trainer.loop.learner import Learner
from zeromismatch.trainer.loop.records import Prompt, Trajectory, UpdateFacts
from zeromismatch.trainer.loop.run import Setup, train
from zeromismatch.trainer.loop.versions import Versions
from zeromismatch.trainer.loop.worker import Generated, RolloutWorker
from zeromismatch.trainer.losses.catalogue import loss_named
from zeromismatch.trainer.tasks.gym import GymQuestions, gym_questions

SOLVED = "2 + 5 = 7\n19 - 3 = 16\n4 - 8 = -4\n36 + 6 = 42\n"
OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1}
ALONE = 6
HELD_OUT_SEED = 10**6
ALONE_FROM, PROFILED = HELD_OUT // 2, HELD_OUT // 4
"""Groups that no run reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """A task: one more sum after solved ones. questions: the dataset; a line's end stops."""

    tokenizer: Any
    questions: GymQuestions
    name: str = "gym/chain_sum"

    def prompt(self, index: int, rng: random.Random) -> Prompt:
        """The solved sums, then the dataset's next."""
        asked = self.questions.ask(index, rng)
        line = asked.text.rpartition(": ")[2]
        end = self.tokenizer.encode("\n", add_special_tokens=False)
        return Prompt(
            tokens=tuple(self.tokenizer.encode(SOLVED + line, add_special_tokens=False)),
            data=asked.data,
            stop_ids=(int(end[0]), int(self.tokenizer.eos_token_id)),
        )

    def score(self, trajectory: Trajectory) -> float:
        """The dataset's own score of the line."""
        text = self.tokenizer.decode(list(trajectory.responses[-1]), skip_special_tokens=True)
        return self.questions.grade(text.strip(), trajectory.prompt.data)


class Watched(RolloutWorker):
    """A worker that tells its process, and for groups from PROFILED on what Python does."""

    def __init__(self, spec: Any) -> None:
        evaluates = spec.config.rollout == "paged" and spec.config.evaluate_every is not None
        name = "evaluator" if evaluates else "worker"
        (spec.versions.parent / f"{name}.pid").write_text(str(os.getpid()))
        super().__init__(spec)

    def generate(self, groups: Sequence[int], version: int) -> Generated:
        """As usual; no run asks for those groups."""
        if not PROFILED <= groups[0] < ALONE_FROM:
            return super().generate(groups, version)
        with profiled(self.spec.versions.parent / "rollout.profile.txt"):
            return super().generate(groups, version)


class Kept(hosts.ProcessHost):
    """A rollout worker that outlives the run, to be timed alone after it."""

    worker = Watched
    made: ClassVar["list[Kept]"] = []

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        Kept.made.append(self)

    def close(self) -> None:
        """Not yet."""


def main() -> None:
    """One stretch, the parts alone, and the facts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200.0, help="of training in this stretch")
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--lag", type=int, default=8)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new", type=int, default=6, help="tokens of a response at most")
    parser.add_argument("--digits", type=int, default=2, help="of a number at most")
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--plan", choices=("aligned", "stock"), default="aligned")
    parser.add_argument("--loss", default="reinforce_zero", help="or a recipe to compare with")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling")
    parser.add_argument("--rows", type=int, default=16384, help="of a micro-batch at most")
    parser.add_argument("--cache", type=int, default=1, help="GiB of vLLM's cache")
    parser.add_argument("--room", type=float, help="GiB of the GPU that this process may take")
    parser.add_argument("--room-from", type=int, help="update from which on it has too little")
    parser.add_argument("--wait", type=float, default=240.0, help="seconds, at most, for a worker")
    parser.add_argument("--only", action="store_true", help="train, and time nothing alone")
    parser.add_argument("--rollout", choices=("vllm", "paged"), default="vllm")
    parser.add_argument("--files", action="store_true", help="publish through files alone")
    parser.add_argument("--apart", action="store_true", help="the rollout on a GPU of its own")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the learner")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--checkpoint", type=int, default=100_000, help="updates between two")
    parser.add_argument("--evaluate", type=int, default=50)
    parser.add_argument("--problems", type=int, default=64)
    asked = parser.parse_args()
    model = load_model(asked.model, dtype=asked.dtype, device=asked.device)
    setup = setup_of(asked, model)
    if asked.room is not None:
        limit(asked.room * 2**30)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "learner.pid").write_text(str(os.getpid()))
    hosts.HOSTS["processes"] = Kept
    try:
        measured(asked, setup, model)
    finally:
        for host in Kept.made:
            hosts.ProcessHost.close(host)
    print(json.dumps(json.loads((asked.out / "facts.json").read_text()), indent=1))


def measured(asked: argparse.Namespace, setup: Setup, model: LoadedModel) -> None:
    """The stretch, then its parts alone."""
    began = time.perf_counter()
    found = stretch(setup, asked.out, model, room_from=asked.room_from)
    found["seconds"] = time.perf_counter() - began
    keep(asked.out, found)
    alone = (("rollout_alone", rollout_alone), ("learner_alone", learner_alone))
    for name, part in () if asked.only else alone:
        with Crossing() as crossing:  # the run itself is what counts
            keep(asked.out, {name: part(setup, asked.out)})
        if crossing.error is not None:
            keep(asked.out, {name: f"{type(crossing.error).__name__}: {crossing.error}"})


def setup_of(asked: argparse.Namespace, model: LoadedModel) -> Setup:
    """The whole run, of which this is a stretch."""
    tasks = [
        Sums(
            tokenizer=model.tokenizer,
            questions=gym_questions(
                "chain_sum", seed=seed, options=OPTIONS | {"max_digits": asked.digits}
            ),
        )
        for seed in (asked.seed, HELD_OUT_SEED)
    ]
    sites = find_sites(model.module)
    plan = (
        stock_plan()
        if asked.plan == "stock"
        else plan_from("aligned", sites, model.dtype, model.device, model.identity)
    )
    config = TrainConfig(
        loss=asked.loss, seed=asked.seed, cache_gib=asked.cache, max_rows=asked.rows,
        recipe="-", task="gym/chain_sum", updates=asked.updates, lag=asked.lag,
        groups=asked.groups, group_size=asked.group_size, max_new_tokens=asked.new,
        learning_rate=asked.rate, warmup=10, max_gradient_norm=None,
        audit=max(2, -(-asked.groups * asked.group_size // 16)),
        require_zero=asked.plan == "aligned", rollout=asked.rollout, placement="processes",
        checkpoint_every=asked.checkpoint, stop_after=asked.seconds, wait_seconds=asked.wait,
        evaluate_every=asked.evaluate or None, share_weights=False if asked.files else None,
        evaluate_problems=asked.problems, evaluate_samples=4, apart=asked.apart, ranks=asked.ranks,
    )  # fmt: skip
    return Setup(
        model=asked.model, plan=plan, task=tasks[0], config=config, dtype=asked.dtype,
        device=asked.device, held_out=tasks[1],
    )  # fmt: skip


def stretch(
    setup: Setup, folder: Path, model: LoadedModel, *, room_from: int | None
) -> dict[str, Any]:
    """Train, and what the records of the whole run so far say."""
    evaluated: list[tuple[float, float]] = []
    ends: list[float] = []
    memory: list[int] = []
    own: list[int] = []
    with Journal(folder, tensorboard=False) as journal:

        def sink(facts: UpdateFacts) -> None:
            record = journal.write(facts)
            ends.append(time.perf_counter())
            memory.append(in_use())
            own.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
            if record.version % 10 == 0:
                print(f"{record.version} reward {record.reward:.3f} unequal "
                      f"{record.kernel.unequal}/{record.kernel.compared} lag {record.lag_median:g} "
                      f"d3 {record.d3:.2e} train {record.train_seconds:.2f} wait "
                      f"{record.wait_seconds:.2f} rollout {record.rollout_seconds:.2f} sync "
                      f"{record.sync_seconds:.2f}", file=sys.stderr, flush=True)  # fmt: skip
            if record.version == room_from:
                room = too_little()
                (folder / "room.txt").write_text(f"{room / 2**30:.3f}")

        def told(found: Evaluation) -> None:
            now = time.perf_counter()
            evaluated.append((now - found.seconds, now))

        outcome = train(setup, folder, resume=(folder / "config.json").exists(), sink=sink,
                        evaluated=told, model=model)  # fmt: skip
    records = read_journal(folder)
    early = setup.config.lag + 5  # updates of a stretch before its pace is steady
    late = records[early:] or records
    here = records[len(records) - len(ends) :][early:]  # as `steps`: of this stretch alone
    steady = here or late
    steps = [b - a for a, b in pairwise(ends)][early:] or [0.0]
    beside = [b - a for a, b in list(pairwise(ends))[early:]
              if any(first <= a and b <= last for first, last in evaluated)]  # fmt: skip
    first, last, error = rise([record.reward for record in records])
    tenth = max(1, len(memory) // 10)
    full = memory[early:] or memory  # every slot of the shelf is there
    return {
        "plan": setup.plan.name, "settings": setup.config.model_dump(), "torch": torch.__version__,
        "updates": outcome.version, "resumed_at": outcome.resumed_at,
        "compared": sum(record.kernel.compared for record in records),
        "unequal": sum(record.kernel.unequal for record in records),
        "kernel_largest": max(record.kernel.largest for record in records),
        "tokens": sum(record.tokens for record in records),
        "lag_median": statistics.median(record.lag_median for record in late),
        "lag_least": min(min(record.lag_histogram) for record in late),
        "reward": [first, last, error],
        "d3_peak": max(record.d3 for record in records),
        "step_ms": statistics.median(steps) * 1e3,
        "publication_share": share(here, "sync", steps),
        "install_share": share(here, "install", steps),
        "idle_share": share(here, "wait", steps),
        **{
            f"{name}_ms": 1e3 * statistics.median(getattr(e, f"{name}_seconds") for e in steady)
            for name in ("train", "wait", "sync", "rollout", "install", "audit", "blocked")
        },
        "memory_mib": [statistics.median(full[:tenth]) / 2**20,
                       statistics.median(full[-tenth:]) / 2**20],
        "learner_mib": [statistics.median((own[early:] or own)[:tenth]) / 2**20,
                        statistics.median(own[-tenth:]) / 2**20],
        "steps_beside_an_evaluation": len(beside),
        "step_ms_beside_an_evaluation": statistics.median(beside) * 1e3 if beside else None,
        "sent_ms": [each * 1e3 for host in Kept.made for each in host.sent_seconds()],
        "evaluations": [
            [each.version, each.pass_at_1, each.mean_at_k, each.standard_error, each.reward]
            for each in read_evaluations(folder)
        ],
    }  # fmt: skip


def share(records: list[Any], part: str, steps: list[float]) -> float | None:
    """Of the time of all steps, how much a part of them took; None before there are any.

    steps: from one of the records' ends to the next.
    """
    spent = [getattr(record, f"{part}_seconds") for record in records[1:]]
    return sum(spent) / sum(steps) if any(steps) else None


def rollout_alone(setup: Setup, folder: Path) -> float:
    """Median milliseconds of an update's rollout, nothing else at work."""
    host = next(each for each in Kept.made if each.spec.config.rollout == setup.config.rollout
                and each.spec.config.group_size == setup.config.group_size)  # fmt: skip
    version = Versions(folder / "versions").newest()
    groups = setup.config.groups
    times: list[float] = []
    for turn in range(ALONE + 1):
        first = ALONE_FROM + turn * groups
        began = time.perf_counter()
        host.generate(range(first, first + groups), version, 240)
        times.append((time.perf_counter() - began) * 1e3)
    host.generate(range(PROFILED, PROFILED + groups), version, 240)
    return statistics.median(times[1:])


def learner_alone(setup: Setup, folder: Path) -> float:
    """Median milliseconds of the learner's step on responses of the run."""
    held = Arrived(folder / "arrived.jsonl").held()
    numbers = sorted(held)[-setup.config.groups :]
    batch = [each for number in numbers for each in held[number].trajectories]
    model = load_model(setup.model, dtype=setup.dtype, device=setup.device)
    learner = Learner(model, setup.plan, setup.config, loss_named(setup.config.loss))
    learner.version = max(version for each in batch for version in each.versions)
    times: list[float] = []
    for _ in range(ALONE + 1):
        began = time.perf_counter()
        learner.step([replace(each) for each in batch])
        times.append((time.perf_counter() - began) * 1e3)
    with profiled(folder / "learner.profile.txt"):
        learner.step([replace(each) for each in batch])
    learner.close()
    return statistics.median(times[1:])


@contextmanager
def profiled(file: Path) -> Generator[None]:
    """What the interpreter does meanwhile, in this thread."""
    profile = cProfile.Profile()
    profile.enable()
    try:
        yield
    finally:
        profile.disable()
        with file.open("w", encoding="utf-8") as opened:
            found = pstats.Stats(profile, stream=opened)
            found.sort_stats("tottime").print_stats(40)
            found.sort_stats("cumulative").print_stats(70)


def in_use() -> int:
    """Bytes of the GPU in use, by every process."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def too_little() -> float:
    """Leave this process three quarters of what its steps took beyond what it keeps; its bytes."""
    if not torch.cuda.is_available():
        return 0.0
    kept = torch.cuda.memory_allocated()
    room = kept + (torch.cuda.max_memory_allocated() - kept) * 0.75
    limit(room)
    return room


def limit(room: float) -> None:
    """From now on torch's allocator finds no more than ``room`` bytes of the GPU here."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(room / total)


def keep(folder: Path, found: dict[str, Any]) -> None:
    """Add to the facts."""
    file = folder / "facts.json"
    held = json.loads(file.read_text()) if file.exists() else {}
    replace_whole(file, json.dumps(held | found) + "\n")


if __name__ == "__main__":
    main()
