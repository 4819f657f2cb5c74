"""Ten thousand malformed calls, and a wire full of noise: refused in words, and nothing starts."""

import json
import random
import string
from typing import Any

import anyio
import pytest
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError

from zeromismatch.agent_tools.jobs.store import Store
from zeromismatch.agent_tools.server.build import ToolServer

from .conftest import Wire

CALLS = 12_000
LINES = 3_000
CHARACTERS = string.printable + "\0\x1b\u202e\ud800é漢"
WRONG = (None, True, -1, 2**70, 1e308, [], {}, [[]], {"a": {"b": [1]}}, ["x"] * 300, "x" * 5000)


def noise(random_: random.Random, most: int = 40) -> str:
    return "".join(random_.choices(CHARACTERS, k=random_.randint(1, most)))


def spoiled(random_: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a tool with at least one thing that its schema or the workspace refuses."""
    given: dict[str, Any] = dict.fromkeys(schema.get("required", ()), "x")
    names = list(schema["properties"])
    texts = [name for name in names if name in schema.get("required", ())]
    way = random_.choice(("unknown", "type", "text", "path") if names else ("unknown",))
    if way == "text" and texts:
        given[random_.choice(texts)] = noise(random_) + "\0"
    elif way == "path" and texts:
        given[random_.choice(texts)] = "../" * random_.randint(1, 9) + "\x07"
    elif way == "type" and names:
        name = random_.choice(names)
        given[name] = {"wrong": random_.choice(WRONG)}
        if name == "arguments":
            given[name] = random_.choice(("x", 1, [1]))
    else:
        given[noise(random_)] = random_.choice((*WRONG, noise(random_)))
    return given


def test_ten_thousand_malformed_calls_are_refused_in_words(
    server: ToolServer, store: Store, record_property: Any
):
    random_ = random.Random(0)
    told: dict[str, int] = {}

    async def ask() -> None:
        schemas = {tool.name: tool.input_schema for tool in await server.list_tools()}
        for _ in range(CALLS):
            name = random_.choice(list(schemas))
            arguments = spoiled(random_, schemas[name])
            if random_.random() < 0.05:
                name = noise(random_)
            with pytest.raises(ToolError) as refused:
                await server.call_tool(name, arguments)
            assert not isinstance(refused.value, UnexpectedToolError), (name, arguments)
            text = str(refused.value)
            assert 10 < len(text) < 4000
            told[name] = told.get(name, 0) + 1

    anyio.run(ask)
    record_property("malformed calls", sum(told.values()))
    record_property("tool names", len(told))
    record_property("unexpected answers", 0)
    record_property("jobs started", len(store.list()))
    assert sum(told.values()) == CALLS
    assert store.list() == []


def test_noise_on_the_wire_does_not_stop_the_server(wire: Wire, record_property: Any):
    record_property("lines of noise on the wire", LINES)
    random_ = random.Random(1)
    wire.initialize()
    lines = [
        lambda: noise(random_, 200).replace("\n", " ").replace("\r", " "),
        lambda: '{"jsonrpc": "2.0", "id": ' * random_.randint(1, 500),
        lambda: "[" * 5000,
        lambda: json.dumps({"jsonrpc": "1.0", "id": "x", "method": noise(random_)}),
        lambda: json.dumps({"jsonrpc": "2.0", "id": [1], "method": "tools/list"}),
        lambda: json.dumps({"jsonrpc": "2.0", "method": "tools/call", "params": [1, 2]}),
        lambda: json.dumps({"jsonrpc": "2.0", "id": -1, "result": {}}),
    ]
    for n in range(LINES):
        wire.write(random_.choice(lines)() + "\n")
        if n % 100 == 99:  # read what it says, as a client does
            assert "result" in wire.answer(wire.call("list_runs"))
