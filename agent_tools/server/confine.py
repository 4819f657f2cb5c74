"""Which paths an agent may name: those inside the workspace, and for output those below ``runs/``.

Every string is checked before a job exists. Symbolic links are followed first, so that a link out
of the workspace is outside. Files that a model wrote are data; nothing here makes one a command.

    confined(OPERATIONS["repro"], {"divergence": "../elsewhere"}, Path.cwd())     # UsageError
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcp.shared.path_security import PathEscapeError, safe_join

from ...kernels.errors import UsageError
from ..drafts import DRAFTS
from ..jobs.operations import Operation
from ..jobs.store import JOBS

PLACES = ("model", "plan")
"""Texts that may be the name of a folder or file."""
SIDES = ("left", "right")
TASK = "task"
FILE_PAIRS = "kernel"
"""A list of FILE=ID."""
READ_AS_DRAFTS = ("file", "diff", "folder", "plan")
"""Paths whose files are judged before they are used. A repro or a gate report that an agent wrote
itself would judge its own patch."""
BUILT_HERE = "tiny:"
CODE = "code:"
"""Runs the modelling code in a folder, which therefore has to be the person's own."""


def confined(operation: Operation, arguments: Mapping[str, Any], workspace: Path) -> dict[str, Any]:
    """The arguments with every path made relative to the workspace; UsageError if one leaves it."""
    paths = operation.path_parameters()
    checked: dict[str, Any] = {}
    for name, value in arguments.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and name not in operation.texts:
                check_text(name, text)
        if isinstance(value, str) and name in paths:
            value = inside(workspace, value, writing=name in operation.outputs)
            drafted = Path(value).parts[: len(DRAFTS.parts)] == DRAFTS.parts
            if drafted and name not in (*READ_AS_DRAFTS, *operation.outputs):
                raise UsageError(
                    f"{name} lies in {DRAFTS}/, where drafts are; name what a tool of zm wrote "
                    "elsewhere"
                )
        elif isinstance(value, str) and name in PLACES and not value.startswith(BUILT_HERE):
            prefix = CODE if value.startswith(CODE) else ""
            place = value.removeprefix(prefix)
            relative = inside(workspace, place)
            if prefix and Path(relative).parts[:1] == JOBS.parts[:1]:
                raise UsageError(
                    f"{value[:200]!r} would run code from a folder that tools write to; a person "
                    "has to move the model out of runs/ first"
                )
            value = prefix + (relative if Path(place).is_absolute() else place)
        elif isinstance(value, str) and name == TASK and ":" in value:
            raise UsageError(
                f"{value[:200]!r} would run a function of somebody's module; use even, gym/DATASET "
                "or tool/DATASET, or ask a person to run it"
            )
        elif isinstance(value, str) and name in SIDES:
            _, colon, schedule = value.partition(":")
            if colon and schedule:
                inside(workspace, schedule)
        elif isinstance(value, list) and name == FILE_PAIRS:
            for pair in value:
                inside(workspace, str(pair).partition("=")[0])
        checked[name] = value
    return checked


def check_text(name: str, text: str) -> None:
    """No control characters: they hide text from people and split lines of logs."""
    if not text.isprintable():
        raise UsageError(f"{name} holds control characters ({text[:80]!r}); leave them out")


def inside(workspace: Path, text: str, *, writing: bool = False) -> str:
    """``text`` as a path relative to the workspace, links followed."""
    root = workspace.resolve()
    path = Path(text)
    try:
        if text.startswith("~"):
            raise PathEscapeError("a home folder")
        given = str(path.relative_to(root)) if path.is_relative_to(root) else text
        target = safe_join(root, given)
        if target.exists() and not (target.is_file() or target.is_dir()):
            raise PathEscapeError("a pipe or a device")
        relative = target.relative_to(root)
    except (PathEscapeError, OSError, RuntimeError) as error:
        raise UsageError(
            f"{text[:200]!r} is no file or folder of the workspace; name one inside it, relative "
            "to its root"
        ) from error
    if writing and (relative.parts[:1] != JOBS.parts[:1] or len(relative.parts) < 2):
        raise UsageError(f"{text[:200]!r} is no place for output; name one below runs/")
    if writing and relative.parts[:2] == JOBS.parts:
        raise UsageError(f"{text[:200]!r} belongs to the jobs; name another folder below runs/")
    return str(relative)
