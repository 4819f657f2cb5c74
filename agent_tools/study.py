"""``zm study``: the same prompts, seeds and first weights under different losses, side by side.

    study, curves = run_study("tiny:qwen3", entries=ENTRIES, settings=Settings(lag=8), out=folder)

REINFORCE Zero runs with the aligned plan; the corrections that were published for engines that
disagree run where they belong, on stock kernels at the same lag. Every entry goes through the loop
of ``zm train``, in deterministic mode. A run that a number without value stops is a result and is
reported as one.

Left out: any claim beyond the model at hand. A tiny model says whether the parts do what they say,
not which recipe wins at scale.
"""

import contextlib
import fcntl
import shutil
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from ..kernels.errors import NonFiniteError, UsageError
from ..model_recipes.models import DTypeName, LoadedModel, load_model
from ..model_recipes.plan import Plan, aligned_plan, stock_plan
from ..trainer.diagnostics.journal import Journal, read_journal
from ..trainer.diagnostics.record import UpdateRecord
from ..trainer.loop.config import TrainConfig
from ..trainer.loop.records import UpdateFacts
from ..trainer.loop.run import Setup, train
from ..trainer.losses.catalogue import LOSSES
from ..trainer.tasks.catalogue import task_named
from .records import Record
from .report import write_whole
from .training import rise

Progress = Callable[[str], None]


class Entry(Record):
    """One member of a study. plan: of both engines. synchronous: lag 0 whatever the study's is."""

    loss: str
    plan: Literal["aligned", "stock"]
    synchronous: bool = False


RESULT = "result.json"
OURS = "reinforce_zero"
ALIGNED = (OURS, "synchronous")
ENTRIES: dict[str, Entry] = {
    name: Entry(
        loss=name,
        plan="aligned" if name in ALIGNED else "stock",
        synchronous=name == "synchronous",
    )
    for name in LOSSES
}


