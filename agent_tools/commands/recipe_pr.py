"""``zm recipe pr``, ``zm recipe tick``: a branch and a text for the reviewer, and his consent."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .answer import Answer, command
from .project import recipes


def register(app: typer.Typer) -> None:
    """Add these commands to ``zm recipe``."""
    recipes.command("pr")(pr)
    recipes.command("tick")(tick)


@command
def pr(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A recipe's folder, or an admitted patch's run.")
    ],
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
        Path | None,
        typer.Option(metavar="FILE", help="The text, or a folder; default: beside the recipe."),
    ] = None,
    json: options.Json = False,
) -> Answer:
    """Put a recipe on a branch of its own and write the text of a pull request. Never pushes."""
    from ..recipe_pr import make_pr

    if out is not None and out.suffix != ".md":
        out = out / "PR.md"
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


@command
def tick(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A recipe's folder.")],
    contract: Annotated[
        str, typer.Argument(metavar="ID", help="The new contract that you accept.")
    ],
    by: Annotated[str, typer.Option(help="Who accepts it, for ticks.yaml.")] = "a person",
    json: options.Json = False,
) -> Answer:
    """Accept a contract that a recipe's kernel brings, for that very file. For people only.

    Read the kernel first: formula, order and rounding are yours to accept. Asks at the terminal.
    """
    from ...model_recipes import ticks

    ask_person([contract])
    made = ticks.tick(folder, contract, by=by)
    text: list[object] = [f"{made.contract} is ticked for {made.digest} in {folder / ticks.FILE}."]
    return Answer(document=made.model_dump(), text=text)


def ask_person(contracts: list[str]) -> None:
    """Have each id typed at a terminal; UsageError where nobody sits there, or it is another."""
    from ...kernels.errors import UsageError

    if contracts and not sys.stdin.isatty():
        raise UsageError(
            "a new contract is ticked by a person at a terminal, and there is none here; ask one"
        )
    for contract in contracts:
        print(f"Type the id of the contract that you have read and accept ({contract}):",
              file=sys.stderr)  # fmt: skip
        if input().strip() != contract:
            raise UsageError(f"that is not {contract}; nothing was ticked")
