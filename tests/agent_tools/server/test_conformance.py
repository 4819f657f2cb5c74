"""The MCP conformance suite and Inspector, both protocol eras, without a network.

The suite has scenarios for any server and scenarios for a server with the suite's own tools,
prompts and resources (``test_simple_text`` and so on). The first kind must pass; the second kind
says nothing about this server, and what asks for them is listed here.
"""

import importlib.util
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from zeromismatch.agent_tools.server import http as over_http
from zeromismatch.agent_tools.server.build import ToolServer

from .conftest import ENTRY, PATIENCE
from .test_http import TOKEN, served

GENERIC = {
    "2025-11-25": {
        "server-initialize", "server-session-lifecycle", "ping", "tools-list", "tools-call-error",
        "resources-list", "prompts-list", "dns-rebinding-protection", "server-sse-multiple-streams",
    },
    "2026-07-28": {
        "tools-list", "tools-call-error", "resources-list", "prompts-list", "caching",
        "dns-rebinding-protection", "sep-2164-resource-not-found", "http-header-validation",
        "server-sse-multiple-streams", "input-required-result-unsupported-methods",
        "input-required-result-ignore-extra-params",
    },
}  # fmt: skip
NEED_FIXTURES = re.compile(
    r"tools-call-(?!error)|resources-(read|templates-read|subscribe|unsubscribe)|prompts-get|"
    r"elicitation|input-required-result|json-schema|tasks-|http-custom-header|server-sse-polling|"
    r"logging-set-level|completion-complete|server-stateless"
)
"""What asks for the suite's own tools, or for a capability that this server doesn't announce."""
STATELESS = {"2026-07-28": "26 passed, 2 failed"}
"""Its two failures ask for a tool named test_missing_capability."""
FAULTS = re.compile(r"✗ ([a-z0-9-]+):")
PASSES = re.compile(r"✓ ([a-z0-9-]+): (\d+) passed, 0 failed")


def load_checks() -> ModuleType:
    path = Path(__file__).parent / "mcp_checks" / "install.py"
    spec = importlib.util.spec_from_file_location("mcp_checks_install", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECKS = load_checks()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(CHECKS.missing()), reason=CHECKS.missing() or "installed"),
]


def run(name: str, *arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """One of the two programs; a home and a proxy that lead nowhere keep it to itself."""
    program = CHECKS.target() / "node_modules" / ".bin" / name
    nowhere = "http://127.0.0.1:9"
    environment = os.environ | {
        "HOME": str(folder), "NO_COLOR": "1", "NO_PROXY": "127.0.0.1", "HTTPS_PROXY": nowhere,
        "NODE_USE_ENV_PROXY": "1", "HTTP_PROXY": nowhere,
        "MCP_CATALOG_PATH": str(folder / "catalog.json"),
    }  # fmt: skip
    return subprocess.run(
        [str(CHECKS.node()), str(program), *arguments],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture
def url(server: ToolServer) -> Iterator[str]:
    """The server with the token added on the way in, since the suite cannot send one."""
    with socket.socket() as listening:
        listening.bind((over_http.HOST, 0))
        listening.listen()
        port = listening.getsockname()[1]
        inner = over_http.app(server, port, TOKEN)
        carried = (b"authorization", f"Bearer {TOKEN}".encode())

        async def app(scope, receive, send):
            if scope["type"] == "http":
                scope = {**scope, "headers": [*scope["headers"], carried]}
            await inner(scope, receive, send)

        with served(app, listening):
            yield f"http://{over_http.HOST}:{port}{over_http.PATH}"


@pytest.mark.parametrize("version", list(GENERIC))
def test_the_generic_scenarios_pass(url: str, version: str, tmp_path: Path, record_property):
    done = run("conformance", "server", "--url", url, "--requirements", version, folder=tmp_path)
    summary = done.stdout.partition("=== SUMMARY ===")[2]
    passed = {name for name, count in PASSES.findall(summary) if int(count)}
    record_property("summary", summary)
    assert GENERIC[version] - passed == set(), summary
    assert [name for name in FAULTS.findall(summary) if not NEED_FIXTURES.match(name)] == []
    if version in STATELESS:
        assert f"server-stateless: {STATELESS[version]}" in summary


@pytest.mark.parametrize("era", ["legacy", "auto", "modern"])
def test_inspector_finds_no_fault_in_the_schemas(
    workspace: Path, era: str, tmp_path: Path, record_property
):
    python = str(Path(os.environ.get("VIRTUAL_ENV", CHECKS.target().parent)) / "bin" / "python")
    script = tmp_path / "serve.py"
    script.write_text(f"import sys; sys.argv = ['zm', 'serve']\n{ENTRY}\n")
    done = run(
        "inspector", "--cli", python, str(script), "--method", "tools/list", "--strict",
        "--protocol-era", era, "--connect-timeout", str(1000 * PATIENCE), folder=workspace,
    )  # fmt: skip
    said = " ".join(done.stderr.split()) or "nothing"
    record_property(f"inspector, {era}", f"exit {done.returncode}; stderr: {said}")
    assert done.returncode == 0, done.stderr
    assert '"name": "localize"' in done.stdout
    assert "error" not in done.stderr.replace("0 errors", "")
