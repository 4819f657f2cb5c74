"""MCP over HTTP on this machine only: loopback, a token, and no foreign Host or Origin.

A page in a browser can send requests to loopback, so the Host and Origin headers are checked, and
every request must carry the token, which only somebody who may read a file of this user knows.

    zm serve --http --port 8765
"""

import hmac
import os
import secrets
import socket
import sys
from pathlib import Path

import uvicorn
from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ...kernels.errors import CapabilityError, DiskError, UsageError

HOST = "127.0.0.1"
PATH = "/mcp"
MIN_TOKEN = 16
MAX_BODY = 1_000_000
GRACE_SECONDS = 3


class TokenGate:
    """Lets a request pass that carries the token; everything else is 401 and goes no further."""

    def __init__(self, app: ASGIApp, token: str):
        self.app = app
        self.expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] == "http":
            given = Headers(scope=scope).get("authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, self.expected):
                refused = PlainTextResponse(
                    "send the token of the server's token file: Authorization: Bearer TOKEN\n",
                    status_code=401, headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
                return await refused(scope, receive, send)
        await self.app(scope, receive, send)


def app(server: MCPServer, port: int, token: str) -> ASGIApp:
    """The ASGI application for one port and one token."""
    names = (HOST, "localhost")
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=[f"{name}:{port}" for name in names],
        allowed_origins=[f"http://{name}:{port}" for name in names],
    )
    served = server.streamable_http_app(
        streamable_http_path=PATH, host=HOST, transport_security=security,
        max_request_body_size=MAX_BODY,
    )  # fmt: skip
    return TokenGate(served, token)


def serve(server: MCPServer, port: int, token_file: Path) -> None:
    """Serve until an interrupt. Raises CapabilityError where the port is taken."""
    token = read_token(token_file)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except OSError as error:
            raise CapabilityError(f"port {port} is taken; use --port 0 for a free one") from error
        listening.listen()  # before its address is told: the first request waits for the server
        port = listening.getsockname()[1]
        print(f"zm: http://{HOST}:{port}{PATH}, token in {token_file}", file=sys.stderr, flush=True)
        config = uvicorn.Config(
            app(server, port, token), log_level="warning", access_log=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[listening])


def read_token(path: Path) -> str:
    """The token in ``path``; made there, for this user's eyes only, if the file is absent."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            token = path.read_text().strip()
        else:
            token = secrets.token_urlsafe(32)
            with os.fdopen(handle, "w") as file:
                file.write(token + "\n")
    except OSError as error:
        raise DiskError(
            f"cannot keep a token in {path}: {error.strerror}; use --token-file"
        ) from error
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable():
        raise UsageError(f"{path} holds no token; remove the file and one will be made")
    return token
