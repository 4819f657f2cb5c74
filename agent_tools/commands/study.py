"""``zm study``: training recipes side by side, for study."""

from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .answer import Answer, command, table
from .progress import stages

if TYPE_CHECKING:
    from ..study import Study


def register(app: typer.Typer) -> None:
    """Add the command to ``zm``."""
    app.command()(study)


@command
def study(
    model: options.Model,
    only: Annotated[
        str | None, typer.Option(help="Losses, comma-separated; default: all.", metavar="NAMES")
    ] = None,
    task: Annotated[
        str,
        typer.Option(metavar="NAME", help="`even`, `gym/DATASET`, `tool/DATASET`, `module:fn`."),
    ] = "even",
    updates: Annotated[int, typer.Option(help="Optimiser steps of each run.", min=4)] = 60,
    groups: Annotated[int, typer.Option(help="Prompts of an update.", min=1)] = 4,
    lag: Annotated[int, typer.Option(help="No token is older, in versions.", min=0)] = 8,
    rate: Annotated[float, typer.Option("--learning-rate", help="AdamW's.")] = 1e-3,
    seeds: Annotated[str, typer.Option(help="Comma-separated; each runs every loss.")] = "0",
    dtype: options.Dtype = "float32",
    quick: options.Quick = False,
    out: options.Out = None,
    json: options.Json = False,
) -> Answer:
    """Train the same model with the same prompts and seeds under every loss, and compare.

    REINFORCE Zero runs aligned, corrections for disagreeing engines on stock kernels. Writes
    study.html, study.md and study.json. Exit 0 done, 2 unusable arguments.
    """
    from ...kernels.errors import UsageError
    from ..study import Settings, chosen_entries, run_study
    from ..study_page import command_of, write_study
    from .measure import new_folder

    try:
        numbers = tuple(int(seed) for seed in seeds.split(","))
    except ValueError as error:
        raise UsageError(f"--seeds is {seeds!r}; give numbers, such as 0,1,2") from error
    settings = Settings(
        task=task,
        updates=min(updates, 16) if quick else updates,
        groups=min(groups, 2) if quick else groups,
        lag=lag,
        learning_rate=rate,
        seeds=numbers,
        dtype=dtype,
    )
    entries = chosen_entries([name for name in (only or "").split(",") if name])
    folder = out or new_folder("study")
    with stages() as progress:
        found, curves = run_study(
            model, entries=entries, settings=settings, out=folder, progress=progress
        )
    page = write_study(folder, found, curves, command=command_of(found))
    return Answer(document=found, text=[*study_text(found), f"Page: {page}"])


def study_text(found: "Study") -> list[object]:
    """The table, for a person."""
    from ..study_page import COLUMNS, caveat, rows_of

    return [
        table(list(COLUMNS), [list(row) for row in rows_of(found)]),
        caveat(found),
        f"{found.seconds:.1f} s",
    ]
