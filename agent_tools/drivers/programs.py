"""How ``claude`` and ``codex`` are called: to begin a run, and to go on with a session of theirs.

    words = command_line("claude", task, bench, budgets, folder, session="")

Both keep their sessions themselves, ``claude`` for each working folder, and take the name that
they told: ``claude -p PROMPT --resume ID``, and ``codex exec OPTIONS resume ID PROMPT``, where
options of ``exec`` stand before the word. The working folder is ours and new, so ``codex`` need not
find a git repository there (``--skip-git-repo-check``).

Left out: their permission to run commands, which is the person's to give.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ...kernels.errors import CapabilityError
from ...kernels.files import replace_whole
from .hearing import SERVER
from .workbench import Workbench

Program = Literal["claude", "codex"]
PROGRAMS: tuple[Program, ...] = ("claude", "codex")
PLUGIN = Path(__file__).parents[2] / "skill"
GO_ON = "The run was interrupted. Go on with the task where you left it."
PENDING = (
    "These calls were under way, and whether they took effect is not known:\n{calls}\nThey were "
    "not repeated. Look at the state with a reading tool before you make one of them again."
)


def go_on(pending: Sequence[str]) -> str:
    """What a resumed session is told. pending: calls whose effect is not known."""
    calls = "\n".join(f"- {call}" for call in pending)
    return f"{GO_ON}\n{PENDING.format(calls=calls)}" if pending else GO_ON


def stdio_command(bench: Workbench) -> list[str]:
    """The argument list that starts the workbench's server on stdin and stdout."""
    module = "zeromismatch.agent_tools.drivers.workbench_stdio"
    return [sys.executable, "-m", module, bench.spec, str(bench.folder.resolve()), bench.dtype,
            str(bench.seed)]  # fmt: skip


def command_line(
    program: Program, prompt: str, bench: Workbench, folder: Path, *, session: str = "",
    turns: int | None = None, money: float | None = None,
) -> list[str]:  # fmt: skip
    """The argument list; configuration files are written into ``folder``. No shell is involved.

    session: the one to go on with. turns, money: what is left of these budgets.
    """
    found = shutil.which(program)
    if found is None:
        raise CapabilityError(
            f"the program {program} is not on the PATH; install it, or use --agent autopilot"
        )
    server = stdio_command(bench)
    if program == "claude":
        config = {"mcpServers": {SERVER: {"command": server[0], "args": server[1:]}}}
        file = replace_whole(folder / "mcp.json", json.dumps(config, indent=2))
        words = [found, "-p", prompt, "--output-format", "stream-json", "--verbose", "--mcp-config",
                 str(file), "--strict-mcp-config", "--plugin-dir", str(PLUGIN), "--allowedTools",
                 f"mcp__{SERVER}"]  # fmt: skip
        words += ["--resume", session] if session else []
        words += [] if turns is None else ["--max-turns", str(turns)]
        return words + ([] if money is None else ["--max-budget-usd", str(money)])
    schema = {"type": "object", "properties": {"summary": {"type": "string"}},
              "required": ["summary"], "additionalProperties": False}  # fmt: skip
    file = replace_whole(folder / "answer-schema.json", json.dumps(schema, indent=2))
    words = [found, "exec", "--json", "--skip-git-repo-check", "--sandbox", "workspace-write",
             "--output-schema", str(file), "-o", str(folder / "answer.json"),
             "-c", f"mcp_servers.{SERVER}.command={json.dumps(server[0])}",
             "-c", f"mcp_servers.{SERVER}.args={json.dumps(server[1:])}"]  # fmt: skip
    return [*words, "resume", session, prompt] if session else [*words, prompt]
