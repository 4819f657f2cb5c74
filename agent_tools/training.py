"""``zm train``: a green recipe, a task, a run folder; what came of it.

    found = start(Request(recipe=Path("model_recipes/tiny/qwen3"), given={"task": "even"}), folder)

A recipe is green when it agrees with itself, belongs to the model it names, all its claims passed,
and this is the environment they passed in: the trainer starts for no other. The loop itself is in
``trainer/loop``, its curves are drawn from ``metrics.jsonl`` in the run's folder.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from ..kernels.errors import RecipeError, UsageError
from ..model_recipes.models import LoadedModel, load_model
from ..model_recipes.schema import Recipe, check_identity, load_recipe
from ..trainer.diagnostics.journal import Journal, read_journal
from ..trainer.diagnostics.record import UpdateRecord
from ..trainer.loop.config import TrainConfig
from ..trainer.loop.folder import read_config
from ..trainer.loop.run import Setup, train
from ..trainer.tasks.catalogue import task_named
from .recipe import environment_of
from .recipe_verify import RecordedCommand, check_itself, recorded_command
from .records import Record
from .training_report import write_training_page

WINDOW = 20
HELD_OUT_SEED = 10**6
"""Added to the run's seed, a dataset gives entries that training does not see."""
Progress = Callable[[str], None]
Show = Callable[[UpdateRecord], None]


class Training(Record):
    """What ``zm train`` answers.

    kernel_compared, kernel_unequal: audited tokens of the whole run. reward_first, reward_last:
    mean of the first and last updates (20, or half of a shorter run); standard_error: of their
    difference.
    """

    schema_version: Literal[1] = 1
    kind: Literal["training"] = "training"
    status: Literal["pass", "fail"]
    reason: str
    folder: str
    report: str
    export: str
    weights_root: str
    updates: int
    resumed_at: int
    kernel_compared: int
    kernel_unequal: int
    lag_cap: int
    lag_median: float
    lag_most: int
    reward_first: float
    reward_last: float
    standard_error: float
    notes: tuple[str, ...] = ()
    seconds: float

    @property
    def exit_code(self) -> int:
        """0 diff 0 throughout, 1 not."""
        return 0 if self.status == "pass" else 1


def settings(
    recipe: Path | None, given: Mapping[str, Any], *, file: Path | None, resume: Path | None
) -> TrainConfig:
    """The settings of a run: a resumed run's own, else those of ``file``; ``given`` on top."""
    values: dict[str, Any] = {}
    if resume is not None:
        values = read_config(resume).model_dump()
    if file is not None:
        values |= _read(file)
    values |= {name: value for name, value in given.items() if value is not None}
    if recipe is not None:
        values["recipe"] = str(recipe)
    for name, meaning in (("recipe", "a recipe folder"), ("task", "--task NAME")):
        if not values.get(name):
            raise UsageError(f"the run has no {name}; give {meaning}, or --resume a run's folder")
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"]) or "the settings"
        raise UsageError(f"{where}: {fault['msg']}; correct it (`zm train --help`)") from error


def start(
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    progress: Progress = lambda stage: None,
    show: Show | None = None,
) -> Training:
    """Check the recipe, train to the end, sum up. Raises what the loop raises."""
    progress("checking the recipe")
    recipe, command, model = green_recipe(Path(config.recipe))
    if config.rollout != command.rollout:
        raise RecipeError(
            f"{config.recipe} proves rollouts of {command.rollout}, not of {config.rollout}; train "
            f"with rollout {command.rollout}, or `zm align {command.model} --rollout "
            f"{config.rollout}` first"
        )
    setup = Setup(
        model=model.spec,
        plan=recipe.plan,
        task=task_named(config.task, model, seed=config.seed),
        config=config,
        dtype=command.dtype,
        device=command.device,
        model_seed=command.seed,
        held_out=task_named(config.task, model, seed=config.seed + HELD_OUT_SEED),
    )
    progress(f"training in {folder}")
    with Journal(folder, on_record=show) as journal:

        def sink(facts: Any) -> None:
            journal.write(facts)

        outcome = train(
            setup, folder, resume=resume, sink=sink, evaluated=journal.evaluated, model=model
        )
    records = read_journal(folder)
    _, page = write_training_page(folder)
    return _summed_up(
        records,
        config,
        folder=str(folder),
        report=str(page),
        export=str(outcome.export),
        weights_root=outcome.weights_root,
        resumed_at=outcome.resumed_at,
        notes=outcome.notes,
        seconds=outcome.seconds,
    )


def green_recipe(path: Path) -> tuple[Recipe, RecordedCommand, LoadedModel]:
    """The recipe, how it was made, and its model; RecipeError unless it is green here."""
    recipe = load_recipe(path)
    check_itself(recipe, path)
    command = recorded_command(recipe.evidence[0].command, path)
    red = [entry for entry in recipe.evidence if entry.verdict not in ("pass", "not-applicable")]
    if red:
        raise RecipeError(
            f"{path} is not green: {red[0].claim!r} came out {red[0].verdict}; align the model "
            f"again with `{recipe.evidence[0].command}`"
        )
    model = load_model(command.model, dtype=command.dtype, device=command.device, seed=command.seed)
    check_identity(recipe, model.identity)
    here = environment_of(model, recipe.plan)
    changes = [
        f"{name}: {recipe.versions.get(name, 'absent')}, here {here.get(name, 'absent')}"
        for name in sorted(here.keys() | recipe.versions.keys())
        if here.get(name) != recipe.versions.get(name)
    ]
    if changes:
        raise RecipeError(
            f"{path} is green for another environment ({'; '.join(changes)}); prove it here with "
            f"`{recipe.evidence[0].command}` and train with the recipe that it writes"
        )
    return recipe, command, model


def _read(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{file} cannot be read as YAML: {error}; correct it") from error
    if not isinstance(values, dict):
        raise UsageError(f"{file} holds no settings; write one `name: value` a line")
    return values


def _summed_up(records: list[UpdateRecord], config: TrainConfig, **about: Any) -> Training:
    compared = sum(record.kernel.compared for record in records)
    unequal = sum(record.kernel.unequal for record in records)
    first, last, error = rise([record.reward for record in records])
    zero = unequal == 0 and all(record.kernel.compared for record in records)
    said = f"{unequal:,} of {compared:,} audited tokens differ from the rollout's under their own "
    return Training(
        status="pass" if zero else "fail",
        reason=f"{said}weights, over {len(records)} updates",
        updates=len(records),
        kernel_compared=compared,
        kernel_unequal=unequal,
        lag_cap=config.lag,
        lag_median=statistics.median(record.lag_median for record in records),
        lag_most=max(record.lag_most for record in records),
        reward_first=first,
        reward_last=last,
        standard_error=error,
        **about,
    )


def rise(rewards: list[float]) -> tuple[float, float, float]:
    """Means of the first and last updates, and the standard error of their difference."""
    window = max(1, min(WINDOW, len(rewards) // 2))
    first, last = rewards[:window], rewards[-window:]
    spread = [statistics.variance(each) / window if window > 1 else 0.0 for each in (first, last)]
    return statistics.fmean(first), statistics.fmean(last), math.sqrt(sum(spread))
