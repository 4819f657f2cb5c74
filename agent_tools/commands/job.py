"""``zm job list / show / cancel``, ``zm runs``, ``zm trace``: what was started, what is here."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .answer import Answer, command, table

if TYPE_CHECKING:
    from ..jobs.store import Job

jobs = typer.Typer(help="Jobs: calls of tools that outlive whoever made them.")
JobId = Annotated[str, typer.Argument(metavar="JOB", help="A job's id.", show_default=False)]
Offset = Annotated[int, typer.Option(help="Leave out this many entries.", min=0)]
Limit = Annotated[int, typer.Option(help="Show at most this many entries.", min=1, max=500)]
At = Annotated[
    str, typer.Option(metavar="POINTER", help="Which part, for instance /culprits or /groups/0.")
]
Wait = Annotated[float, typer.Option(help="Wait at most this many seconds for it.", min=0, max=55)]


def register(app: typer.Typer) -> None:
    """Add these commands to ``zm``."""
    jobs.command("list")(list_jobs)
    jobs.command()(show)
    jobs.command()(cancel)
    app.add_typer(jobs, name="job")
    app.command()(runs)
    app.command()(trace)


@command
def list_jobs(offset: Offset = 0, limit: Limit = 20, json: options.Json = False) -> Answer:
    """List the jobs of this workspace, the newest first."""
    from ..jobs.results import Jobs
    from ..jobs.store import Store

    found = Store(Path()).list()
    shown = found[offset : offset + limit]
    rows = [[job.id, job.state, job.created[:19], job.stage or job.reason] for job in shown]
    return Answer(
        document=Jobs(total=len(found), offset=offset, jobs=tuple(shown)),
        text=[table(["job", "state", "created", "stage"], rows), _of(offset, shown, len(found))],
    )


@command
def show(
    job: JobId,
    at: At = "",
    offset: Offset = 0,
    limit: Limit = 50,
    wait: Wait = 0.0,
    json: options.Json = False,
) -> Answer:
    """Show a job's result, or one page of a part of it that is too long to show at once.

    Exit 3 while it has none.
    """
    from ..jobs.paging import page
    from ..jobs.store import Store

    store = Store(Path())
    store.wait(job, seconds=wait)
    result = store.result(job)
    found = page(result.document, at, offset, limit, job=job)
    return Answer(document=found, text=[result.text] if not at else [found.text])


@command
def cancel(job: JobId, json: options.Json = False) -> Answer:
    """End a job and everything that it started."""
    from ..jobs.store import Store

    found = Store(Path()).cancel(job)
    return Answer(document=found, text=[job_text(found)])


def job_text(job: "Job") -> str:
    """One line about a job."""
    about = " ".join(part for part in (job.reason, f"({job.stage})" if job.stage else "") if part)
    return f"{job.id} is {job.state}" + (f": {about}" if about else "")


@command
def runs(offset: Offset = 0, limit: Limit = 20, json: options.Json = False) -> Answer:
    """List what was run here: folders under runs/, their verdicts and files, the newest first."""
    from ..jobs.runs import list_runs

    found = list_runs(Path(), offset=offset, limit=limit)
    rows = [[run.run, run.verdict, run.title, " ".join(run.files)] for run in found.runs]
    columns = ["run", "verdict", "about", "files"]
    return Answer(document=found, text=[table(columns, rows), _of(offset, found.runs, found.total)])


@command
def trace(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A trace: the folder `left` or `right` of a run.")
    ],
    site: Annotated[
        str | None, typer.Option(metavar="SITE", help="Rows and digests of this operator site.")
    ] = None,
    offset: Offset = 0,
    limit: Limit = 50,
    json: options.Json = False,
) -> Answer:
    """Read a stored trace page by page: its operator sites, or the row digests of one site."""
    from ..jobs.runs import trace_page

    found = trace_page(folder, site=site, offset=offset, limit=limit)
    rows = [
        [row.request, str(row.position), str(row.call), row.slot, row.dtype, row.digest]
        for row in found.rows
    ]
    shown = rows if site else [[each] for each in found.sites]
    columns = ["request", "position", "call", "slot", "dtype", "digest"] if site else ["site"]
    head = f"{found.engine}, {found.requests} requests, plan {found.plan}"
    return Answer(
        document=found, text=[head, table(columns, shown), _of(offset, shown, found.total)]
    )


def _of(offset: int, shown: "list[Job] | tuple[object, ...] | list[list[str]]", total: int) -> str:
    return f"{offset + 1 if shown else offset} to {offset + len(shown)} of {total}"
