"""External programs, by stand-ins on the PATH: what they claim counts for nothing."""

import json
import os
from pathlib import Path

import pytest

from zeromismatch.agent_tools.commands.agent import budgets_of
from zeromismatch.agent_tools.drivers.budgets import Budgets, Price
from zeromismatch.agent_tools.drivers.external import run_program
from zeromismatch.agent_tools.drivers.loop import Judgement
from zeromismatch.agent_tools.drivers.programs import Program, stdio_command
from zeromismatch.agent_tools.drivers.resume import replay
from zeromismatch.agent_tools.drivers.transcript import read_transcript
from zeromismatch.agent_tools.drivers.workbench import Workbench
from zeromismatch.kernels.errors import CapabilityError

from .stories import write_program

FREE = {
    "claude": Budgets(waive_money=True, seconds=60, turns=7),
    "codex": Budgets(waive_money=True, seconds=60, turns=None, tokens=None),
}
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


def install(path: Path, program: str, body: str) -> None:
    write_program(path / program, f"import json, os, sys, time\n{body}\n")


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
    lied = run_program(program, "task", bench, FREE[program], tmp_path / "a", judge=lambda: RED)
    assert (lied.reason, lied.exit_code, lied.detail) == ("stopped-early", 1, "C3 is red")
    true = run_program(program, "task", bench, FREE[program], tmp_path / "b", judge=lambda: GREEN)
    assert (true.reason, true.exit_code) == ("passed", 0)
    assert (true.tokens, true.calls) == (1000, 1)
    assert true.money == (0.25 if program == "claude" else None)
    kinds = [entry.kind for entry in read_transcript(tmp_path / "b")]
    assert kinds == ["begin", "stream", "stream", "stream", "exited", "verdict", "end"]
    os.remove(path / program)
    assert [replay(tmp_path / name) for name in "ab"] == [lied, true]


def test_the_programs_get_their_documented_arguments(path: Path, bench: Workbench, tmp_path: Path):
    keep = "open(os.path.join(os.path.dirname(os.getcwd()), 'argv.json'), 'w').write("
    keep += "json.dumps(sys.argv[1:]))"
    for program in ("claude", "codex"):
        install(path, program, keep)
        given = (program, "--help me; $(x)", bench, FREE[program], tmp_path / program)
        run_program(*given, judge=lambda: RED)
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
    assert codex[:5] == ["exec", "--json", "--skip-git-repo-check", "--sandbox", "workspace-write"]
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
    short = Budgets(waive_money=True, seconds=2, turns=None, tokens=None)
    found = run_program(program, "task", bench, short, tmp_path / "a", judge=lambda: RED)
    assert (found.reason, found.exit_code) == ("budget-time", 5)
    assert replay(tmp_path / "a") == found
    for entry in read_transcript(tmp_path / "a"):
        pid = entry.data.get("pid")
        state = Path(f"/proc/{pid}/stat")
        assert pid is None or not state.exists() or ") Z " in state.read_text()


@programs
def test_a_program_that_fails_or_is_missing_is_said(
    program: Program, path: Path, bench: Workbench, tmp_path: Path
):
    with pytest.raises(CapabilityError, match="not on the PATH"):
        run_program(program, "task", bench, FREE[program], tmp_path / "a", judge=lambda: GREEN)
    install(path, program, "print('no such key'); sys.exit(3)")
    found = run_program(program, "task", bench, FREE[program], tmp_path / "b", judge=lambda: RED)
    assert (found.reason, found.exit_code) == ("program-failed", 4)
    assert "no such key" in found.detail
    assert replay(tmp_path / "b") == found


def test_the_programs_own_budgets_have_their_reasons(path: Path, bench: Workbench, tmp_path: Path):
    for subtype, reason in (("error_max_turns", "budget-turns"),
                            ("error_max_budget_usd", "budget-money")):  # fmt: skip
        event = json.dumps({"type": "result", "subtype": subtype, "num_turns": "nonsense"})
        install(path, "claude", f"print({event!r})\nsys.exit(1)")
        found = run_program("claude", "t", bench, FREE["claude"], tmp_path / subtype,
                            judge=lambda: RED)  # fmt: skip
        assert (found.reason, found.exit_code) == (reason, 5)


