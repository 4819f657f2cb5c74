"""A workspace of its own for every test, a server on it, and what speaks to one over pipes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zeromismatch.agent_tools.jobs.store import Store
from zeromismatch.agent_tools.records import Anchor, Divergence, SideRecord
from zeromismatch.agent_tools.report import from_divergence
from zeromismatch.agent_tools.server.build import ToolServer, build_server

PATIENCE = 120
VERSION = "2025-11-25"
ENTRY = "from zeromismatch.agent_tools.cli import main; main()"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["legacy", "auto"])
def era(request: pytest.FixtureRequest) -> str:
    """The protocol era that a client negotiates."""
    return request.param


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def server(workspace: Path) -> ToolServer:
    return build_server()


@pytest.fixture
def store(workspace: Path) -> Store:
    return Store(workspace)


def divergence(reason: str = "nothing differs") -> Divergence:
    """A verdict on nothing in particular."""
    side = SideRecord(
        side="paged:mixed", engine="paged", plan="stock", run="r", steps=1, rows=1, samples=1,
        seconds=0.1,
    )  # fmt: skip
    return Divergence(
        status="EQUAL", reason=reason, model="tiny:llama", dtype="float32", left=side, right=side,
        anchor=Anchor(requests=1, tokens=1, weights=1, embedding_rows=1),
    )  # fmt: skip


def add_run(workspace: Path, name: str = "older") -> Path:
    """A run with a verdict and no page."""
    folder = workspace / "runs" / name
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(from_divergence(divergence()).model_dump_json())
    return folder


class Wire:
    """A server as a process, spoken to line by line."""

    def __init__(self, workspace: Path):
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENTRY, "serve", "--workspace", str(workspace)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.asked = 0

    def write(self, text: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(text.encode("utf-8", "surrogatepass"))
        self.process.stdin.flush()

    def ask(self, method: str, params: dict[str, Any] | None = None) -> int:
        """Send a request and return its id without waiting."""
        self.asked += 1
        found = {"jsonrpc": "2.0", "id": self.asked, "method": method, "params": params or {}}
        self.write(json.dumps(found) + "\n")
        return self.asked

    def call(self, name: str, /, **arguments: Any) -> int:
        return self.ask("tools/call", {"name": name, "arguments": arguments})

    def answer(self, number: int) -> dict[str, Any]:
        """Read until the answer to this request."""
        assert self.process.stdout
        for line in self.process.stdout:
            found = json.loads(line)
            if found.get("id") == number:
                return found
        raise AssertionError("the server closed stdout")

    def initialize(self) -> dict[str, Any]:
        about = {"name": "test", "version": "1"}
        given = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": about}
        found = self.answer(self.ask("initialize", given))
        self.write('{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
        return found

    def cpu_seconds(self) -> float:
        """Processor time of the server so far."""
        stat = Path("/proc", str(self.process.pid), "stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()
        self.process.wait(PATIENCE)


@pytest.fixture
def wire(workspace: Path) -> Iterator[Wire]:
    found = Wire(workspace)
    yield found
    found.process.kill()
    found.close()
