"""``zm serve``: the tools for an agent, over the Model Context Protocol."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ...kernels.errors import CapabilityError, UsageError
from .answer import Answer


def register(app: typer.Typer) -> None:
    """Add this command to ``zm``."""
    app.command()(serve)


def serve(
    http: Annotated[
        bool, typer.Option("--http", help="HTTP on loopback with a token, instead of stdio.")
    ] = False,
    port: Annotated[int, typer.Option(help="With --http; 0: any free one.", min=0, max=65535)] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="With --http: holds the token; made if absent. Default: runs/serve.token.",
            metavar="FILE",
        ),
    ] = None,
    workspace: Annotated[
        Path, typer.Option(help="Folder that all paths must stay in.", metavar="DIR")
    ] = Path(),
) -> Answer:
    """Serve the tools to an agent: on stdin and stdout, or with --http on loopback.

    Ends when the client closes stdin, or at an interrupt. Jobs that it started go on.
    """
    if not workspace.is_dir():
        raise UsageError(f"{workspace} is no folder; name one with --workspace")
    try:
        import mcp  # noqa: F401 # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise CapabilityError(
            "the MCP SDK is not installed; run `pip install 'zero-mismatch[agent]'`"
        ) from error
    os.chdir(workspace)
    from ..server import http as over_http
    from ..server.build import build_server

    server = build_server()
    if http:
        over_http.serve(server, port, token_file or Path("runs/serve.token"))
    else:
        server.run()
    return Answer(document={})