def test_a_budget_of_zero_starts_nothing(path: Path, bench: Workbench, tmp_path: Path):
    install(path, "claude", "open('started', 'w')")
    none = Budgets(waive_money=True, turns=0)
    found = run_program("claude", "t", bench, none, tmp_path / "a", judge=lambda: GREEN)
    assert (found.reason, found.exit_code) == ("budget-turns", 5)
    assert not (tmp_path / "a" / "workspace").exists()


def step(number: int, tokens: int, *tools: str) -> dict[str, object]:
    """An ``assistant`` event as ``claude`` prints it."""
    usage = {"input_tokens": 3, "cache_read_input_tokens": tokens - 13, "output_tokens": 10}
    content = [{"type": "tool_use", "id": f"{number}-{n}", "name": name}
               for n, name in enumerate(tools)]  # fmt: skip
    return {
        "type": "assistant",
        "message": {"id": f"m{number}", "usage": usage, "content": content},
    }


def goes_on(events: list[dict[str, object]]) -> str:
    """A program that says this and then hangs, with a child."""
    said = "".join(f"print({json.dumps(json.dumps(event))}, flush=True)\n" for event in events)
    return f"{said}os.fork()\ntime.sleep(60)\n"


def test_claude_is_ended_when_its_tokens_are_used_up(path: Path, bench: Workbench, tmp_path: Path):
    events = [step(1, 400), step(1, 400), step(2, 600)]  # a step that is told twice counts once
    install(path, "claude", goes_on(events))
    for most, reason, tokens in ((1000, "budget-tokens", 1000), (1001, "budget-time", 1000)):
        budgets = Budgets(waive_money=True, tokens=most, seconds=20 if most == 1000 else 2)
        found = run_program("claude", "t", bench, budgets, tmp_path / str(most), judge=lambda: RED)
        assert (found.reason, found.exit_code, found.tokens) == (reason, 5, tokens)


@programs
def test_a_program_is_ended_when_one_tool_is_used_up(
    program: Program, path: Path, bench: Workbench, tmp_path: Path
):
    if program == "claude":
        events = [step(1, 20, "gates", "verify"), step(2, 20, "gates"), step(3, 20, "gates")]
    else:
        events = [{"type": f"item.{kind}", "item": {"id": str(n), "type": "mcp_tool_call",
                                                    "tool": tool, "result": str(n)}}
                  for n, tool in enumerate(("gates", "verify", "gates", "gates"))
                  for kind in ("started", "completed")]  # fmt: skip
    install(path, program, goes_on(events))
    for most, reason in ((2, "budget-calls"), (3, "budget-time")):
        budgets = Budgets(waive_money=True, calls=most, seconds=20 if most == 2 else 2, turns=None,
                          tokens=None)  # fmt: skip
        found = run_program(program, "t", bench, budgets, tmp_path / str(most), judge=lambda: RED)
        assert (found.reason, found.exit_code, found.calls) == (reason, 5, 4)
        assert replay(tmp_path / str(most)) == found


def test_the_programs_last_word_on_tokens_counts(path: Path, bench: Workbench, tmp_path: Path):
    usage = {"input_tokens": 900, "output_tokens": 200}
    events = [step(1, 400), {"type": "result", "subtype": "success", "usage": usage}]
    install(path, "claude", "".join(f"print({json.dumps(json.dumps(e))})\n" for e in events))
    given = ("claude", "t", bench, FREE["claude"], tmp_path / "a")
    assert run_program(*given, judge=lambda: RED).tokens == 1100


