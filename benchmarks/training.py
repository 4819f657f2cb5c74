"""What asynchronous training does on this machine, measured: benchmarks/training.md.

    python benchmarks/training.py                     # everything: hours on two cores
    python benchmarks/training.py --only lag-8,step   # some of it; the page keeps the other rows

Per lag (0, 2, 8, 64): 300 updates of ``tiny:qwen3`` in deterministic mode, the kernel term of every
one, the lag of every token, the reward at both ends with the standard error of its rise, and the
time of an update early and late. Beside them a control with shuffled rewards, free-running mode,
and the learner's step on aligned and on stock operators, in turns in one process. All numbers are
kept in training.json, and the page is written from them alone.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from zeromismatch.agent_tools.training import rise
from zeromismatch.kernels.files import replace_whole
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
UPDATES = 300
RATE = 3e-4
RUNS: dict[str, dict[str, Any]] = {
    "lag-0": {"lag": 0},
    "lag-2": {"lag": 2},
    "lag-8": {"lag": 8},
    "lag-64": {"lag": 64},
    "lag-2-shuffled": {"lag": 2, "shuffle_rewards": True},
    "lag-2-free": {"lag": 2, "mode": "free", "audit": 2, "fill": 0.75},
    "lag-8-free": {"lag": 8, "mode": "free", "audit": 2, "fill": 0.75},
    "lag-64-free": {"lag": 64, "mode": "free", "audit": 2, "fill": 0.75},
}
STEP = "step"
SHAPES = ((8, 8), (64, 64))
"""Prompt and reply of each of an update's 16 responses."""
BATCH = 16
HERE = Path(__file__).parent
Found = dict[str, Any]


def main() -> None:
    """Measure, keep, write the page, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join([*RUNS, STEP]), help="names, with commas")
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of training.md and .json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(MODEL)
    plan = plan_from("aligned", find_sites(model.module), model.dtype, model.device, model.identity)
    for name in asked.only.split(","):
        if name == STEP:
            found: Found = {"steps": step_times(plan)}
        else:
            found = measured_run(plan, asked.updates, asked.rate, RUNS[name])
        found["machine"] = f"{platform.machine()}, torch {torch.__version__}"
        keep(asked.out / "training.json", name, found)
    text = page(json.loads((asked.out / "training.json").read_text(encoding="utf-8")))
    (asked.out / "training.md").write_text(text, encoding="utf-8")
    print(text)


def keep(file: Path, name: str, found: Found) -> None:
    """Add or replace one measurement."""
    held = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    replace_whole(file, json.dumps(held | {name: found}) + "\n")


def measured_run(plan: Plan, updates: int, rate: float, changes: Found) -> Found:
    """One run's numbers, an entry an update."""
    settings = {"recipe": "-", "task": "even", "updates": updates, "groups": 2, "group_size": 8,
                "max_new_tokens": 8, "learning_rate": rate, "audit": 16,
                "checkpoint_every": 50}  # fmt: skip
    config = TrainConfig.model_validate(settings | changes)
    setup = Setup(model=MODEL, plan=plan, task=Even(vocabulary=3011), config=config)
    records: list[UpdateRecord] = []
    times: list[float] = []
    spent: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="zm-bench-") as folder,
        Journal(Path(folder), tensorboard=False) as journal,
    ):

        def sink(facts: UpdateFacts) -> None:
            records.append(journal.write(facts))
            times.append(time.perf_counter())
            spent.append(time.process_time())

        train(setup, Path(folder), sink=sink)
    return {
        "settings": settings | changes,
        "rewards": [record.reward for record in records],
        "compared": [record.kernel.compared for record in records],
        "unequal": [record.kernel.unequal for record in records],
        "lags": [record.lag_histogram for record in records],
        "d3": [record.d3 for record in records],
        "gradient_norms": [record.gradient_norm for record in records],
        "train_ms": [round(record.train_seconds * 1e3, 1) for record in records],
        "update_ms": [round((b - a) * 1e3, 1) for a, b in pairwise(times)],
        "processor_ms": [round((b - a) * 1e3, 1) for a, b in pairwise(spent)],
    }


