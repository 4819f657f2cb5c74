"""External programs, by stand-ins on the PATH: what they claim counts for nothing."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from zeromismatch.agent_tools.drivers.agents import Agent, outcome_of
from zeromismatch.agent_tools.drivers.budgets import Budgets
from zeromismatch.agent_tools.drivers.external import Program, run_program, stdio_command
from zeromismatch.agent_tools.drivers.loop import Judgement
from zeromismatch.agent_tools.drivers.transcript import read_transcript
from zeromismatch.agent_tools.drivers.workbench import Workbench
from zeromismatch.kernels.errors import CapabilityError, UsageError

FREE = Budgets(waive_money=True, seconds=60, turns=7)
RED = Judgement(passed=False, reason="C3 is red")
GREEN = Judgement(passed=True, reason="green")
CLAIMS = {
    "claude": [
        {"type": "assistant", "message": {"content": [{"type": "tool_use", "name": "gates"}]}},
        {"type": "result", "subtype": "success", "num_turns": 3, "total_cost_usd": 0.25,
         "result": "All gates are green!", "usage": {"input_tokens": 900, "output_tokens": 100}},
    ],
    "codex": [
        {"type": "item.completed", "item": {"type": "mcp_tool_call"}},
        {"type": "turn.completed", "usage": {"input_tokens": 900, "output_tokens": 100}},
    ],
}  # fmt: skip
programs = pytest.mark.parametrize("program", ["claude", "codex"])


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def install(path: Path, program: str, body: str) -> None:
    file = path / program
    file.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{body}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def says(program: str) -> str:
    return "".join(f"print({json.dumps(json.dumps(event))})\n" for event in CLAIMS[program])


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench("tiny:llama", tmp_path / "bench")


@programs
def test_a_claim_of_success_is_judged_by_the_gates(
    program: Program, path: Path, bench: Workbench, tmp_path: Path
):
    install(path, program, says(program) + "print('no json')")
    lied = run_program(program, "task", bench, FREE, tmp_path / "a", judge=lambda: RED)
    assert (lied.reason, lied.exit_code, lied.detail) == ("stopped-early", 1, "C3 is red")
    true = run_program(program, "task", bench, FREE, tmp_path / "b", judge=lambda: GREEN)
    assert (true.reason, true.exit_code) == ("passed", 0)
    assert (true.tokens, true.calls) == (1000, 1)
    assert true.money == (0.25 if program == "claude" else None)
    kinds = [entry.kind for entry in read_transcript(tmp_path / "b")]
    assert kinds == ["begin", "stream", "stream", "stream", "verdict", "end"]


def test_the_programs_get_their_documented_arguments(path: Path, bench: Workbench, tmp_path: Path):
    keep = "open(os.path.join(os.path.dirname(os.getcwd()), 'argv.json'), 'w').write("
    keep += "json.dumps(sys.argv[1:]))"
    for program in ("claude", "codex"):
        install(path, program, keep)
        run_program(program, "--help me; $(x)", bench, FREE, tmp_path / program, judge=lambda: RED)
    claude = json.loads((tmp_path / "claude" / "argv.json").read_text())
    assert claude[:5] == ["-p", "--help me; $(x)", "--output-format", "stream-json", "--verbose"]
    assert "--strict-mcp-config" in claude
    assert claude[claude.index("--max-turns") + 1] == "7"
    config = json.loads(Path(claude[claude.index("--mcp-config") + 1]).read_text())
    server = config["mcpServers"]["zero-mismatch"]
    assert [server["command"], *server["args"]] == stdio_command(bench)
    plugin = Path(claude[claude.index("--plugin-dir") + 1])
    assert (plugin / "skills" / "align-model" / "SKILL.md").is_file()
    codex = json.loads((tmp_path / "codex" / "argv.json").read_text())
    assert codex[:4] == ["exec", "--json", "--sandbox", "workspace-write"]
    assert codex[-1] == "--help me; $(x)"
    assert (
        json.loads(Path(codex[codex.index("--output-schema") + 1]).read_text())["type"] == "object"
    )


@programs
def test_a_program_that_hangs_is_ended_with_all_it_started(
    program: Program, path: Path, bench: Workbench, tmp_path: Path
):
    child = "pid = os.fork()\nprint(json.dumps({'pid': pid or os.getpid()}), flush=True)\n"
    install(path, program, child + "time.sleep(60)")
    short = Budgets(waive_money=True, seconds=2)
    found = run_program(program, "task", bench, short, tmp_path / "a", judge=lambda: RED)
    assert (found.reason, found.exit_code) == ("budget-time", 5)
    for entry in read_transcript(tmp_path / "a"):
        pid = entry.data.get("pid")
        state = Path(f"/proc/{pid}/stat")
        assert pid is None or not state.exists() or ") Z " in state.read_text()


@programs
def test_a_program_that_fails_or_is_missing_is_said(
    program: Program, path: Path, bench: Workbench, tmp_path: Path
):
    with pytest.raises(CapabilityError, match="not on the PATH"):
        run_program(program, "task", bench, FREE, tmp_path / "a", judge=lambda: GREEN)
    install(path, program, "sys.exit(3)")
    found = run_program(program, "task", bench, FREE, tmp_path / "b", judge=lambda: RED)
    assert (found.reason, found.exit_code) == ("program-failed", 4)


def test_the_programs_own_budgets_have_their_reasons(path: Path, bench: Workbench, tmp_path: Path):
    for subtype, reason in (("error_max_turns", "budget-turns"),
                            ("error_max_budget_usd", "budget-money")):  # fmt: skip
        event = json.dumps({"type": "result", "subtype": subtype, "num_turns": "nonsense"})
        install(path, "claude", f"print({event!r})\nsys.exit(1)")
        found = run_program("claude", "t", bench, FREE, tmp_path / subtype, judge=lambda: RED)
        assert (found.reason, found.exit_code) == (reason, 5)


def test_a_budget_of_zero_starts_nothing(path: Path, bench: Workbench, tmp_path: Path):
    install(path, "claude", "open('started', 'w')")
    none = Budgets(waive_money=True, turns=0)
    found = run_program("claude", "t", bench, none, tmp_path / "a", judge=lambda: GREEN)
    assert (found.reason, found.exit_code) == ("budget-turns", 5)
    assert not (tmp_path / "a" / "workspace").exists()


def test_runs_of_programs_are_not_resumed(path: Path, bench: Workbench):
    install(path, "codex", "pass")
    with pytest.raises(UsageError, match="not resumed"):
        outcome_of(bench, Agent(name="codex", resumed=True), FREE, judge=lambda: RED)
    assert os.listdir(path) == ["codex"]
