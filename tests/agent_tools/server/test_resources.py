"""Resources give bounded pages of what zm wrote, and of nothing else; prompts are the playbooks."""

import json
import os
from pathlib import Path

import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from zeromismatch.agent_tools.playbooks import names, render
from zeromismatch.agent_tools.server.build import ToolServer

from .conftest import add_run

pytestmark = pytest.mark.anyio


async def read(client: Client, uri: str) -> str:
    (content,) = (await client.read_resource(uri)).contents
    return content.text


async def test_playbooks_are_resources_and_prompts(server: ToolServer, era: str):
    async with Client(server, mode=era) as client:
        listed = {str(each.uri) for each in (await client.list_resources()).resources}
        prompts = {each.name for each in (await client.list_prompts()).prompts}
        assert listed == {f"playbook://{name}" for name in names()}
        assert prompts == set(names())
        assert await read(client, "playbook://day-0") == render("day-0")
        prompt = await client.get_prompt("prefix-cache")
        assert prompt.messages[0].content.text == render("prefix-cache")
        with pytest.raises(MCPError, match="prompts/list"):
            await client.get_prompt("nonsense")


async def test_a_run_and_its_report_are_read(server: ToolServer, workspace: Path, era: str):
    folder = add_run(workspace)
    async with Client(server, mode=era) as client:
        assert json.loads(await read(client, "run://older"))["verdict"] == "EQUAL"
        assert json.loads(await read(client, "report://older"))["verdict"] == "EQUAL"
        part = json.loads(await read(client, "report://older?at=/model"))
        assert part["value"] == ["tiny:llama"]
        (folder / "report.json").write_text('{"verdict": "EQ')
        with pytest.raises(MCPError, match="run it again"):
            await read(client, "report://older")


async def test_a_long_report_is_cut_and_read_on(server: ToolServer, workspace: Path):
    folder = add_run(workspace)
    culprits = [{"site": f"s{n}", "x": "y" * 900} for n in range(300)]
    long = {"status": "DIVERGENT", "culprits": culprits}
    (folder / "report.json").write_text(json.dumps(long))
    async with Client(server, mode="legacy") as client:
        text = await read(client, "report://older")
        (cut,) = json.loads(text)["cut"]
        assert len(text) < 80_000
        assert cut["of"] == 300
        more = json.loads(await read(client, f"report://older?at=/culprits&offset={cut['shown']}"))
        assert more["value"][0]["site"] == f"s{cut['shown']}"


@pytest.mark.parametrize(
    "uri",
    ["run://..", "run://jobs", "run://%2e%2e", "run://nowhere", "report://..%2Fsecret",
     "trace://older/meta", "trace://older/left", "job://x", "job://../log", "playbook://..",
     "file:///etc/hostname", "run://link", "report://linked", "report://piped"],
)  # fmt: skip
async def test_nothing_else_can_be_read(server: ToolServer, workspace: Path, uri: str):
    folder = add_run(workspace)
    (workspace.parent / "secret").mkdir()
    (workspace.parent / "secret" / "report.json").write_text('{"verdict": "SECRET"}')
    (workspace / "runs" / "link").symlink_to(workspace.parent / "secret")
    (workspace / "runs" / "linked").mkdir()
    (workspace / "runs" / "linked" / "report.json").symlink_to(
        workspace.parent / "secret" / "report.json"
    )
    (workspace / "runs" / "piped").mkdir()
    os.mkfifo(workspace / "runs" / "piped" / "report.json")
    (folder / "left").symlink_to(workspace.parent / "secret")
    async with Client(server, mode="legacy") as client:
        with pytest.raises(MCPError) as refused:
            await read(client, uri)
    assert "SECRET" not in str(refused.value)


async def test_links_and_pipes_do_not_stop_the_list(server: ToolServer, workspace: Path):
    (workspace / "runs" / "odd").mkdir(parents=True)
    os.mkfifo(workspace / "runs" / "odd" / "report.json")
    (workspace / "runs" / "link").symlink_to("/etc")
    async with Client(server, mode="legacy") as client:
        answer = await client.call_tool("list_runs", {})
    assert [run["run"] for run in answer.structured_content["runs"]] == ["odd"]
