"""Tools answer as the command line does, refuse with a next step, and never leave the workspace."""

import json
import os
from pathlib import Path
from typing import Any

import anyio
import pytest
import typer
from mcp import Client

from zeromismatch.agent_tools import cli
from zeromismatch.agent_tools.jobs.operations import OPERATIONS
from zeromismatch.agent_tools.jobs.store import Store
from zeromismatch.agent_tools.server import schemas
from zeromismatch.agent_tools.server.build import ToolServer

from .conftest import PATIENCE, add_run

pytestmark = pytest.mark.anyio


def text_of(answer: Any) -> str:
    return answer.content[0].text


async def test_every_operation_is_a_described_tool(server: ToolServer, era: str):
    async with Client(server, mode=era) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(listed) == {*OPERATIONS, "job_start", "job_status"}
    for tool in listed.values():
        assert len(tool.description) > 20
        assert tool.output_schema["type"] == "object"
        assert tool.input_schema["additionalProperties"] is False
        assert tool.annotations.open_world_hint is False
        assert all("description" in each for each in tool.input_schema["properties"].values()
                   if each.get("title") != "Tool")  # fmt: skip
    assert listed["job_cancel"].annotations.destructive_hint
    assert listed["list_runs"].annotations.read_only_hint
    assert not listed["align"].annotations.read_only_hint


def test_every_command_of_the_design_is_a_tool():
    """All but the server itself, ticks, and what a shell has other words for."""
    group = typer.main.get_command(cli.app)
    found: set[str] = set()
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= {f"{name}_{each}" for each in inner} if inner else {name}
    renamed = {"runs": "list_runs", "job_show": "job_result"}
    tools = {renamed.get(name.replace("-", "_"), name.replace("-", "_")) for name in found}
    assert tools - {"serve", "recipe_tick"} == set(OPERATIONS)


def test_what_only_a_person_may_accept_is_not_offered():
    assert "allow_missing" not in OPERATIONS["verify"].parameters()
    assert "reviewed" not in OPERATIONS["patch_apply"].parameters()
    assert not any("tick" in each.function for each in OPERATIONS.values())
    assert {"config", "resume"} & set(OPERATIONS["train"].parameters()) == set()
    assert set(OPERATIONS["eval_agent"].parameters()) == {"only", "out"}


@pytest.mark.parametrize("tool", ["train", "study"])
async def test_no_task_runs_somebodys_function(server: ToolServer, store: Store, tool: str):
    async with Client(server, mode="legacy") as client:
        given = {"recipe": "r"} if tool == "train" else {"model": "tiny:llama"}
        answer = await client.call_tool(tool, {**given, "task": "os:system"})
        assert answer.is_error
        assert "ask a person" in text_of(answer)
    assert store.list() == []


def test_the_schemas_are_those_of_the_records():
    assert schemas.schemas() == json.loads(schemas.FILE.read_text())


async def test_an_answer_is_the_document_of_the_command_line(
    server: ToolServer, workspace: Path, era: str, capsys: pytest.CaptureFixture[str]
):
    add_run(workspace)
    async with Client(server, mode=era) as client:
        answer = await client.call_tool("list_runs", {"limit": 3})
    assert cli.run(["runs", "--limit", "3", "--json"]) == 0
    document = dict(answer.structured_content)
    call = document.pop("call")
    assert document == json.loads(capsys.readouterr().out)
    assert (call["exit_code"], call["meaning"], call["cut"]) == (0, "equal or passed", [])
    assert "older" in text_of(answer)


