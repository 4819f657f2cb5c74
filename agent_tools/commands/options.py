"""Options that several commands share, so that they are spelled and explained once."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a cached hub id, `smollm2-135m`, or `tiny:MODEL_TYPE` (built here).",
        show_default=False,
    ),
]
Plan = Annotated[
    str,
    typer.Option(help="`stock`, `aligned`, or a recipe folder or file."),
]
Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Weights and activations.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Seed = Annotated[int, typer.Option(help="Seeds tiny models and sampling.", min=0)]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter inputs; same questions.")]
Prompts = Annotated[
    Path | None,
    typer.Option(help="Prompts, one a line, text or JSON; default: ours.", metavar="FILE"),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder to write to.", metavar="DIR"),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="One JSON document on stdout; the rest goes to stderr."),
]
