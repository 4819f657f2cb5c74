"""``zm recipe pr``: a branch and a text for the reviewer; nothing is pushed."""

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .answer import Answer, command
from .project import recipes


def register(app: typer.Typer) -> None:
    """Add this command to ``zm recipe``."""
    recipes.command("pr")(pr)


@command
def pr(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A recipe's folder.")],
    gates: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="A run of `zm gate` with this recipe, or its gates.json."),
    ] = None,
    branch: Annotated[str | None, typer.Option(help="Name of the branch to make.")] = None,
    repository: Annotated[
        Path, typer.Option(metavar="DIR", help="The repository that gets the branch.")
    ] = Path(),
    driver: Annotated[str, typer.Option(help="Who made the recipe, for the text.")] = "autopilot",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The text; default: beside the recipe.")
    ] = None,
    json: options.Json = False,
) -> Answer:
    """Put a recipe on a branch of its own and write the text of a pull request. Never pushes."""
    from ..recipe_pr import make_pr

    found = make_pr(
        folder, repository=repository, gates=gates, driver=driver, out=out, branch=branch
    )
    text: list[object] = [
        f"Branch {found.branch}: {len(found.commits)} commits, {len(found.files)} files.",
        f"Text: {found.body}",
        "Nothing was pushed." if found.gates == "pass" else
        f"Nothing was pushed. Gates: {found.gates}; the text says so in its first lines.",
    ]  # fmt: skip
    return Answer(document=found, text=text)
