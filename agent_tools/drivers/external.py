"""External agents: the ``claude`` and ``codex`` programs, run without a person.

    outcome = run_program("claude", task, bench, budgets, folder)

The program gets the task, the workbench's tools over stdio, and a working folder of its own. What
it prints goes into the transcript line by line, as data. What it claims counts for nothing: the
judge runs when it has ended. It is stopped, with all it started, when time, tokens or the calls of
one tool are used up. A budget that a program gives no means to hold is refused.

Sources: ``claude --output-format stream-json`` tells the usage of each step in its ``assistant``
events (several of one ``message.id`` tell the same), and the sum in ``result``; what a step wrote
may be told late, what it read is not. ``codex exec --json`` tells the thread's usage once, in the
``turn.completed`` that ends it, and has no limit of its own (codex-rs/exec/src/exec_events.rs).

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
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

from ...kernels.errors import CapabilityError, UsageError
from ...kernels.files import replace_whole
from .budgets import Budgets, Spent
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


NOT_HELD: dict[Program, tuple[str, ...]] = {"claude": (), "codex": ("turns", "tokens", "money")}
"""Budgets that nothing enforces while the program runs."""


def require_held(program: Program, budgets: Budgets) -> None:
    """UsageError for a budget that could only be read off when it is spent."""
    for name in NOT_HELD[program]:
        if getattr(budgets, name):
            raise UsageError(
                f"{program} has no limit on {name} and tells what it used only when it has ended; "
                f"leave out --max-{name}, and use --max-minutes and --max-calls"
            )


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
    require_held(program, budgets)
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
        spent = _watch(words, workspace, budgets, began, transcript, told)
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
    """What the program said about itself; for the record and the budgets, never for the verdict."""

    def __init__(self) -> None:
        self.started, self.turns, self.end = False, 0, ""
        self.money: float | None = None
        self.steps: dict[str, Usage] = {}
        self.total = Usage()
        self.called: dict[str, str] = {}

    @property
    def usage(self) -> Usage:
        """The program's own sum, or that of its steps where it has told no more yet."""
        steps = sum(self.steps.values(), Usage())
        return max(steps, self.total, key=lambda usage: usage.total)

    @property
    def calls(self) -> int:
        """Calls of tools that it began."""
        return len(self.called)

    def spent(self, budgets: Budgets) -> Spent | None:
        """The budget that its words show to be used up."""
        if budgets.tokens is not None and self.usage.total >= budgets.tokens:
            return "budget-tokens"
        most = max(Counter(self.called.values()).values(), default=0)
        return "budget-calls" if budgets.calls is not None and most > budgets.calls else None

    def hear(self, event: dict[str, Any]) -> None:
        """One line of output."""
        kind, item, message = (event.get(name) for name in ("type", "item", "message"))
        if kind == "result":
            self.turns = _number(event.get("num_turns"), self.turns)
            cost = event.get("total_cost_usd")
            self.money = float(cost) if isinstance(cost, int | float) else None
            self.end = ENDS.get(str(event.get("subtype")), self.end)
            self.total = _usage(event.get("usage"))
        elif kind == "turn.completed":
            self.turns += 1
            self.total = _usage(event.get("usage"))
        elif kind in ("item.started", "item.completed") and isinstance(item, dict):
            if item.get("type") == "mcp_tool_call":
                self._call(item, "tool")
        elif kind == "assistant" and isinstance(message, dict):
            name = str(message.get("id"))
            told = _usage(message.get("usage"))
            self.steps[name] = max(told, self.steps.get(name, told), key=lambda each: each.total)
            content = message.get("content")
            for part in content if isinstance(content, list) else []:
                if isinstance(part, dict) and part.get("type") == "tool_use":
                    self._call(part, "name")

    def _call(self, call: dict[str, Any], name: str) -> None:
        self.called[str(call.get("id", self.calls))] = str(call.get(name))


def _usage(told: object) -> Usage:
    """Tokens; what was read from a cache or into one counts as input."""
    if not isinstance(told, dict):
        return Usage()
    cached = ("cache_creation_input_tokens", "cache_read_input_tokens")
    read = (_number(told.get(name), 0) for name in ("input_tokens", *cached))
    return Usage(input=sum(read), output=_number(told.get("output_tokens"), 0))


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) and value >= 0 else default


def _watch(
    words: list[str], folder: Path, budgets: Budgets, began: float, transcript: Transcript,
    told: _Told,
) -> str | None:  # fmt: skip
    """Run and listen; the end by a budget or by failure, or None."""
    process = subprocess.Popen(
        words, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    told.started = True

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it left running

    def listen() -> None:
        assert process.stdout is not None
        for event in _events(process.stdout):
            transcript.append("stream", time.monotonic() - began, event)
            told.hear(event)
            if told.spent(budgets) is not None and process.poll() is None:
                end()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    seconds = budgets.seconds
    try:
        left = None if seconds is None else max(0.0, seconds - (time.monotonic() - began))
        code = process.wait(left)
    except subprocess.TimeoutExpired:
        return "budget-time"
    finally:
        end()
        process.wait(WAIT_AFTER_KILL)
        listener.join(WAIT_AFTER_KILL)
        assert process.stdout is not None
        process.stdout.close()
    failed = None if code == 0 or told.end else "program-failed"
    return told.spent(budgets) or failed


def _events(stream: IO[str]) -> Iterator[dict[str, Any]]:
    while line := stream.readline(MAX_LINE):
        try:
            event = json.loads(line)
        except ValueError:
            event = {"type": "text", "text": line.rstrip("\n")}
        if isinstance(event, dict):
            yield event
