"""``zm patch propose``, ``apply``, ``revert``, ``draft``: admitted, or it never happened."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .answer import Answer, command, table
from .progress import stages

if TYPE_CHECKING:
    from ..patch import PatchReport

patches = typer.Typer(help="Changes that are admitted as one commit on a branch, or undone.")
Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run's folder, for instance runs/patch-1.")
]


def register(app: typer.Typer) -> None:
    """Add these commands to ``zm``."""
    patches.command()(propose)
    patches.command()(apply)
    patches.command()(revert)
    patches.command()(draft)
    app.add_typer(patches, name="patch")


@command
def propose(
    diff: Annotated[Path, typer.Argument(metavar="DIFF", help="A unified diff; - reads stdin.")],
    run: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the new run.")],
    repository: Annotated[
        Path, typer.Option(metavar="DIR", help="The repository to change.")
    ] = Path(),
    base: Annotated[str, typer.Option(metavar="COMMIT", help="What it applies to.")] = "HEAD",
    purpose: Annotated[str, typer.Option(help="One line for the commit.")] = "",
    json: options.Json = False,
) -> Answer:
    """Check a diff against what a patch may touch, and keep it. Nothing is changed.

    Exit 0 allowed, 1 refused.
    """
    from ...kernels.errors import UsageError
    from ..patch import propose_patch

    try:
        content = sys.stdin.buffer.read() if str(diff) == "-" else diff.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {diff}: {error.strerror}; give a unified diff") from error
    text = content.decode("utf-8", errors="replace")
    report = propose_patch(repository, text, run=run, purpose=purpose, base=base)
    return _answer(report)


@command
def apply(
    run: Run,
    gates: Annotated[
        Path, typer.Option(metavar="RUN", help="Gate report whose green gates must stay green.")
    ],
    repro: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Repro that must turn from mismatch to equal."),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE=ID", help="A kernel of the patch and its contract."),
    ] = None,
    reviewed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID", help="A new contract, or a changed file in kernels/, that you accept."
        ),
    ] = None,
    quick: options.Quick = False,
    json: options.Json = False,
) -> Answer:
    """Try the patch in a worktree: admitted as one commit on a branch of its own, or undone.

    Without --repro it must bring a verified kernel that is faster. Exit 0 admitted, 1 refused, 3
    everything is green and a new contract, or a change of the project's own code, waits for a
    person, who then repeats it with --reviewed.
    """
    from ...kernels.errors import UsageError
    from ..patch import apply_patch
    from .recipe_pr import ask_person

    ask_person(reviewed or [])

    pairs = [entry.partition("=") for entry in kernel or ()]
    if any(not path or not contract for path, _, contract in pairs):
        raise UsageError("--kernel takes FILE=CONTRACT; correct it")
    with stages() as progress:
        report = apply_patch(
            run,
            repro=repro,
            kernels=[(path, contract) for path, _, contract in pairs],
            gates=gates,
            reviewed=reviewed or (),
            quick=quick,
            progress=progress,
        )
    return _answer(report)


@command
def revert(run: Run, json: options.Json = False) -> Answer:
    """Remove a patch's branch and worktree, also after a crash."""
    from ..patch import revert_patch

    return _answer(revert_patch(run))


@command
def draft(
    model: options.Model,
    folder: Annotated[
        Path, typer.Argument(metavar="DRAFT", help="A folder with kernels/ and no recipe.yaml.")
    ],
    only: Annotated[
        str | None, typer.Option(metavar="GATES", help="Gates to hold it to; default: five.")
    ] = None,
    dtype: options.Dtype = "float32",
    seed: options.Seed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> Answer:
    """Make a draft's kernels a recipe, and the recipe a patch: the whole way, in one call.

    The run's folder gets a git repository of its own whose first commit is the model as the
    framework runs it, a repro and a gate report of that state, the recipe (proved), and the patch.
    Exit 0 admitted (next: `zm recipe pr` with the patch's run), 1 refused, 3 everything is green
    and a new contract waits for a person, who repeats `zm patch apply` with --reviewed.
    """
    import shutil

    from ...kernels.errors import UsageError
    from ..drivers.admission import judgement
    from ..drivers.workbench import GATES, Workbench
    from .measure import new_folder

    files = sorted((folder / "kernels").glob("*.py"))
    if not files or (folder / "recipe.yaml").exists():
        raise UsageError(f"{folder} is no draft; give one with kernels/*.py and no recipe.yaml")
    run = out or new_folder("draft")
    names = GATES if only is None else [name.strip().upper() for name in only.split(",")]
    bench = Workbench(model, run, dtype=dtype, seed=seed, gates=names)
    (bench.draft / "kernels").mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(file, bench.draft / "kernels")
    with stages() as progress:
        bench.admission.progress = progress
        report = bench.admission.admit()
    told = judgement(report, bench.admission.last_gates())
    answer = _answer(report)
    place = bench.admission.run_folder()
    more = f"Run of the patch: {place}. Gates: {told.green} of {told.of} green."
    if report.status == "waiting":
        more += f" For a person: {bench.admission.tick_command()}"
    code = answer.exit_code or int(not told.passed)
    return Answer(document=report, text=[*answer.text, more], exit_code=code)


def _answer(report: "PatchReport") -> Answer:
    text: list[object] = []
    if report.files:
        rows = [[f.path, f.change, f"+{f.added} -{f.removed}"] for f in report.files]
        text.append(table(["file", "change", "lines"], rows))
    if report.checks:
        rows = [[check.name, check.status, check.detail] for check in report.checks]
        text.append(table(["condition", "result", "found"], rows))
    text += [
        f"refused: {entry.rule}: {f'{entry.path}: ' if entry.path else ''}{entry.detail}"
        for entry in report.refusals
    ]
    text += [f"for a person: {entry}" for entry in report.needs_review]
    text.append(f"{report.status.upper()}: {report.reason}")
    return Answer(document=report, text=text, exit_code=report.exit_code)
