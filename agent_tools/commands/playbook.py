"""``zm playbook``: what to do about a cause."""

from typing import Annotated

import typer

from . import options
from .answer import Answer, command, table


def register(app: typer.Typer) -> None:
    """Add this command to ``zm``."""
    app.command()(playbook)


@command
def playbook(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A page; default: list them.")
    ] = None,
    json: options.Json = False,
) -> Answer:
    """Print what to do about a cause: symptom, probe, cause, fix that keeps the bits, price."""
    from ..playbooks import names, page

    if name is not None:
        found = page(name)
        document = {"name": found.name, "title": found.title, "text": found.text}
        return Answer(document=document, text=[found.text])
    pages = [page(each) for each in names()]
    listed = [{"name": each.name, "title": each.title} for each in pages]
    rows = [[each.name, each.title] for each in pages]
    return Answer(document={"playbooks": listed}, text=[table(["playbook", "about"], rows)])
