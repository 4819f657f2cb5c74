"""The tools, through an MCP client: in the same process, over stdio, or over loopback HTTP.

    async with connected(server) as toolbox:
        await toolbox.tools()
        await toolbox.call("localize", {"model": "tiny:llama", ...})

The server's annotations say which tools only read and which destroy; the server itself enforces
paths, deny-lists and approvals, whatever a model sends. Results are bounded here once more, so that
no answer can fill a model's context.
"""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ...kernels.errors import CapabilityError
from .conversation import Returned, ToolSpec
from .loop import ToolsLostError

if TYPE_CHECKING:
    from mcp import Client

MAX_CHARACTERS = 24_000


class McpToolbox:
    """Tools of a connected client."""

    def __init__(self, client: "Client") -> None:
        self.client = client

    async def tools(self) -> Sequence[ToolSpec]:
        """All tools, sorted by name."""
        found: list[ToolSpec] = []
        cursor: str | None = None
        while True:
            page = await self.client.list_tools(cursor=cursor)
            for tool in page.tools:
                hints = tool.annotations
                read_only = bool(hints and hints.read_only_hint)
                destructive = not hints or hints.destructive_hint is not False
                found.append(
                    ToolSpec(
                        name=tool.name,
                        description=tool.description or "",
                        schema=tool.input_schema,
                        read_only=read_only,
                        destructive=destructive and not read_only,
                    )
                )
            cursor = page.next_cursor
            if not cursor:
                return sorted(found, key=lambda spec: spec.name)

    async def call(self, name: str, arguments: dict[str, Any]) -> Returned:
        """One call; a tool's own error is a result, a lost server is ToolsLostError."""
        import anyio
        from mcp.shared.exceptions import MCPError

        try:
            result = await self.client.call_tool(name, arguments)
        except MCPError as error:
            return Returned(id="", text=f"{name}: {error}", is_error=True)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError) as error:
            raise ToolsLostError(f"the tool server went away during {name}") from error
        texts = [part.text for part in result.content if part.type == "text"]
        structured = result.structured_content
        if structured is not None and not _is_shown(texts, structured):
            texts.append(json.dumps(structured, ensure_ascii=False, default=str))
        return Returned(id="", text=bounded("\n".join(texts)), is_error=bool(result.is_error))


def _is_shown(texts: Sequence[str], structured: Any) -> bool:
    """Whether the text already is the structured content, as servers without own text send it."""
    try:
        return any(json.loads(text) == structured for text in texts)
    except json.JSONDecodeError:
        return False


def bounded(text: str) -> str:
    """At most ``MAX_CHARACTERS``: the beginning and the end."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    cut = len(text) - 2 * half
    return f"{text[:half]}\n[{cut:,} characters left out; ask for less]\n{text[-half:]}"


@asynccontextmanager
async def connected(server: Any) -> AsyncGenerator[McpToolbox]:
    """A toolbox on a server object, a URL, or ``StdioServerParameters``."""
    try:
        from mcp import Client
    except ImportError as error:
        raise CapabilityError(
            "the mcp package is not installed; `pip install 'zero-mismatch[agent]'`"
        ) from error
    try:
        async with Client(server) as client:
            yield McpToolbox(client)
    except BaseExceptionGroup as group:
        raise _only(group) from group


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The client's task group wraps what was raised inside; a single cause comes out as it was."""
    inner: BaseException = group
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        inner = inner.exceptions[0]
    return inner
