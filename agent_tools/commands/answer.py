"""What a command hands back: a document for programs, a text for people, an exit code for shells.

Commands never print to stdout. :func:`write` prints the one or the other at the very end, so that
``--json`` means exactly one document there; progress and remarks go to stderr.
"""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TextIO

from ...kernels.errors import ZeroMismatchError

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
WIDTH_WITHOUT_TERMINAL = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of one command.

    document: a pydantic model or plain data, for ``--json``.
    text: what to print for a person: strings and rich renderables, in order.
    exit_code: 0 equal or passed, 1 divergent or failed, 4 something required is missing.
    error: what went wrong, with the next step, where there is no answer.

        Answer(document={"contracts": []}, text=["no contract is registered"])
    """

    document: Any
    text: list[Any] = field(default_factory=list[Any])
    exit_code: int = 0
    error: str | None = None


class Verbatim(str):
    """A text that is printed as it is, without wrapping or expanded tabs: a file's."""

    __slots__ = ()


def command(function: Callable[P, Answer]) -> Callable[P, Answer]:
    """Make a function a command: while it runs, whatever prints to stdout prints to stderr."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Answer:
        with contextlib.redirect_stdout(sys.stderr):
            return function(*args, **kwargs)

    return run


def write(answer: Answer, *, as_json: bool) -> None:
    """Print the answer on stdout; a reader that has gone away (``| head``) is no error."""
    text = json_text(answer.document) + "\n" if as_json else plain_text(answer.text)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plain_text(parts: list[Any]) -> str:
    """The text of an answer as it will appear on stdout, colours included where they are wanted."""
    console = text_console(sys.stdout)
    told: list[str] = []
    for part in parts:
        if isinstance(part, Verbatim):
            told.append(part)
            continue
        with console.capture() as captured:
            console.print(part)
        told.append(captured.get())
    return "".join(told)


def error_answer(error: Exception, exit_code: int) -> Answer:
    """What went wrong, as an answer: a document and an exit code, and a line on stderr."""
    print(f"zm: {error}", file=sys.stderr)
    kind = type(error).__name__ if isinstance(error, ZeroMismatchError) else "Error"
    found = {"type": kind, "message": str(error), "exit_code": exit_code}
    return Answer(document={"error": found}, exit_code=exit_code, error=str(error))


def as_document(document: Any) -> dict[str, Any]:
    """Plain data with ``schema_version`` first; NaN and infinities become null."""
    from pydantic_core import to_json

    return {"schema_version": 1, **json.loads(to_json(document, inf_nan_mode="null"))}


def json_text(document: Any) -> str:
    """One JSON document, as ``--json`` prints it."""
    return json.dumps(as_document(document), indent=2, ensure_ascii=False)


def text_console(stream: TextIO) -> "Console":
    """A console that colours only terminals and honours NO_COLOR."""
    from rich.console import Console

    width = None if stream.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def table(columns: list[str], rows: list[list[str]], title: str | None = None) -> Any:
    """A plain table; every cell is text, never markup."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    built = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for column in columns:
        built.add_column(Text(column), overflow="fold")
    for row in rows:
        built.add_row(*[Text(cell) for cell in row])
    return built