LOGS = """
place = os.path.join(os.environ["CODEX_HOME"], "sessions", "2026", "11", "30")
os.makedirs(place)
log = open(os.path.join(place, "rollout-2026-11-30T18-40-00-" + "THREAD" + ".jsonl"), "w")
print(json.dumps({"type": "thread.started", "thread_id": "THREAD"}), flush=True)
for n in (1, 2, 2, 3, 4):
    told = {"total_token_usage": {"input_tokens": 90 * n, "output_tokens": 10 * n}}
    event = {"type": "event_msg", "payload": {"type": "token_count", "info": told}}
    log.write("no json token_count\\n" + json.dumps(event) + "\\n")
    log.flush()
    item = {"id": f"i{n}", "type": "web_search", "query": str(n)}
    print(json.dumps({"type": "item.completed", "item": item}), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("name", "most", "steps"), [("turns", 2, 2), ("tokens", 250, 3), ("money", 0.3, 3)]
)
def test_codex_is_held_to_its_limits_by_its_log(
    name: str, most: float, steps: int, path: Path, bench: Workbench, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setenv("CODEX_HOME", str(tmp_path / "home"))
    install(path, "codex", LOGS)
    given = {"turns": None, "tokens": None, name: most}
    budgets = Budgets(waive_money=True, price=Price(input=1000, output=1000), seconds=20, **given)
    found = run_program("codex", "t", bench, budgets, tmp_path / "a", judge=lambda: RED)
    assert (found.reason, found.exit_code) == (f"budget-{name}", 5)
    assert (found.turns, found.tokens) >= (steps, 100 * steps)
    assert found.turns * 100 == found.tokens
    assert replay(tmp_path / "a") == found


@pytest.mark.parametrize("name", ["turns", "tokens", "money"])
def test_a_limit_that_no_log_holds_ends_codex(
    path: Path, bench: Workbench, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CODEX_HOME", str(tmp_path / "home"))
    said = LOGS.replace("token_count", "other")
    install(path, "codex", said)
    given = {"turns": None, "tokens": None, name: 7}
    budgets = Budgets(waive_money=True, price=Price(input=1, output=1), seconds=20, **given)
    found = run_program("codex", "t", bench, budgets, tmp_path / "a", judge=lambda: RED)
    assert (found.reason, found.exit_code) == ("budget-unheld", 4)
    assert "CODEX_HOME" in found.detail
    nothing = Budgets(waive_money=True, price=budgets.price, **given | {name: 0})
    found = run_program("codex", "t", bench, nothing, tmp_path / "b", judge=lambda: GREEN)
    assert (found.reason, (tmp_path / "b" / "workspace").exists()) == (f"budget-{name}", False)


@programs
def test_a_rule_that_a_tool_named_is_in_the_outcome(
    program: Program, path: Path, bench: Workbench, tmp_path: Path
):
    text = "refused, nothing was written\nrule broken: imports: os\n"
    content = [{"type": "text", "text": text}]
    if program == "codex":
        item = {"id": "i", "type": "mcp_tool_call", "server": "zero-mismatch", "tool": "admit",
                "result": {"content": content}}  # fmt: skip
        events = [{"type": "item.completed", "item": item}]
    else:
        back = {"type": "tool_result", "tool_use_id": "1-0", "content": content}
        events = [step(1, 20, "mcp__zero-mismatch__admit"),
                  {"type": "user", "message": {"content": [back]}}]  # fmt: skip
    install(path, program, "".join(f"print({json.dumps(json.dumps(e))})\n" for e in events))
    red = Judgement(passed=False, reason="r", rule="bits")
    found = run_program(program, "t", bench, FREE[program], tmp_path / "a", judge=lambda: red)
    assert found.rules == ("imports: os", "bits")
    assert replay(tmp_path / "a") == found


def test_the_options_are_the_budgets():
    given = {"minutes": 1.0, "money": None, "price": None, "waive": True, "usual": (60, 9)}
    for agent, turns, tokens in (("claude", 60, 9), ("openai", 60, 9), ("codex", None, None)):
        found = budgets_of(agent, None, None, 4, **given)
        assert (found.turns, found.tokens, found.calls) == (turns, tokens, 4)
