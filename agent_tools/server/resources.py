"""What an agent may read: runs, reports, traces, logs and playbooks, a bounded page at a time.

    run://{run}                    a run's files and verdict
    report://{run}{?at,offset}     the document behind its page, by JSON pointer
    trace://{run}/{side}           what a stored trace is about (rows: the tool ``trace``)
    job://{job}                    a job as it stands
    job://{job}/log{?offset}       its log; without an offset the end of it
    playbook://{name}              what to do about a cause

Only files that ``zm`` wrote, found by name; a resource is no way to read another file. Prompts are
the playbooks again, where a client's user picks one.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ResourceNotFoundError
from mcp.server.mcpserver.prompts import Prompt
from mcp.server.mcpserver.resources import ResourceSecurity

from ...kernels.errors import UsageError, ZeroMismatchError
from ..jobs import runs
from ..jobs.paging import bounded, page
from ..jobs.store import Store
from ..playbooks import names, render

MAX_DOCUMENT = 50_000_000
MAX_HEAD = 64_000_000
PAGE = 50
SIDES = ("left", "right")
JSON = "application/json"


def add_resources(server: MCPServer, store: Store) -> None:
    """Register the resources of one workspace, and its prompts."""
    workspace = store.workspace

    def run(run: str) -> str:
        """A run's verdict and files."""
        folder = runs.run_folder(workspace, run)
        return _text(runs.entry(folder).model_dump(mode="json"))

    def report(run: str, at: str = "", offset: int = 0) -> str:
        """The document behind a run's report: its verdict, culprits, claims, commands."""
        folder = runs.run_folder(workspace, run)
        return _text(_document(folder, at, max(0, offset)))

    def trace(run: str, side: str) -> str:
        """What a stored trace is about: engine, plan, schedule, sites, requests."""
        folder = runs.run_folder(workspace, run)
        if side not in SIDES:
            raise UsageError(f"a run has no side {side[:80]!r}; use left or right")
        found = _read(folder / side / "meta.json", MAX_HEAD)
        return _text({name: _counted(value) for name, value in found.items()})

    def job(job: str) -> str:
        """A job as it stands."""
        return _text(store.read(job).model_dump(mode="json"))

    def log(job: str, offset: int = -1) -> str:
        """A job's log from an offset, or its end; the last line says where to read on."""
        text, following = store.log(job, offset)
        return f"{text}\n[read on at offset {following}]"

    def playbook(name: str) -> str:
        """What to do about one cause: symptom, probe, cause, fix, price."""
        return render(name)

    for template, function, kind in (
        ("run://{run}", run, JSON),
        ("report://{run}{?at,offset}", report, JSON),
        ("trace://{run}/{side}", trace, JSON),
        ("job://{job}", job, JSON),
        ("job://{job}/log{?offset}", log, "text/plain"),
        ("playbook://{name}", playbook, "text/markdown"),
    ):
        pointers = ResourceSecurity(exempt_params={"at"})  # a JSON pointer looks like a path
        server.resource(template, mime_type=kind, security=pointers)(_found(function))
    for name in names():
        title = name.replace("-", " ").capitalize()
        read = _reader(name)
        told = f"Playbook on {name.replace('-', ' ')}: symptom, probe, cause, fix, price."
        server.resource(
            f"playbook://{name}", name=name, title=title, description=told,
            mime_type="text/markdown",
        )(read)  # fmt: skip
        server.add_prompt(Prompt.from_function(read, name=name, title=title, description=told))


def _reader(name: str) -> Callable[[], str]:
    def read() -> str:
        return render(name)

    return read


def _found(function: Callable[..., str]) -> Callable[..., str]:
    """The same function, its errors as the SDK wants them: with their text."""

    @functools.wraps(function)
    def read(*args: Any, **kwargs: Any) -> str:
        try:
            return function(*args, **kwargs)
        except ZeroMismatchError as error:
            raise ResourceNotFoundError(str(error)) from error

    return read


def _document(folder: Path, at: str, offset: int) -> Any:
    for name in runs.DOCUMENTS:
        if runs.is_own(folder / name):
            document = _read(folder / name, MAX_DOCUMENT)
            if at or offset:
                return page(document, at, offset, PAGE).model_dump(mode="json")
            shown, cuts = bounded(document)
            return {**shown, "cut": [cut.model_dump() for cut in cuts]}
    raise UsageError(f"run {folder.name} has no document; run://{folder.name} lists its files")


def _read(path: Path, limit: int) -> dict[str, Any]:
    if not runs.is_own(path):
        raise UsageError(f"this run has no {path.parent.name}/{path.name}; see list_runs")
    if path.stat().st_size > limit:
        raise UsageError(f"{path.name} of this run is too long to read here; open it yourself")
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path.name} of this run is damaged ({error}); run it again") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path.name} of this run is no document of zm; run it again")
    return found


def _counted(value: Any) -> Any:
    """A table as its size, since a trace's are long."""
    if isinstance(value, list) and len(value) > PAGE:
        return {"entries": len(value), "first": bounded(value[:3])[0]}
    return bounded(value)[0]


def _text(document: Any) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False)
