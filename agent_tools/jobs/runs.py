"""What a workspace holds: its runs with their verdicts, and the traces of a run page by page.

    list_runs(Path()).runs[0].verdict          # "DIVERGENT"
    trace_page(Path("runs/7/left"), site="model.norm", offset=0, limit=50).rows

Runs are folders below ``runs/`` that some tool wrote; the folder of the jobs is none.
"""

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels.errors import UsageError
from .results import RunEntry, Runs, TracePage, TraceRow
from .store import JOBS

if TYPE_CHECKING:
    from ..trace import Trace

DOCUMENTS = ("gates.json", "report.json", "divergence.json", "repro.json")
"""What may say how a run ended, the most telling first."""
MAX_DOCUMENT = 20_000_000
MAX_FILES = 12


def list_runs(workspace: Path, *, offset: int = 0, limit: int = 20) -> Runs:
    """The runs of a workspace, the newest first."""
    root = workspace / JOBS.parent
    found = [path for path in root.iterdir() if _is_run(path)] if root.is_dir() else []
    found.sort(key=lambda path: (path.stat().st_mtime, path.name), reverse=True)
    shown = tuple(entry(path) for path in found[offset : offset + limit])
    return Runs(total=len(found), offset=offset, runs=shown)


def run_folder(workspace: Path, run: str) -> Path:
    """The folder of a run; UsageError for a name that is none."""
    folder = workspace / JOBS.parent / run
    if Path(run).name != run or run.startswith(".") or not _is_run(folder):
        raise UsageError(f"there is no run {run[:80]!r} here; `zm runs` names them")
    return folder


def _is_run(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and path.name != JOBS.name


def entry(folder: Path) -> RunEntry:
    """What one run is, from the most telling document in it."""
    files = sorted(path.name for path in folder.iterdir())
    told = [folder / name for name in DOCUMENTS if is_own(folder / name)]
    document = _read(told[0]) if told else {}
    verdict = document.get("verdict") or document.get("status") or ""
    title = document.get("title") or document.get("claim") or document.get("reason") or ""
    modified = datetime.fromtimestamp(folder.stat().st_mtime, UTC)
    return RunEntry(
        run=folder.name, verdict=str(verdict), title=str(title)[:200],
        files=tuple(files[:MAX_FILES]), modified=modified.isoformat(timespec="seconds"),
    )  # fmt: skip


def is_own(path: Path) -> bool:
    """Whether a file of a run is a file: neither a link to somewhere nor a pipe."""
    return path.is_file() and not path.is_symlink() and not path.parent.is_symlink()


def _read(path: Path) -> dict[str, Any]:
    """A document, or nothing where it is no document that could be shown."""
    try:
        found = json.loads(path.read_bytes()) if path.stat().st_size <= MAX_DOCUMENT else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def trace_page(folder: Path, *, site: str | None, offset: int, limit: int) -> TracePage:
    """Names of a trace's sites, or rows of one of them; the whole trace is checked first."""
    from ..trace_store import load_trace

    trace = load_trace(folder)
    if site is not None and site not in trace.sites:
        raise UsageError(f"{folder} has no site {site[:200]!r}; call without a site to list them")
    shown = slice(offset, offset + limit)
    rows = () if site is None else _rows(trace, site, shown)
    return TracePage(
        run=trace.run, engine=trace.engine, plan=trace.plan, requests=len(trace.requests),
        steps=len({int(step) for step in trace.table.step}), samples=len(trace.samples.position),
        site=site, offset=offset,
        total=len(trace.sites) if site is None else _count(trace, site),
        sites=trace.sites[shown] if site is None else (), rows=rows,
    )  # fmt: skip


def _count(trace: "Trace", site: str) -> int:
    return sum(len(column.rows) for key, column in trace.columns.items() if key.site == site)


def _rows(trace: "Trace", site: str, shown: slice) -> tuple[TraceRow, ...]:
    """Rows of a site; only these become records, since a trace may hold millions."""
    left, start = shown.stop - shown.start, shown.start
    found: list[TraceRow] = []
    for key, column in trace.columns.items():
        if key.site != site:
            continue
        part = slice(start, start + left)
        cut = dataclasses.replace(column, rows=column.rows[part], digests=column.digests[part])
        start = max(0, start - len(column.rows))
        left -= len(cut.rows)
        found += [
            TraceRow(
                request=each.request, position=each.position, call=each.call,
                slot=str(each.shard), dtype=each.dtype, digest=each.digest,
            )
            for each in dataclasses.replace(trace, columns={key: cut}).observations()
        ]  # fmt: skip
    return tuple(found)
