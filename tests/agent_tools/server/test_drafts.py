"""A client without access to files writes kernels and diffs below runs/drafts/, nothing else."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from zeromismatch.agent_tools import cli
from zeromismatch.agent_tools.drafts import MOST_BYTES, write_draft
from zeromismatch.agent_tools.jobs.store import Store
from zeromismatch.agent_tools.server.build import ToolServer
from zeromismatch.kernels.errors import UsageError

from .conftest import Wire

pytestmark = pytest.mark.anyio
KERNEL = '"""A kernel: ²."""\nimport torch\n\n\ndef forward(x):\n\t"""x²."""\n\treturn x * x\n'
DIFF = "--- /dev/null\n+++ b/model_recipes/a/b/NOTES.md\n@@ -0,0 +1 @@\n+more"


async def refused(server: ToolServer, **arguments: Any) -> str:
    async with Client(server, mode="legacy") as client:
        answer = await client.call_tool("draft_write", arguments)
    assert answer.is_error, arguments
    return answer.content[0].text


@pytest.mark.parametrize(
    ("name", "text"),
    [("own/kernels/own.py", KERNEL), ("fix.diff", DIFF), ("fix.diff", DIFF + "\n")],
)
async def test_a_draft_is_written_as_it_was_given(
    server: ToolServer, workspace: Path, era: str, name: str, text: str
):
    async with Client(server, mode=era) as client:
        given = {"file": f"runs/drafts/{name}", "text": text}
        answer = await client.call_tool("draft_write", given)
    assert not answer.is_error, answer.content[0].text
    found, file = answer.structured_content, workspace / "runs" / "drafts" / name
    assert file.read_text() == text.removesuffix("\n") + "\n"
    assert found["file"] == f"runs/drafts/{name}"
    assert found["digest"] == hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    assert found["bytes"] == file.stat().st_size
    assert file.stat().st_mode & 0o111 == 0
    assert Store(workspace).list() == []


async def test_a_second_text_replaces_the_first(server: ToolServer, workspace: Path):
    async with Client(server, mode="legacy") as client:
        for text in ("first\n", "second\n"):
            given = {"file": str(workspace / "runs" / "drafts" / "a.py"), "text": text}
            assert not (await client.call_tool("draft_write", given)).is_error
    assert (workspace / "runs" / "drafts" / "a.py").read_text() == "second\n"
    assert [path.name for path in (workspace / "runs" / "drafts").iterdir()] == ["a.py"]


@pytest.mark.parametrize(
    "file",
    ["a.py", "runs/a.py", "runs/drafts", "runs/drafts/../a.py", "runs/draftsman/a.py",
     "kernels/bits.py", "runs/jobs/a.py", "runs/drafts/.a.py", "runs/drafts/.git/a.py",
     "runs/drafts/a b.py", "runs/drafts/$(x).py", "runs/drafts/1/2/3/4/5/a.py", "../a.py",
     "/tmp/a.py", "~/a.py", "runs/drafts/" + "a" * 200 + ".py"],
)  # fmt: skip
async def test_no_other_place_is_written(server: ToolServer, workspace: Path, file: str):
    told = await refused(server, file=file, text="x = 1\n")
    assert "runs/" in told or "workspace" in told
    assert [path for path in workspace.parent.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", ["recipe.yaml", "gates.json", "a.sh", "a", "a.py.so"])
async def test_only_kernels_and_diffs_are_drafts(server: ToolServer, workspace: Path, name: str):
    assert ".py or .diff" in await refused(server, file=f"runs/drafts/{name}", text="x")
    assert not (workspace / "runs").exists()


async def test_a_link_out_of_the_workspace_is_not_followed(server: ToolServer, workspace: Path):
    drafts, outside = workspace / "runs" / "drafts", workspace.parent / "outside"
    drafts.mkdir(parents=True)
    outside.mkdir()
    (outside / "held.py").write_text("held")
    (drafts / "folder").symlink_to(outside)
    (drafts / "held.py").symlink_to(outside / "held.py")
    (drafts / "own.py").symlink_to(workspace / "own.py")
    (drafts / "loop.py").symlink_to(drafts / "loop.py")
    (drafts / "is.py").mkdir()
    for name in ("folder/new.py", "held.py", "own.py", "loop.py", "is.py", "is.py/../held.py"):
        await refused(server, file=f"runs/drafts/{name}", text="x")
    assert [path.name for path in outside.iterdir()] == ["held.py"]
    assert (outside / "held.py").read_text() == "held"
    assert not (workspace / "own.py").exists()


async def test_drafts_that_are_a_link_are_refused(server: ToolServer, workspace: Path):
    (workspace / "elsewhere").mkdir()
    (workspace / "runs").mkdir()
    (workspace / "runs" / "drafts").symlink_to(workspace / "elsewhere")
    await refused(server, file="runs/drafts/a.py", text="x")
    assert list((workspace / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "empty"), (" \n\t\n", "empty"), ("a\0b", "leave them out"), ("\x7fELF\x02", "binary"),
     ("a\x1b[2J", "leave them out"), ("a\r\nb", "leave them out"), ("a\u202eb", "leave them out"),
     ("\ud800", "valid string"), ("#" * 200_000, "bytes"), ("é" * 100_001, "bytes"),
     ("#" * 1_000_001, "at most 1000000")],
)  # fmt: skip
async def test_what_is_no_text_of_a_file_is_refused(
    server: ToolServer, workspace: Path, text: str, told: str
):
    assert told in await refused(server, file="runs/drafts/a.py", text=text)
    assert not (workspace / "runs").exists()


async def test_a_long_diff_is_no_long_kernel(server: ToolServer, workspace: Path):
    text = "#" * MOST_BYTES[".py"]
    async with Client(server, mode="legacy") as client:
        given = {"file": "runs/drafts/a.diff", "text": text}
        assert not (await client.call_tool("draft_write", given)).is_error


@pytest.mark.parametrize(
    ("tool", "name", "more"),
    [("patch_apply", "repro", {"run": "runs/p", "gates": "g"}), ("regress", "report", {}),
     ("patch_apply", "gates", {"run": "runs/p"}), ("repro", "divergence", {})],
)  # fmt: skip
async def test_no_agent_writes_what_judges_it(
    server: ToolServer, store: Store, tool: str, name: str, more: dict[str, Any]
):
    async with Client(server, mode="legacy") as client:
        answer = await client.call_tool(tool, {**more, name: "runs/drafts/a.py"})
    assert answer.is_error
    assert "where drafts are" in answer.content[0].text
    assert store.list() == []


def test_the_command_answers_alike(workspace: Path, capsys: pytest.CaptureFixture[str]):
    words = ["draft", "write", "runs/drafts/a.diff", "--text", DIFF, "--json"]
    assert cli.run(words) == 0
    assert json.loads(capsys.readouterr().out)["file"] == "runs/drafts/a.diff"
    assert cli.run(["draft", "write", "a.py", "--text", "x"]) == 2


def test_the_command_follows_no_link_either(workspace: Path):
    """It has no server in front of it."""
    (workspace / "elsewhere").mkdir()
    (workspace / "runs" / "drafts").mkdir(parents=True)
    (workspace / "runs" / "drafts" / "out").symlink_to(workspace / "elsewhere")
    for file in ("runs/drafts/out/a.py", "runs/drafts/../a.py"):
        with pytest.raises(UsageError, match="no place for a draft"):
            write_draft(workspace, Path(file), "x")
    assert list((workspace / "elsewhere").iterdir()) == []


def test_it_is_written_without_torch(wire: Wire, workspace: Path):
    wire.initialize()
    answer = wire.answer(wire.call("draft_write", file="runs/drafts/a.py", text=KERNEL))
    assert answer["result"]["structuredContent"]["file"] == "runs/drafts/a.py"
    assert "torch" not in Path("/proc", str(wire.process.pid), "maps").read_text()
