"""``zm repro`` and ``zm recipe verify``: make a divergence small, and repeat a recipe's claims."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .answer import Answer, command, table
from .progress import stages
from .project import recipes

if TYPE_CHECKING:
    from ..recipe_verify import Verification
    from ..reduction.whole import WholeRepro
    from ..repro import Repro


def register(app: typer.Typer) -> None:
    """Add these commands to ``zm``."""
    app.command()(repro)
    recipes.command()(verify)


@command
def repro(
    divergence: Annotated[
        Path, typer.Argument(help="JSON of `zm localize --json`, or its --out folder.")
    ],
    site: Annotated[
        str | None, typer.Option(help="Which culprit; default: the first.", metavar="SITE")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="A file that runs both engines, for wrong state.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Budget for shrinking.", min=1)] = 60.0,
    plan: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="The recipe's folder, where it was found with one."),
    ] = None,
    prompts: options.Prompts = None,
    seed: options.Seed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> Answer:
    """Write one file with exact inputs that shows a culprit alone, as small as it gets.

    Exit 0 written, 3 nothing that one operator alone would show. The file itself exits 0 equal,
    1 mismatch, 125 unsuitable environment.
    """
    from ..repro import repro_of

    folder = out or Path("repro")
    with stages() as progress:
        found = repro_of(
            divergence, folder, site=site, whole=whole, seconds=seconds, seed=seed,
            prompts=prompts, plan=plan, progress=progress,
        )  # fmt: skip
    return Answer(document=found, text=_repro_text(found, folder))


def _repro_text(found: "Repro | WholeRepro", folder: Path) -> list[object]:
    first = found.first if found.kind == "repro" else None
    where = [] if first is None else [
        f"First at {list(first.coordinate)}: {first.left_bits} against {first.right_bits}"
    ]  # fmt: skip
    size = f"{found.bytes:,} bytes of inputs, " if found.kind == "repro" else ""
    return [
        found.claim,
        *where,
        *[f"  {line}" for line in found.reduced],
        f"{found.status}: {size}{found.tried} cases tried, {found.seconds:.1f} s",
        f"Run it: python {folder / 'repro.py'}",
    ]


@command
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A recipe's folder or file.")],
    json: options.Json = False,
) -> Answer:
    """Repeat every claim of a recipe and compare verdicts, counts and digests.

    Exit 0 all repeat, 1 one does not, 2 a broken or edited recipe or another model, 3 inconclusive.
    """
    from ..recipe_verify import verify_recipe

    with stages() as progress:
        found = verify_recipe(folder, progress=progress)
    return Answer(document=found, text=verify_text(found), exit_code=found.exit_code)


def verify_text(found: "Verification") -> list[object]:
    """One line a claim, then what is different here."""
    rows = [
        [each.claim, each.verdict, f"{each.recorded.compared:,}", f"{each.now.compared:,}",
         "same" if each.recorded.digest == each.now.digest else "other", each.detail]
        for each in found.claims
    ]  # fmt: skip
    columns = ["claim", "repeats", "compared then", "now", "digest", ""]
    return [
        table(columns, rows),
        *[f"changed since: {line}" for line in found.changes],
        f"{found.status.upper()}: {found.reason}",
        f"{found.seconds:.1f} s",
    ]
