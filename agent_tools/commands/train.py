"""``zm train``: asynchronous REINFORCE Zero on a green recipe."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import options
from .answer import Answer, command, table
from .progress import stages

if TYPE_CHECKING:
    from ..training import Training

Recipe = Annotated[
    Path | None,
    typer.Argument(metavar="[RECIPE]", help="A recipe folder, green for this environment."),
]


def register(app: typer.Typer) -> None:
    """Add the command to ``zm``."""
    app.command()(train)


@command
def train(
    recipe: Recipe = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="`even`, `gym/DATASET`, `tool/DATASET`, `module:fn`."),
    ] = None,
    updates: Annotated[int | None, typer.Option(help="Optimiser steps in all.")] = None,
    lag: Annotated[int | None, typer.Option(help="No token is older, in versions.")] = None,
    mode: Annotated[
        Literal["deterministic", "free"] | None,
        typer.Option(help="Fixed schedule and bits, or as fast as it goes."),
    ] = None,
    placement: Annotated[
        Literal["threads", "processes", "ray"] | None, typer.Option(help="Where workers run.")
    ] = None,
    rollout: Annotated[
        Literal["paged", "vllm"] | None, typer.Option(help="The engine that samples.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Rollout engines.")] = None,
    evaluate: Annotated[
        int | None,
        typer.Option("--evaluate-every", help="Updates between evaluations on held-out problems."),
    ] = None,
    rate: Annotated[float | None, typer.Option("--learning-rate", help="After warm-up.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of prompts, sampling and audits.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML with any further settings.")
    ] = None,
    out: options.Out = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the run in this folder.")
    ] = None,
    json: options.Json = False,
) -> Answer:
    """Train with rollouts, learner and publication at the same time, at kernel term 0.

    Exit 0 done, 1 not at diff 0, 2 a recipe that is not green here. Each update is a line of
    metrics.jsonl in the run's folder, and in TensorBoard's files beside it.
    """
    from ...kernels.errors import UsageError
    from ...trainer.diagnostics.live import live
    from ..training import settings, start
    from .measure import new_folder

    if resume is not None and out is not None and out != resume:
        raise UsageError("--resume goes on in its own folder; leave --out away")
    given: dict[str, Any] = {
        "task": task, "updates": updates, "lag": lag, "mode": mode, "placement": placement,
        "rollout": rollout, "workers": workers, "learning_rate": rate, "seed": seed,
        "evaluate_every": evaluate,
    }  # fmt: skip
    chosen = settings(recipe, given, file=config, resume=resume)
    folder = resume or out or new_folder("train")
    with stages() as progress:
        progress("loading")
    with live(chosen.updates) as show:
        found = start(chosen, folder, resume=resume is not None, show=show)
    return Answer(document=found, text=train_text(found), exit_code=found.exit_code)


def train_text(found: "Training") -> list[object]:
    """What came of a run, for a person."""
    rows = [
        ["kernel term", f"{found.kernel_unequal:,} of {found.kernel_compared:,} tokens differ"],
        ["lag", f"{found.lag_median:g} median, {found.lag_most} most, cap {found.lag_cap}"],
        ["reward", f"{found.reward_first:.4f} at first, {found.reward_last:.4f} at the end "
                   f"(standard error {found.standard_error:.4f})"],
        ["updates", f"{found.updates}" + (f", resumed at {found.resumed_at}"
                                          if found.resumed_at else "")],
    ]  # fmt: skip
    return [
        table(["", ""], rows),
        f"{found.status.upper()}: {found.reason}",
        f"Run: {found.folder}",
        f"Report: {found.report}",
        f"Model: {found.export}",
        *found.notes,
        f"{found.seconds:.1f} s",
    ]
