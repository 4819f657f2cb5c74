"""What asynchronous training does on this machine, measured: benchmarks/training.md.

    python -m benchmarks.training            # or: python benchmarks/training.py [--quick]

Per lag (0, 2, 8, 64): 300 updates of ``tiny:qwen3`` in deterministic mode, the kernel term of every
one, the lag of every token, the reward at both ends with the standard error of its rise, and the
time of a step early and late. Beside them the control with shuffled rewards, free-running mode, and
the learner's step on aligned and on stock operators, alternating in one process. Runs are made in a
temporary folder and measured from their own records.
"""

import argparse
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from zeromismatch.agent_tools.training import rise
from zeromismatch.model_recipes.apply import find_sites
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.plan import Plan, plan_from, stock_plan
from zeromismatch.trainer.diagnostics.journal import Journal
from zeromismatch.trainer.diagnostics.record import UpdateRecord
from zeromismatch.trainer.loop.config import TrainConfig
from zeromismatch.trainer.loop.learner import Learner
from zeromismatch.trainer.loop.records import Prompt, Trajectory, UpdateFacts
from zeromismatch.trainer.loop.run import Setup, train
from zeromismatch.trainer.losses.catalogue import loss_named
from zeromismatch.trainer.tasks.even import Even

MODEL = "tiny:qwen3"
RATES = {0: 3e-3, 2: 3e-3, 8: 7e-4, 64: 1.5e-4}
"""Older samples need smaller steps: nothing is clipped."""
EARLY = slice(10, 40)


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the updates")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "training.md")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(MODEL)
    plan = plan_from("aligned", find_sites(model.module), model.dtype, model.device, model.identity)
    updates = 30 if asked.quick else 300
    rows = [run_row(plan, updates, lag, f"lag {lag}") for lag in RATES]
    rows.append(run_row(plan, updates, 2, "lag 2, rewards shuffled", shuffle_rewards=True))
    rows.append(run_row(plan, updates, 8, "lag 8, free-running", mode="free"))
    text = page(rows, step_ratio(plan), updates)
    asked.out.write_text(text, encoding="utf-8")
    print(text)


def run_row(plan: Plan, updates: int, lag: int, name: str, **changes: object) -> list[str]:
    """One run as a row of the table."""
    config = TrainConfig.model_validate(
        {"recipe": "-", "task": "even", "updates": updates, "lag": lag, "groups": 2,
         "group_size": 8, "max_new_tokens": 8,
         "learning_rate": RATES[lag], "checkpoint_every": 50, **changes}
    )  # fmt: skip
    setup = Setup(model=MODEL, plan=plan, task=Even(vocabulary=3011), config=config)
    records: list[UpdateRecord] = []
    times: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="zm-bench-") as folder,
        Journal(Path(folder), tensorboard=False) as journal,
    ):

        def sink(facts: UpdateFacts) -> None:
            records.append(journal.write(facts))
            times.append(time.perf_counter())

        train(setup, Path(folder), sink=sink)
    steps = [after - before for before, after in pairwise(times)]
    lags = [record.lag_median for record in records if record.version >= lag]
    most = max(record.lag_most for record in records)
    first, last, error = rise([record.reward for record in records])
    compared = sum(record.kernel.compared for record in records)
    unequal = sum(record.kernel.unequal for record in records)
    print(name, f"{sum(steps):.0f} s", flush=True)
    return [
        name,
        f"{config.learning_rate:g}",
        f"{unequal:,} of {compared:,}",
        f"{statistics.median(lags):g} / {most}",
        f"{first:.3f} → {last:.3f}",
        f"{(last - first) / error:+.1f}" if error else "–",
        f"{statistics.median(steps[EARLY]) * 1e3:.0f} / {statistics.median(steps[-30:]) * 1e3:.0f}",
    ]


def step_ratio(plan: Plan) -> str:
    """The learner's step on both plans, alternating: median and least of each."""
    config = TrainConfig(recipe="-", task="even", learning_rate=1e-6)
    lines = ["| tokens per update | aligned, ms | stock, ms | ratio |", "|---|---|---|---|"]
    for prompt, reply in ((8, 8), (64, 64)):
        batch = [trajectory(index, prompt, reply) for index in range(16)]
        learners = [
            Learner(load_model(MODEL), each, config, loss_named("reinforce_zero"))
            for each in (plan, stock_plan())
        ]
        ours, stock = alternating([partial(own.step, batch) for own in learners])
        for own in learners:
            own.close()
        lines.append(
            f"| {16 * (prompt + reply):,} | {ours * 1e3:.0f} | {stock * 1e3:.0f} | "
            f"{ours / stock:.2f} |"
        )
    return "\n".join(lines)


def alternating(works: list[Callable[[], object]], rounds: int = 15) -> list[float]:
    """Median seconds of each, taken in turns after two rounds of warming up."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(rounds + 2):
        for work, own in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            if turn >= 2:
                own.append(time.perf_counter() - began)
    return [statistics.median(own) for own in times]


def trajectory(index: int, prompt: int, reply: int) -> Trajectory:
    """Random tokens, recorded near what an untrained model gives them."""
    rng = random.Random(index)
    tokens = tuple(rng.randrange(3, 3011) for _ in range(prompt + reply))
    mu = torch.full((reply,), -7.0).view(torch.int32)
    return Trajectory(
        id=f"{index // 4}/{index % 4}", group=index // 4, prompt=Prompt(tokens=tokens[:prompt]),
        tokens=tokens, sampled_mask=(False,) * prompt + (True,) * reply,
        turns=((prompt, prompt + reply),), logprob_bits=tuple(mu.tolist()),
        versions=(0,) * reply, temperature=1.0, reward=float(index % 2),
    )  # fmt: skip


def page(rows: list[list[str]], ratio: str, updates: int) -> str:
    """The Markdown page."""
    ends = f"reward, first → last {min(20, updates // 2)} updates"
    head = [
        "run", "learning rate", "audited tokens that differ", "lag after warm-up, median / most",
        ends, "rise, standard errors", "ms per update, early / late",
    ]  # fmt: skip
    table = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    table += ["| " + " | ".join(row) + " |" for row in rows]
    return (
        "# Asynchronous training on a CPU\n\n"
        f"Made by `python benchmarks/training.py`: {MODEL}, task `even` (share of even token ids; "
        f"random weights start near 0.5), {updates} updates of 2 prompts × 8 responses × 8 tokens, "
        f"one worker thread, one torch thread; {platform.machine()}, torch {torch.__version__}. "
        "What a tiny model learns says nothing about a real one; the table shows that lag is real, "
        "that the kernel term is 0 under it, and that updates do not become slower.\n\n"
        + "\n".join(table)
        + "\n\nThe learner's whole step (gradient, norm, AdamW), in turns in one process:\n\n"
        + ratio
        + "\n"
    )


if __name__ == "__main__":
    main()