class Settings(Record):
    """What every member of a study shares."""

    task: str = "even"
    updates: int = Field(default=60, ge=4)
    lag: int = Field(default=8, ge=0)
    groups: int = Field(default=4, ge=1)
    group_size: int = Field(default=4, ge=2)
    max_new_tokens: int = Field(default=8, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    dtype: DTypeName = "float32"
    seeds: tuple[int, ...] = (0,)


class Owner(Record):
    """Whose folder it is."""

    model: str
    settings: Settings


class Result(Record):
    """What one entry did under one seed.

    reward_first, reward_last: mean of the first and last updates, up to 20; standard_error: of
    their difference. d3_peak_to_median: largest over median D3 of the updates with lag. kl_first,
    kl_last: median D3 of the first and last third. rejected: share of action tokens over the run.
    gradient_norm_peak: before any limit. moves: share of tokens with an advantage whose logprob
    moved against it. kernel_unequal, kernel_compared: audited tokens. stopped: why it ended early.
    """

    name: str
    seed: int
    updates: int
    reward_first: float
    reward_last: float
    standard_error: float
    d3_median: float
    d3_peak_to_median: float | None
    kl_first: float
    kl_last: float
    rejected: float
    gradient_norm_peak: float
    moves: float
    kernel_compared: int
    kernel_unequal: int
    kernel_largest: float
    seconds: float
    stopped: str = ""


class Study(Record):
    """All results, and what it takes to repeat them."""

    schema_version: Literal[1] = 1
    kind: Literal["study"] = "study"
    model: str
    settings: Settings
    entries: dict[str, Entry]
    results: tuple[Result, ...]
    environment: dict[str, str]
    seconds: float


def chosen_entries(names: Sequence[str]) -> dict[str, Entry]:
    """The named entries, REINFORCE Zero first; where none is named, all that any model can run."""
    for name in names:
        if name not in ENTRIES:
            raise UsageError(f"there is no loss {name!r}; choose among {', '.join(ENTRIES)}")
    wanted = [OURS, *names] if names else [n for n in ENTRIES if not LOSSES[n].needs_routes]
    return {name: ENTRIES[name] for name in dict.fromkeys(wanted)}


def run_study(
    model: str,
    *,
    entries: Mapping[str, Entry],
    settings: Settings,
    out: Path,
    progress: Progress = lambda stage: None,
) -> tuple[Study, dict[str, list[UpdateRecord]]]:
    """Run every entry under every seed; returns the study and the first seed's records by entry.

    Each run leaves ``metrics.jsonl`` and ``result.json`` in ``out/<entry>-seed<n>/``; weights are
    deleted. A study that was interrupted goes on: runs with a result are taken as they are, if the
    folder is this study's.
    """
    from .recipe import environment_of

    _claim(out, model, settings)
    results: list[Result] = []
    curves: dict[str, list[UpdateRecord]] = {}
    first = next(iter(entries.values()))
    loaded = load_model(model, dtype=settings.dtype)
    environment = environment_of(loaded, plan_of(first, settings.dtype))
    for seed in settings.seeds:
        for name, entry in entries.items():
            progress(f"{name}, seed {seed}")
            folder = out / f"{name}-seed{seed}"
            done = folder / RESULT
            if not done.exists():
                loaded = load_model(model, dtype=settings.dtype)
                plan = plan_of(entry, settings.dtype)
                with alone(folder):
                    found = run_entry(name, entry, loaded, plan, settings, seed, folder)
                write_whole(done, found.model_dump_json(indent=1) + "\n")
            results.append(Result.model_validate_json(done.read_text(encoding="utf-8")))
            if seed == settings.seeds[0]:
                curves[name] = read_journal(folder)
    study = Study(
        model=model,
        settings=settings,
        entries=dict(entries),
        results=tuple(results),
        environment=environment,
        seconds=sum(result.seconds for result in results),
    )
    return study, curves


def _claim(out: Path, model: str, settings: Settings) -> None:
    """Make the folder this study's, or find that it is."""
    text = Owner(model=model, settings=settings).model_dump_json(indent=1) + "\n"
    file = out / "settings.json"
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise UsageError(f"{out} holds a study with other settings; choose another --out")
    write_whole(file, text)


@contextlib.contextmanager
def alone(folder: Path) -> Generator[None]:
    """Hold a run's folder; UsageError where another process does. The lock ends with ours."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"another study is at work in {folder}; wait for it, or choose another --out"
            ) from error
        yield


def plan_of(entry: Entry, dtype: DTypeName) -> Plan:
    """The plan that both engines carry."""
    return aligned_plan(dtype, "cpu") if entry.plan == "aligned" else stock_plan()


def run_entry(
    name: str,
    entry: Entry,
    model: LoadedModel,
    plan: Plan,
    settings: Settings,
    seed: int,
    folder: Path,
) -> Result:
    """One training run, summed up."""
    config = TrainConfig(
        recipe=f"study:{model.spec}:{entry.plan}",
        task=settings.task,
        updates=settings.updates,
        lag=0 if entry.synchronous else settings.lag,
        loss=entry.loss,
        groups=settings.groups,
        group_size=settings.group_size,
        max_new_tokens=settings.max_new_tokens,
        learning_rate=settings.learning_rate,
        audit=settings.groups * settings.group_size,
        seed=seed,
        checkpoint_every=settings.updates,
        require_zero=entry.plan == "aligned",
        measure_moves=True,
    )
    setup = Setup(
        model=model.spec,
        plan=plan,
        task=task_named(settings.task, model, seed=seed),
        config=config,
        dtype=settings.dtype,
    )
    began, stopped = time.perf_counter(), ""
    work = folder / "run"
    shutil.rmtree(work, ignore_errors=True)  # an interrupted study's
    with Journal(folder, tensorboard=False) as journal:

        def sink(facts: UpdateFacts) -> None:
            journal.write(facts)

        try:
            train(setup, work, sink=sink, model=model)
        except NonFiniteError as error:
            stopped = str(error)
    shutil.rmtree(work)
    seconds = time.perf_counter() - began
    return result_of(name, seed, read_journal(folder), seconds=seconds, stopped=stopped)


def result_of(
    name: str, seed: int, records: Sequence[UpdateRecord], *, seconds: float, stopped: str = ""
) -> Result:
    """Sum a run up; UsageError where not even two updates were made."""
    if len(records) < 2:
        raise UsageError(
            f"{name} made {len(records)} updates ({stopped or 'no reason given'}); nothing can be "
            "compared: lower the learning rate"
        )
    first, last, error = rise([record.reward for record in records])
    lagging = [record.d3 for record in records if record.lag_most == records[-1].lag_most]
    median = statistics.median(lagging)
    third = max(1, len(lagging) // 3)
    tokens = sum(record.tokens for record in records)
    measured = [record.moves for record in records if record.moves is not None]
    return Result(
        name=name,
        seed=seed,
        updates=len(records),
        reward_first=first,
        reward_last=last,
        standard_error=error,
        d3_median=median,
        d3_peak_to_median=max(lagging) / median if median > 0 else None,
        kl_first=statistics.median(lagging[:third]),
        kl_last=statistics.median(lagging[-third:]),
        rejected=sum(record.rejected * record.tokens for record in records) / tokens,
        gradient_norm_peak=max(record.gradient_norm for record in records),
        moves=statistics.fmean(measured),
        kernel_compared=sum(record.kernel.compared for record in records),
        kernel_unequal=sum(record.kernel.unequal for record in records),
        kernel_largest=max(record.kernel.largest for record in records),
        seconds=seconds,
        stopped=stopped,
    )
