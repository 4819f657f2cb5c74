"""What the tools that read back answer: jobs, pages of results, runs, pages of traces.

Page(job="localize-3f0c2a9d1b77", at="/culprits", total=211, offset=20, shown=20, value=[...])
"""

import json
from typing import Literal

from pydantic import JsonValue

from ..records import Record
from .store import Job


class Cut(Record):
    """A part that was too long to show whole.

    Cut(at="/culprits", shown=20, of=211)
    """

    at: str
    shown: int
    of: int


class Page(Record):
    """A part of a job's document: ``shown`` of its ``total`` entries, from ``offset``."""

    schema_version: Literal[1] = 1
    kind: Literal["page"] = "page"
    job: str
    at: str
    total: int
    offset: int
    shown: int
    value: JsonValue
    cut: tuple[Cut, ...] = ()

    @property
    def text(self) -> str:
        """The value for a person."""
        return json.dumps(self.value, indent=2, ensure_ascii=False)


class Jobs(Record):
    """Jobs, the newest first."""

    schema_version: Literal[1] = 1
    kind: Literal["jobs"] = "jobs"
    total: int
    offset: int
    jobs: tuple[Job, ...]


class RunEntry(Record):
    """A folder under ``runs/``. ``verdict``: what its newest document says.

    RunEntry(run="localize-3f0c2a9d1b77", verdict="DIVERGENT", title="tiny:llama: ...",
             files=("divergence.json", "report.html"), modified="2026-01-01T00:00:00+00:00")
    """

    run: str
    verdict: str
    title: str
    files: tuple[str, ...]
    modified: str


class Runs(Record):
    """What was run in a workspace, the newest first."""

    schema_version: Literal[1] = 1
    kind: Literal["runs"] = "runs"
    total: int
    offset: int
    runs: tuple[RunEntry, ...]


class TraceRow(Record):
    """One digest: which row of which call, which value (``out`` or ``in:<name>``)."""

    request: str
    position: int
    call: int
    slot: str
    dtype: str
    digest: str


class TracePage(Record):
    """A part of a trace: names of sites, or the rows of one site."""

    schema_version: Literal[1] = 1
    kind: Literal["trace-page"] = "trace-page"
    run: str
    engine: str
    plan: str
    requests: int
    steps: int
    samples: int
    site: str | None
    total: int
    offset: int
    sites: tuple[str, ...] = ()
    rows: tuple[TraceRow, ...] = ()
