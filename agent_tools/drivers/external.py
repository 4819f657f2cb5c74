"""External agents: the ``claude`` and ``codex`` programs, run without a person.

    outcome = run_program("claude", task, bench, budgets, folder)

The program gets the task, the workbench's tools over stdio, and a working folder of its own. What
it prints goes into the transcript line by line, as data. What it claims counts for nothing: the
judge runs when it has ended. It is stopped when the time is used up, with all it started.

Left out: resuming (the programs keep their own sessions), and their permission to run commands,
which is the person's to give.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal

from ...kernels.errors import CapabilityError
from ...kernels.files import replace_whole
from .budgets import Budgets
from .conversation import Usage
from .loop import EXITS, Judgement, Outcome
from .transcript import Transcript
from .workbench import Workbench

Program = Literal["claude", "codex"]
SERVER = "zero-mismatch"
PLUGIN = Path(__file__).parents[2] / "skill"
WAIT_AFTER_KILL = 10.0
MAX_LINE = 200_000
SAID = ("passed", "needs-tick", "stopped-early")
"""Ends of which the judge says more."""
ENDS = {"error_max_turns": "budget-turns", "error_max_budget_usd": "budget-money"}
"""What ``claude`` calls the end of a budget, and what we call it."""


def stdio_command(bench: Workbench) -> list[str]:
    """The argument list that starts the workbench's server on stdin and stdout."""
    module = "zeromismatch.agent_tools.drivers.workbench_stdio"
    return [sys.executable, "-m", module, bench.spec, str(bench.folder.resolve()), bench.dtype,
            str(bench.seed)]  # fmt: skip


def command_line(
    program: Program, task: str, bench: Workbench, budgets: Budgets, folder: Path
) -> list[str]:
    """The argument list; configuration files are written into ``folder``. No shell is involved."""
    found = shutil.which(program)
    if found is None:
        raise CapabilityError(
            f"the program {program} is not on the PATH; install it, or use --agent autopilot"
        )
    server = stdio_command(bench)
    if program == "claude":
        config = {"mcpServers": {SERVER: {"command": server[0], "args": server[1:]}}}
        file = replace_whole(folder / "mcp.json", json.dumps(config, indent=2))
        words = [found, "-p", task, "--output-format", "stream-json", "--verbose", "--mcp-config",
                 str(file), "--strict-mcp-config", "--plugin-dir", str(PLUGIN), "--allowedTools",
                 f"mcp__{SERVER}"]  # fmt: skip
        words += [] if budgets.turns is None else ["--max-turns", str(budgets.turns)]
        return words + ([] if budgets.money is None else ["--max-budget-usd", str(budgets.money)])
    schema = {"type": "object", "properties": {"summary": {"type": "string"}},
              "required": ["summary"], "additionalProperties": False}  # fmt: skip
    file = replace_whole(folder / "answer-schema.json", json.dumps(schema, indent=2))
    return [found, "exec", "--json", "--sandbox", "workspace-write", "--output-schema", str(file),
            "-o", str(folder / "answer.json"),
            "-c", f"mcp_servers.{SERVER}.command={json.dumps(server[0])}",
            "-c", f"mcp_servers.{SERVER}.args={json.dumps(server[1:])}", task]  # fmt: skip


def run_program(
    program: Program, task: str, bench: Workbench, budgets: Budgets, folder: Path, *,
    judge: Callable[[], Judgement] | None = None, progress: Callable[[str], None] = lambda s: None,
) -> Outcome:  # fmt: skip
    """Run the program to its end, then ask the judge."""
    budgets.check()
    workspace = folder.resolve() / "workspace"
    transcript = Transcript.begin(folder)
    words = command_line(program, task, bench, budgets, folder.resolve())
    began = time.monotonic()
    spent = budgets.spent(0, Usage(), 0.0)
    begin = {"task": task, "provider": program, "model": "", "command": words[1:]}
    transcript.append("begin", 0.0, begin)
    told = _Told()
    if spent is None:
        workspace.mkdir(parents=True, exist_ok=True)
        progress(f"{program} works; its output goes to {transcript.path}")
        spent = _watch(words, workspace, budgets.seconds, began, transcript, told)
    found = (judge or bench.judge)() if told.started else Judgement(passed=False, reason="no run")
    transcript.append("verdict", time.monotonic() - began, found.model_dump())
    judged = "passed" if found.passed else "needs-tick" if found.waits else ""
    reason = judged or spent or told.end or "stopped-early"
    outcome = Outcome(
        reason=reason,
        detail=(found.waits or found.reason) if reason in SAID else EXITS[reason][1],
        turns=told.turns,
        calls=told.calls,
        tokens=told.usage.total,
        money=told.money if told.money is not None or budgets.price is None
        else budgets.price.of(told.usage),
        seconds=time.monotonic() - began,
        rules=(),
        transcript=str(transcript.path),
    )  # fmt: skip
    transcript.append("end", outcome.seconds, outcome.model_dump())
    return outcome


class _Told:
    """What the program said about itself; for the record, never for the verdict."""

    def __init__(self) -> None:
        self.started, self.turns, self.calls = False, 0, 0
        self.usage, self.end = Usage(), ""
        self.money: float | None = None

    def hear(self, event: dict[str, Any]) -> None:
        """One line of output."""
        kind = event.get("type")
        if kind == "result":
            self.turns = _number(event.get("num_turns"), self.turns)
            cost = event.get("total_cost_usd")
            self.money = float(cost) if isinstance(cost, int | float) else None
            self.end = ENDS.get(str(event.get("subtype")), self.end)
            self._count(event.get("usage"))
        elif kind == "turn.completed":
            self.turns += 1
            self._count(event.get("usage"))
        elif kind == "item.completed":
            item = event.get("item")
            self.calls += isinstance(item, dict) and item.get("type") == "mcp_tool_call"
        elif kind == "assistant":
            message = event.get("message")
            content = message.get("content") if isinstance(message, dict) else None
            parts = content if isinstance(content, list) else []
            self.calls += sum(isinstance(p, dict) and p.get("type") == "tool_use" for p in parts)

    def _count(self, usage: object) -> None:
        if isinstance(usage, dict):
            self.usage += Usage(
                input=_number(usage.get("input_tokens"), 0),
                output=_number(usage.get("output_tokens"), 0),
            )


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) and value >= 0 else default


def _watch(
    words: list[str], folder: Path, seconds: float | None, began: float, transcript: Transcript,
    told: _Told,
) -> str | None:  # fmt: skip
    """Run and listen; the end by time or failure, or None."""
    process = subprocess.Popen(
        words, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    told.started = True
    assert process.stdout is not None
    listener = threading.Thread(
        target=_listen, args=(process.stdout, began, transcript, told), daemon=True
    )
    listener.start()
    try:
        left = None if seconds is None else max(0.0, seconds - (time.monotonic() - began))
        code = process.wait(left)
    except subprocess.TimeoutExpired:
        return "budget-time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it left running
        process.wait(WAIT_AFTER_KILL)
        listener.join(WAIT_AFTER_KILL)
        process.stdout.close()
    return None if code == 0 or told.end else "program-failed"


def _listen(stream: IO[str], began: float, transcript: Transcript, told: _Told) -> None:
    while line := stream.readline(MAX_LINE):
        try:
            event = json.loads(line)
        except ValueError:
            event = {"type": "text", "text": line.rstrip("\n")}
        if isinstance(event, dict):
            transcript.append("stream", time.monotonic() - began, event)
            told.hear(event)
