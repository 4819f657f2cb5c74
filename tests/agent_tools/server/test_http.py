"""HTTP answers on loopback to who carries the token, and to nobody who comes from elsewhere."""

import contextlib
import http.client
import json
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import uvicorn
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from zeromismatch.agent_tools.server import http as over_http
from zeromismatch.agent_tools.server.build import ToolServer
from zeromismatch.kernels.errors import CapabilityError, UsageError

from .conftest import ENTRY, PATIENCE, VERSION

TOKEN = "a-token-that-is-long-enough"
ABOUT = {"name": "test", "version": "1"}
PARAMS = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": ABOUT}
INITIALIZE = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": PARAMS})
HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json, text/event-stream",
    "Authorization": f"Bearer {TOKEN}",
}


@contextlib.contextmanager
def served(app: object, listening: socket.socket) -> Iterator[None]:
    """An ASGI application on an open socket, until the block ends."""
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2)  # type: ignore[arg-type]
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield
    finally:
        running.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.fixture
def port(server: ToolServer) -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind((over_http.HOST, 0))
        found = listening.getsockname()[1]
        listening.listen()
        with served(over_http.app(server, found, TOKEN), listening):
            yield found


def status(port: int, body: str = INITIALIZE, **changed: str | None) -> int:
    headers = {**HEADERS, **{name.title(): value for name, value in changed.items()}}
    connection = http.client.HTTPConnection(over_http.HOST, port, timeout=PATIENCE)
    kept = {name: value for name, value in headers.items() if value is not None}
    connection.request("POST", over_http.PATH, body=body, headers=kept)
    answer = connection.getresponse().status
    connection.close()
    return answer


def test_only_the_token_opens_and_only_from_here(port: int):
    assert status(port) == 200
    assert status(port, authorization=None) == 401
    for wrong in ("Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"bearer {TOKEN}", TOKEN, "é"):
        assert status(port, authorization=wrong) == 401
    assert status(port, host="evil.example.com") == 421
    assert status(port, host=f"{over_http.HOST}:{port + 1}") == 421
    assert status(port, origin="http://evil.example.com") == 403
    assert status(port, origin=f"http://{over_http.HOST}:{port + 1}") == 403
    assert status(port, origin=f"http://{over_http.HOST}:{port}") == 200
    assert status(port, body="x" * (over_http.MAX_BODY + 1)) == 413
    assert status(port, body="{") == 400


@pytest.mark.anyio
async def test_a_client_calls_tools_over_http(port: int, era: str):
    url = f"http://{over_http.HOST}:{port}{over_http.PATH}"
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        transport = streamable_http_client(url, http_client=session)
        async with Client(transport, mode=era) as client:
            answer = await client.call_tool("list_runs", {})
    assert answer.structured_content["total"] == 0


def test_the_token_is_made_once_and_for_this_user_only(tmp_path: Path):
    path = tmp_path / "runs" / "serve.token"
    token = over_http.read_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert over_http.read_token(path) == token
    assert over_http.read_token(tmp_path / "other") != token
    path.write_text("short\n")
    with pytest.raises(UsageError, match="remove the file"):
        over_http.read_token(path)


def test_a_port_that_is_taken_is_said(server: ToolServer, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind((over_http.HOST, 0))
        taken.listen()
        with pytest.raises(CapabilityError, match="--port 0"):
            over_http.serve(server, taken.getsockname()[1], tmp_path / "token")


def test_the_command_serves_http_until_an_interrupt(workspace: Path):
    words = ["serve", "--http", "--workspace", str(workspace)]
    with subprocess.Popen(
        [sys.executable, "-c", ENTRY, *words], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        try:
            line = process.stderr.readline()
            port = int(line.partition(f"{over_http.HOST}:")[2].partition("/")[0])
            token = (workspace / "runs" / "serve.token").read_text().strip()
            assert status(port, authorization=f"Bearer {token}") == 200
            assert status(port) == 401
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)
        finally:
            process.kill()
        assert "Traceback" not in process.stderr.read()
