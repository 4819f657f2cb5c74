"""From an operation to a tool: arguments in, a job, its answer out, bounded and typed.

What a client gets is the document that ``zm ... --json`` prints, with one entry more, ``call``: the
job, the exit code and what it means, the folder that was written, and which parts were too long to
show (``job_result`` reads them page by page). The text beside it is what ``zm`` prints.

Left out: the work itself; a call that is cancelled ends its job, one whose server dies does not.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.server.mcpserver.utilities.func_metadata import ArgModelBase, FuncMetadata
from mcp.types import CallToolResult, ResourceLink, TextContent, ToolAnnotations
from pydantic import ConfigDict, Field, ValidationError, create_model

from ...kernels.errors import ZeroMismatchError
from ..cli import attempt
from ..commands.answer import Answer, as_document, plain_text
from ..commands.job import job_text
from ..jobs.operations import MAX_TEXT, OPERATIONS, Operation, Parameters
from ..jobs.paging import bounded
from ..jobs.results import Cut
from ..jobs.store import Job, Result, Store
from .confine import check_text, confined

SCHEMAS = Path(__file__).with_name("schemas.json")
MAX_SHOWN = 16_000
POLL_SECONDS = 0.1
MEANINGS = {
    0: "equal or passed",
    1: "divergent or failed",
    3: "inconclusive or misaligned",
    4: "something is missing here",
}
JOBS_OF = tuple(name for name, each in OPERATIONS.items() if not each.direct)
Key = Annotated[
    str,
    Field(
        min_length=1, max_length=200,
        description="Your name for this job: the same key gives the same job, never a second one.",
    ),
]  # fmt: skip
JOB_START: Parameters = {
    "tool": (Literal[JOBS_OF], ...),  # type: ignore[valid-type]
    "arguments": (
        dict[str, Any],
        Field(default_factory=dict, description="What you would call that tool with."),
    ),
    "key": (Key, ...),
}
JOB_STATUS: Parameters = {
    "job": (Annotated[str, Field(description="A job's id.", max_length=MAX_TEXT)], ...),
    "wait_seconds": (
        Annotated[float, Field(ge=0, le=55, description="Wait at most so long for its end.")], 0.0,
    ),
}  # fmt: skip
LOG_LINES = 15
MAX_PROBLEMS = 8
FOLLOWING = {
    "queued": "job_status again",
    "running": "job_status again",
    "done": "job_result",
    "died": "job_start with the same key",
}


class Arguments(ArgModelBase):
    """Arguments of a tool; unknown ones are refused, not dropped."""

    model_config = ConfigDict(extra="forbid")


def tools(store: Store) -> list[Tool]:
    """All tools on one workspace."""
    schemas = json.loads(SCHEMAS.read_text())
    made = [_operation_tool(each, store, schemas[each.name]) for each in OPERATIONS.values()]
    start = functools.partial(job_start, store)
    status = functools.partial(job_status, store)
    writes = ToolAnnotations(read_only_hint=False, idempotent_hint=True, open_world_hint=False)
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    return [
        *made,
        _tool("job_start", "Start a long call that survives", start, JOB_START, schemas, writes),
        _tool("job_status", "How a job is getting on", status, JOB_STATUS, schemas, reads),
    ]


def _operation_tool(operation: Operation, store: Store, schema: dict[str, Any]) -> Tool:
    safe = operation.read_only and not operation.folder
    annotations = ToolAnnotations(
        read_only_hint=safe, destructive_hint=operation.destructive, idempotent_hint=safe,
        open_world_hint=False,
    )  # fmt: skip
    return _tool(
        operation.name, operation.title, functools.partial(call, store, operation),
        operation.parameters(), {operation.name: schema}, annotations, operation.description(),
    )  # fmt: skip


def _tool(
    name: str,
    title: str,
    function: Any,
    parameters: Parameters,
    schemas: Mapping[str, Any],
    annotations: ToolAnnotations,
    description: str | None = None,
) -> Tool:
    model = create_model(f"{name}Arguments", __base__=Arguments, **parameters)  # type: ignore[call-overload]
    return Tool(
        fn=function, name=name, title=title,
        description=description or function.func.__doc__,
        parameters=model.model_json_schema(), is_async=True, context_kwarg="ctx",
        fn_metadata=FuncMetadata(arg_model=model, output_schema=schemas[name]),
        annotations=annotations,
    )  # fmt: skip


async def call(store: Store, operation: Operation, *, ctx: Context, **given: Any) -> CallToolResult:
    """Run one operation and answer as ``zm`` would; errors come with their next step."""
    try:
        arguments = confined(operation, given, store.workspace)
        if operation.direct:
            return await _directly(operation, arguments)
        job = await _in_thread(functools.partial(_start, store, operation, arguments))
        job = await _until_over(store, job, ctx)
        result = await _in_thread(functools.partial(store.result, job.id))
    except ZeroMismatchError as error:
        raise ToolError(str(error)) from error
    return _answer(result, job, operation)


async def _directly(operation: Operation, arguments: Mapping[str, Any]) -> CallToolResult:
    def work() -> Result:
        answer = attempt(functools.partial(operation.run, arguments))
        assert isinstance(answer, Answer)
        return Result(
            document=as_document(answer.document), text=plain_text(answer.text),
            exit_code=answer.exit_code, error=answer.error,
        )  # fmt: skip

    return _answer(await _in_thread(work), None, operation)


def _start(
    store: Store, operation: Operation, arguments: Mapping[str, Any], key: str | None = None
) -> Job:
    return store.start(
        operation.name, arguments, key=key, slot=not operation.quick,
        limit_seconds=operation.limit_seconds, out="out" if operation.folder else None,
    )  # fmt: skip


async def _until_over(store: Store, job: Job, ctx: Context) -> Job:
    """Wait for a job and tell its stages; when the call is cancelled, so is the job."""
    told, count = "", 0
    try:
        while not job.over:
            await anyio.sleep(POLL_SECONDS)
            job = await _in_thread(functools.partial(store.read, job.id))
            if job.stage != told:
                told, count = job.stage, count + 1
                await ctx.report_progress(count, None, told)
    except anyio.get_cancelled_exc_class():
        store.cancel(job.id, seconds=0)
        raise
    return job


async def _in_thread(work: Any) -> Any:
    return await anyio.to_thread.run_sync(work)


def _answer(result: Result, job: Job | None, operation: Operation) -> CallToolResult:
    if result.error is not None:
        raise ToolError(result.error)
    document, cuts = bounded(result.document)
    folder = job.arguments.get("out") if job is not None and operation.folder else None
    about = {
        "job": None if job is None else job.id,
        "exit_code": result.exit_code,
        "meaning": MEANINGS.get(result.exit_code, "see the text"),
        "folder": folder,
        "cut": [cut.model_dump() for cut in cuts],
    }
    text = result.text[:MAX_SHOWN]
    if len(result.text) > MAX_SHOWN:
        text += f"\n[{len(result.text) - MAX_SHOWN:,} characters left out]"
    links = [] if job is None else [_link(f"job://{job.id}/log", "log")]
    if folder is not None:
        links.append(_link(f"run://{Path(folder).name}", "files"))
    return CallToolResult(
        content=[TextContent(type="text", text=text + _epilogue(job, folder, cuts)), *links],
        structured_content={**document, "call": about},
    )


def _epilogue(job: Job | None, folder: str | None, cuts: tuple[Cut, ...]) -> str:
    lines = [] if folder is None else [f"Written to {folder}."]
    if job is not None:
        lines += [
            f"{cut.shown} of {cut.of} shown at {cut.at or 'the top'}: read on with job_result "
            f"(job {job.id}, at {cut.at!r}, offset {cut.shown})."
            for cut in cuts
        ]
    elif cuts:
        lines.append("Shortened: ask with a smaller limit.")
    return "".join(f"\n{line}" for line in lines)


def _link(uri: str, name: str) -> ResourceLink:
    return ResourceLink(type="resource_link", uri=uri, name=name)


async def job_start(
    store: Store, *, ctx: Context, tool: str, arguments: dict[str, Any], key: str
) -> CallToolResult:
    """Start a tool's call as a job and return at once; it goes on if this server ends.

    Use it for align, gate and recipe_verify. Then job_status until it is over, then job_result.
    """
    operation = OPERATIONS[tool]
    model = create_model(f"{tool}Arguments", __base__=Arguments, **operation.parameters())  # type: ignore[call-overload]
    try:
        checked = model.model_validate(arguments).model_dump_one_level()
        check_text("key", key)
        asked = confined(operation, checked, store.workspace)
        job = await _in_thread(functools.partial(_start, store, operation, asked, key))
    except ValidationError as error:
        raise ToolError(f"arguments of {tool}: {problems(error)}") from error
    except ZeroMismatchError as error:
        raise ToolError(str(error)) from error
    return _about(job, f"Next: job_status with job {job.id}.")


async def job_status(
    store: Store, *, ctx: Context, job: str, wait_seconds: float
) -> CallToolResult:
    """Say how a job is getting on, waiting for its end if asked to; with the end of its log."""
    try:
        found = await _in_thread(functools.partial(store.read, job))
        with anyio.move_on_after(wait_seconds):
            while not found.over:
                await anyio.sleep(POLL_SECONDS)
                found = await _in_thread(functools.partial(store.read, job))
        log, _ = await _in_thread(functools.partial(store.log, job, -1, 4000))
    except ZeroMismatchError as error:
        raise ToolError(str(error)) from error
    following = FOLLOWING.get(found.state, "job_start with another key")
    tail = "\n".join(log.splitlines()[-LOG_LINES:])
    return _about(found, f"{tail}\nNext: {following}.")


def _about(job: Job, more: str) -> CallToolResult:
    return CallToolResult(
        content=[
            TextContent(type="text", text=f"{job_text(job)}\n{more}"),
            _link(f"job://{job.id}/log", "log"),
        ],
        structured_content=as_document(job),
    )


def problems(error: ValidationError) -> str:
    """What is wrong with the arguments, one part each, without repeating the values."""
    found = [
        f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}"
        for each in error.errors(include_input=False, include_url=False)
    ]
    more = f"; and {len(found) - MAX_PROBLEMS} more" if len(found) > MAX_PROBLEMS else ""
    return "; ".join(part[:200] for part in found[:MAX_PROBLEMS]) + f"{more}. See the tool's schema"
