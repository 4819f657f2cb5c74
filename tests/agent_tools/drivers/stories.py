"""Stand-ins for ``claude`` and ``codex``: executables that tell what the real ones tell.

They keep a session as the real ones do: they know the steps whose results they saw. They make a
call again that they do not remember, unless they are told that the call was under way.
"""

import json
import stat
import sys
from pathlib import Path
from typing import Any

from zeromismatch.agent_tools.drivers.hearing import OURS

ID = "0199a213-81c0-7800-8aa1-bbab2a035a53"
Event = dict[str, Any]


def write_program(file: Path, body: str) -> None:
    file.write_text(f"#!{sys.executable}\n{body}")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def begun(program: str, n: int, name: str) -> Event:
    if program == "codex":
        item = {"id": f"item_{n}", "type": "mcp_tool_call", "server": "zero-mismatch",
                "tool": name, "arguments": {}, "status": "in_progress"}  # fmt: skip
        return {"type": "item.started", "item": item}
    usage = {"input_tokens": 90, "output_tokens": 10}
    content = [{"type": "tool_use", "id": f"t{n}", "name": f"{OURS}{name}", "input": {}}]
    return {"type": "assistant", "session_id": ID,
            "message": {"id": f"m{n}", "usage": usage, "content": content}}  # fmt: skip


def returned(program: str, n: int, name: str, text: str) -> Event:
    if program == "codex":
        item = begun(program, n, name)["item"] | {"result": text, "status": "completed"}
        return {"type": "item.completed", "item": item}
    content = [{"type": "tool_result", "tool_use_id": f"t{n}", "content": text}]
    return {"type": "user", "session_id": ID, "message": {"content": content}}


def first(program: str) -> Event:
    if program == "codex":
        return {"type": "thread.started", "thread_id": ID}
    return {"type": "system", "subtype": "init", "session_id": ID}


def last(program: str) -> Event:
    usage = {"input_tokens": 300, "output_tokens": 30}
    if program == "codex":
        return {"type": "turn.completed", "usage": usage}
    return {"type": "result", "subtype": "success", "num_turns": 3, "total_cost_usd": 0.5,
            "usage": usage, "session_id": ID}  # fmt: skip


def story(program: str) -> list[Event]:
    """A whole run, as the stand-in tells it."""
    told = [first(program)]
    for n, name in enumerate(("look", "write"), 1):
        told += [begun(program, n, name), returned(program, n, name, f"{name} {n}")]
    return [*told, last(program)]


BODY = """
import json, os, signal, sys
words, events = sys.argv[1:], json.loads({events!r})
with open("argv", "a") as file:
    file.write(json.dumps(words) + "\\n")
resumed = {id!r} in words
prompt = words[-1] if words[0] == "exec" else words[1]
done = int(open("memory").read()) if resumed else 0
print(json.dumps(events[0]), flush=True)
for n, name in enumerate(("look", "write"), 1):
    if n > done:
        print(json.dumps(events[2 * n - 1]), flush=True)
        told = resumed and "- write" in prompt
        if name == "write" and not (told and os.path.exists("effects")):
            open("effects", "a").write("w")
            {after_write}
        print(json.dumps(events[2 * n]), flush=True)
        open("memory", "w").write(str(n))
print(json.dumps(events[-1]))
"""


def install(path: Path, program: str, after_write: str = "pass") -> None:
    told = BODY.format(events=json.dumps(story(program)), id=ID, after_write=after_write)
    write_program(path / program, told)


def ends(path: Path, program: str, events: list[Event], *, hang: bool) -> None:
    """A program that says this, and then ends or hangs."""
    said = "".join(f"print({json.dumps(json.dumps(event))}, flush=True)\n" for event in events)
    body = f"import signal\n{said}" + ("signal.sigwait({signal.SIGUSR1})\n" if hang else "")
    write_program(path / program, body)
