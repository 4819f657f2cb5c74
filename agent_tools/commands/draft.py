"""``zm draft write``: for an agent that can call tools and cannot write files."""

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .answer import Answer, command

drafts = typer.Typer(help="Files that an agent writes, below runs/drafts/.")


def register(app: typer.Typer) -> None:
    """Add this command to ``zm``."""
    drafts.command()(write)
    drafts.callback()(_group)
    app.add_typer(drafts, name="draft")


def _group() -> None:
    """Files that an agent writes, below runs/drafts/."""


@command
def write(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="runs/drafts/NAME.py, or NAME.diff; folders are made."),
    ],
    text: Annotated[
        str, typer.Option(metavar="TEXT", help="The whole file: a kernel, or a unified diff.")
    ],
    json: options.Json = False,
) -> Answer:
    """Write a kernel or a diff below runs/drafts/, and say its digest. Nothing is run.

    Next: `zm verify` a kernel, `zm patch propose` a diff. Kernels in runs/drafts/NAME/kernels/ make
    runs/drafts/NAME a draft folder, for --plan and `zm patch draft`.
    """
    from ..drafts import write_draft

    found = write_draft(Path(), file, text)
    line = f"{found.file}, {found.bytes:,} bytes, digest {found.digest}"
    return Answer(document=found, text=[line])
