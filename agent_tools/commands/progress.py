"""Progress of long work, on stderr: a bar where the length is known, otherwise the stage.

    with bar("fetching") as progress:
        progress(3, 10, "layer 3")
    with stages() as progress:
        progress("left: paged:mixed")
"""

import contextlib
import sys
from collections.abc import Callable, Generator

Report = Callable[[int, int, str], None]
"""``report(done, total, what)``."""


@contextlib.contextmanager
def bar(title: str) -> Generator[Report]:
    """A bar that a long function can move; prints nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}", markup=False),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}", markup=False),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task(title, total=None, what="")

        def report(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, what=what)

        yield report


@contextlib.contextmanager
def stages() -> Generator[Callable[[str], None]]:
    """Tell which stage is running: a spinner in a terminal, a line each elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield lambda stage: print(f"zm: {stage}", file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield lambda stage: status.update(Text(stage))