async def test_a_tool_of_its_own_process_answers_too(server: ToolServer, workspace: Path, era: str):
    folder = add_run(workspace)
    async with Client(server, mode=era) as client:
        answer = await client.call_tool("report", {"run": "runs/older"})
    assert not answer.is_error
    assert answer.structured_content["verdict"] == "EQUAL"
    assert (folder / "report.html").is_file()
    job = answer.structured_content["call"]["job"]
    assert any(getattr(part, "uri", "") == f"job://{job}/log" for part in answer.content)


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        ("nonsense", {}, "tools/list"),
        ("x" * 100_000, {}, "tools/list"),
        ("inspect", {}, "model: Field required"),
        ("inspect", {"model": ["tiny:llama"]}, "model: Input should be a valid string"),
        ("inspect", {"model": "tiny:llama", "modle": 1}, "modle: Extra inputs"),
        ("inspect", {"model": "tiny:llama", "seed": -1}, "seed: "),
        ("inspect", {"model": "m" * 5000}, "model: String should have at most"),
        ("inspect", {"model": "tiny:llama", "dtype": "float8"}, "dtype: "),
        ("inspect", {"model": "tiny:llama\nzm: all is well"}, "leave them out"),
        ("localize", {"model": "tiny:llama", "left": "paged", "right": "\x1b["}, "leave them out"),
        ("job_result", {"job": "; rm -rf /"}, "zm job list"),
        ("job_status", {"job": "x-000000000000", "wait_seconds": 10_000}, "wait_seconds: "),
        ("job_start", {"tool": "sh", "arguments": {}, "key": "k"}, "tool: "),
        ("job_start", {"tool": "inspect", "arguments": {"mode": 1}, "key": "k"}, "model: Field"),
        ("job_start", {"tool": "inspect", "arguments": {"model": "../x"}, "key": "k"}, "workspace"),
        ("kernels_certify", {"contracts": ["c"] * 1000}, "contracts: "),
        ("playbook", {"name": "../README"}, "use one of"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_said_with_a_next_step(
    server: ToolServer, store: Store, tool: str, arguments: dict[str, Any], told: str, era: str
):
    async with Client(server, mode=era) as client:
        answer = await client.call_tool(tool, arguments)
    assert answer.is_error
    assert told in text_of(answer)
    assert len(text_of(answer)) < 3000
    assert store.list() == []


OUTSIDE = ("../secret.json", "/etc/hostname", "link", "link/secret.json", "a/../../secret.json",
           "~/secret", "pipe", "sub/\0", "C:\\secret", "\\\\host\\share")  # fmt: skip


def calls_with(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Every kind of place where a path can be given."""
    model = {"model": "tiny:llama"}
    return [
        ("inspect", {"model": path}),
        ("repro", {"divergence": path}),
        ("regress", {"report": path}),
        ("recipe_show", {"folder": path}),
        ("trace", {"folder": path}),
        ("report", {"run": path}),
        ("gate", {**model, "plan": path}),
        ("gate", {**model, "junit": path}),
        ("gate", {**model, "prompts": path}),
        ("localize", {**model, "left": f"paged:{path}", "right": "packed"}),
        ("align", {**model, "out": path}),
        ("verify", {"file": path, "contract": "c"}),
        ("patch_propose", {"diff": path, "run": "runs/p"}),
        ("patch_propose", {"diff": "d", "run": "runs/p", "repository": path}),
        ("patch_apply", {"run": "runs/p", "gates": "g", "repro": path}),
        ("patch_apply", {"run": "runs/p", "gates": "g", "kernel": [f"{path}=c"]}),
        ("patch_revert", {"run": path}),
        ("patch_draft", {**model, "folder": path}),
        ("patch_draft", {"model": f"code:{path}", "folder": "d"}),
        ("verify", {"file": "f", "contract": "c", "model": f"code:{path}"}),
        ("recipe_pr", {"folder": path}),
        ("recipe_pr", {"folder": "r", "repository": path}),
        ("train", {"recipe": path}),
        ("eval_agent", {"out": path}),
        ("draft_write", {"file": path, "text": "x"}),
    ]


@pytest.mark.parametrize("path", OUTSIDE)
async def test_a_path_out_of_the_workspace_is_refused(server: ToolServer, store: Store, path: str):
    (store.workspace.parent / "secret.json").write_text("{}")
    (store.workspace / "link").symlink_to(store.workspace.parent)
    os.mkfifo(store.workspace / "pipe")
    async with Client(server, mode="legacy") as client:
        for tool, arguments in calls_with(path):
            answer = await client.call_tool(tool, arguments)
            assert answer.is_error, tool
            assert "workspace" in text_of(answer) or "leave them out" in text_of(answer)
    assert store.list() == []


async def test_output_goes_below_runs_only(server: ToolServer, store: Store):
    async with Client(server, mode="legacy") as client:
        for out in ("agent_tools", "runs", ".", "runs/jobs", "runs/jobs/x-1", ".git"):
            answer = await client.call_tool("align", {"model": "tiny:llama", "out": out})
            assert answer.is_error
            assert "below runs/" in text_of(answer)
    assert store.list() == []


async def test_an_absolute_path_inside_is_the_same_as_a_relative_one(
    server: ToolServer, workspace: Path
):
    add_run(workspace)
    async with Client(server, mode="legacy") as client:
        answer = await client.call_tool("report", {"run": str(workspace / "runs" / "older")})
    assert answer.structured_content["page"] == "runs/older/report.html"


async def test_a_job_is_started_watched_and_read(server: ToolServer, workspace: Path, era: str):
    add_run(workspace)
    asked = {"tool": "report", "arguments": {"run": "runs/older"}, "key": "draw it"}
    async with Client(server, mode=era) as client:
        first = await client.call_tool("job_start", asked)
        again = await client.call_tool("job_start", asked)
        job = first.structured_content["id"]
        assert again.structured_content["id"] == job
        status = await client.call_tool("job_status", {"job": job, "wait_seconds": 55})
        assert status.structured_content["state"] == "done"
        assert "Next: job_result" in text_of(status)
        result = await client.call_tool("job_result", {"job": job, "at": "/verdict"})
        assert result.structured_content["value"] == ["EQUAL"]
        other = {**asked, "arguments": {"run": "runs/other"}}
        refused = await client.call_tool("job_start", other)
        assert refused.is_error
        assert "another key" in text_of(refused)


async def test_thirty_two_calls_at_once_are_all_answered(server: ToolServer, workspace: Path):
    add_run(workspace)
    answers: dict[int, Any] = {}

    async def ask(client: Client, number: int) -> None:
        calls = [("list_runs", {}), ("report", {"run": "runs/older"}), ("job_list", {}),
                 ("playbook", {"name": "day-0"}), ("inspect", {"model": "../x"}),
                 ("list_runs", {"limit": 1}), ("playbook", {}), ("nonsense", {})]  # fmt: skip
        answers[number] = await client.call_tool(*calls[number % len(calls)])

    async with Client(server, mode="legacy") as client:
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as group:
                for number in range(32):
                    group.start_soon(ask, client, number)
    for number, answer in answers.items():
        assert answer.is_error == (number % 8 in (4, 7)), text_of(answer)
    assert [job.state for job in Store(workspace).list()] == ["done"] * 4


async def test_a_cancelled_call_ends_its_job(server: ToolServer, store: Store):
    begun = anyio.Event()
    stages: list[str] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        stages.append(str(message))
        begun.set()

    async def ask(client: Client) -> None:
        asked = {"model": "tiny:llama", "left": "paged:mixed", "right": "packed:packed"}
        await client.call_tool("localize", asked, progress_callback=progress)

    async with Client(server, mode="legacy") as client:
        async with anyio.create_task_group() as group:
            group.start_soon(ask, client)
            with anyio.fail_after(PATIENCE):
                await begun.wait()
            group.cancel_scope.cancel()
        (job,) = store.list()
        ended = await anyio.to_thread.run_sync(lambda: store.wait(job.id, seconds=PATIENCE))
        assert not (await client.call_tool("list_runs", {})).is_error
    assert ended.state == "cancelled"
    assert stages[0].startswith("loading tiny:llama")