def step_times(plan: Plan) -> list[Found]:
    """The learner's whole step on both plans, in turns: medians of each shape, in ms."""
    config = TrainConfig(recipe="-", task="even", learning_rate=1e-6, max_rows=None)
    found: list[Found] = []
    for prompt, reply in SHAPES:
        batch = [trajectory(index, prompt, reply) for index in range(BATCH)]
        learners = [
            Learner(load_model(MODEL), each, config, loss_named("reinforce_zero"))
            for each in (plan, stock_plan())
        ]
        ours, stock = alternating([partial(own.step, batch) for own in learners])
        for own in learners:
            own.close()
        found.append({"prompt": prompt, "reply": reply, "aligned": ours, "stock": stock})
    return found


def alternating(works: list[Callable[[], object]], rounds: int = 15) -> list[float]:
    """Median milliseconds of each, taken in turns after two rounds of warming up."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(rounds + 2):
        for work, own in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            if turn >= 2:
                own.append((time.perf_counter() - began) * 1e3)
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


COLUMNS = (
    "run", "learning rate", "updates", "audited tokens that differ",
    "lag after warm-up: least / median / most", "reward, first → last 20",
    "rise, standard errors", "peak D3", "update, ms: early / late",
    "its processor time, ms: early / late",
)  # fmt: skip


def row_of(name: str, found: Found) -> list[str]:
    """One run as a row of the table."""
    settings, rewards = found["settings"], found["rewards"]
    lags = [
        int(lag)
        for each in found["lags"][settings["lag"] :]
        for lag, tokens in each.items()
        for _ in range(tokens)
    ]
    first, last, error = rise(rewards)
    drained = settings.get("mode") == "free" and not settings.get("fill")
    return [
        f"{name}, fill 0" if drained else name,
        f"{settings['learning_rate']:g}",
        str(len(rewards)),
        f"{sum(found['unequal']):,} of {sum(found['compared']):,}",
        f"{min(lags)} / {statistics.median(lags):g} / {max(lags)}",
        f"{first:.3f} → {last:.3f}",
        f"{(last - first) / error:+.1f}" if error else "–",
        f"{max(found['d3']):.2g}",
        _ends(found["update_ms"]),
        _ends(found["processor_ms"]),
    ]


def _ends(values: list[float]) -> str:
    """Medians of a tenth of the run, from its tenth on, and at its end."""
    if not values:
        return "not recorded"
    tenth = max(1, len(values) // 10)
    early, late = values[tenth : 2 * tenth], values[-tenth:]
    return f"{statistics.median(early):.0f} / {statistics.median(late):.0f}"


def page(held: dict[str, Found]) -> str:
    """The Markdown page."""
    runs = [row_of(name, held[name]) for name in RUNS if name in held]
    machine = "; ".join(sorted({found["machine"] for found in held.values()}))
    lines = [
        "# Asynchronous training on a CPU",
        "",
        f"Made by `python benchmarks/training.py` from [training.json](training.json): {MODEL}, "
        "task `even` (share of even token ids; random weights start near 0.5), updates of 2 "
        "prompts × 8 responses × 8 tokens, AdamW at one rate for every lag, nothing clipped, one "
        f"worker thread, one torch thread; {machine}. What a tiny model learns says nothing about "
        "a real one; the table shows that the lag is real and that the kernel term is 0 under it. "
        "Free-running rows take whatever version is newest, and the learner keeps three quarters "
        "of the window under way before it (`fill`), except in rows that say `fill 0`: there it "
        "takes an update as soon as it is there. "
        "Other work shared the machine while the runs went on, which is why the processor time of "
        "an update (rollout, audit, step, publication) stands beside its time.",
        "",
        *_table(COLUMNS, runs),
    ]
    if STEP in held:
        columns = ("responses × (prompt + reply)", "aligned, ms", "stock, ms", "ratio")
        lines += [
            "",
            "The learner's whole step (gradient, norm, AdamW) on aligned and on stock operators, "
            "in turns in one process, medians of 15:",
            "",
            *_table(columns, [
                [f"{BATCH} × ({each['prompt']} + {each['reply']})", f"{each['aligned']:.0f}",
                 f"{each['stock']:.0f}", f"{each['aligned'] / each['stock']:.2f}"]
                for each in held[STEP]["steps"]
            ]),
            "",
            "An operator's weight is laid out in panels once a step, whatever the number of rows; "
            "with few rows there is little work to spread that over.",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(each)} |" for each in (columns, ["---"] * len(columns), *rows)]


if __name__ == "__main__":
    main()
