"""Interrupted runs of external programs: their own session goes on, and no effect is repeated."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.drivers.budgets import Budgets, Price
from zeromismatch.agent_tools.drivers.external import run_program
from zeromismatch.agent_tools.drivers.loop import Judgement, Outcome
from zeromismatch.agent_tools.drivers.programs import GO_ON, Program
from zeromismatch.agent_tools.drivers.resume import replay
from zeromismatch.agent_tools.drivers.transcript import FILE, Transcript, read_transcript
from zeromismatch.agent_tools.drivers.workbench import Workbench
from zeromismatch.kernels.errors import MisalignedError, UsageError

from .stories import ID, Event, begun, ends, first, install, returned, story
from .test_resume import cut

RED = Judgement(passed=False, reason="C3 is red")
GREEN = Judgement(passed=True, reason="green")
FREE = {
    "claude": Budgets(waive_money=True, seconds=60),
    "codex": Budgets(waive_money=True, seconds=60, turns=None, tokens=None),
}
programs = pytest.mark.parametrize("program", ["claude", "codex"])
Go = Callable[..., Outcome]


@pytest.fixture
def go(tmp_path: Path) -> Go:
    bench = Workbench("tiny:llama", tmp_path / "bench")

    def go(
        program: Program, folder: Path, budgets: Budgets | None = None, *, resumed: bool = True,
        judge: Callable[[], Judgement] = lambda: GREEN, task: str = "task",
    ) -> Outcome:  # fmt: skip
        return run_program(program, task, bench, budgets or FREE[program], folder,
                           resumed=resumed, judge=judge)  # fmt: skip

    return go


def record(folder: Path, program: str, events: list[Event], elapsed: float = 5.0) -> Path:
    """A run that broke off after these events."""
    written = Transcript.begin(folder)
    written.append("begin", 0.0, {"task": "task", "provider": program, "model": "",
                                  "budgets": asdict(FREE[program]), "command": []})  # fmt: skip
    for event in events:
        written.append("stream", elapsed, event)
    (folder / "workspace").mkdir()
    (folder / "workspace" / "memory").write_text("2")
    return folder


def argv(folder: Path) -> list[list[str]]:
    """The arguments of every start in this run's folder."""
    file = folder / "workspace" / "argv"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@programs
def test_a_run_can_be_cut_anywhere_and_no_effect_is_repeated(
    program: Program, path: Path, go: Go, tmp_path: Path
):
    install(path, program)
    whole = go(program, tmp_path / "whole", resumed=False)
    entries = read_transcript(tmp_path / "whole")
    kinds = [entry.kind for entry in entries]
    assert kinds == ["begin", *["stream"] * 6, "exited", "verdict", "end"]
    shutil.rmtree(tmp_path / "whole" / "workspace")
    for lines in range(1, len(entries)):
        folder = tmp_path / f"cut-{lines}"
        cut(tmp_path / "whole", folder, lines, torn=lines % 2 == 0)
        workspace = folder / "workspace"
        workspace.mkdir()
        seen = sum(lines > line for line in (3, 5))  # the results that the session holds
        (workspace / "memory").write_text(str(seen))
        if lines > 4:  # the worst case: the call that was told had its effect before the crash
            (workspace / "effects").write_text("w")
        found = go(program, folder)
        assert found.reason == "passed", lines
        assert (workspace / "effects").read_text() == "w", lines
        if lines > 7:
            assert argv(folder) == [], "it had ended: only the judge was missing"
            assert found.model_copy(update={"seconds": 0, "transcript": ""}) == whole.model_copy(
                update={"seconds": 0, "transcript": ""}
            )
        else:
            (words,) = argv(folder)
            assert (ID in words) == (lines > 1), lines
            prompt = words[-1] if program == "codex" else words[1]
            assert (GO_ON in prompt) == (lines > 1), lines
            assert ("not known" in prompt) == (lines in (3, 5)), lines
        assert replay(folder) == found, lines


@programs
def test_a_session_is_resumed_as_its_program_wants_it(
    program: Program, path: Path, go: Go, tmp_path: Path
):
    install(path, program)
    folder = record(tmp_path / "run", program, story(program)[:3])
    go(program, folder)
    (words,) = argv(folder)
    if program == "claude":
        assert words[words.index("--resume") + 1] == ID
        assert words[0] == "-p"
        assert "--mcp-config" in words
    else:
        assert words[0] == "exec"
        assert words[-3:] == ["resume", ID, GO_ON]
        assert words.index("--sandbox") < words.index("resume")


def test_budgets_count_over_both_parts(path: Path, go: Go, tmp_path: Path):
    install(path, "claude")
    part = story("claude")[:5]  # two steps, 200 tokens, two calls
    price = Price(input=1000, output=1000)
    left = Budgets(turns=7, money=2.0, price=price, tokens=None)
    folder = record(tmp_path / "left", "claude", part)
    found = go("claude", folder, left)
    (words,) = argv(folder)
    assert words[words.index("--max-turns") + 1] == "5"
    assert float(words[words.index("--max-budget-usd") + 1]) == 2.0 - 0.2
    assert (found.turns, found.tokens, found.money, found.calls) == (5, 530, 0.7, 2)
    for name, used in (("turns", 2), ("tokens", 200), ("money", 0.2), ("seconds", 5)):
        for more in (0, 1):
            given = {"waive_money": True, "price": price, name: used + more * used}
            folder = record(tmp_path / f"{name}-{more}", "claude", part)
            found = go("claude", folder, Budgets(**given), judge=lambda: RED)
            reason = f"budget-{name.replace('seconds', 'time')}"
            started = argv(folder) != []
            assert started == bool(more), name
            assert (found.reason == reason) == (not more or name == "tokens"), name
            assert found.seconds >= 5
            assert replay(folder) == found
    folder = record(tmp_path / "calls", "claude", [*part, begun("claude", 3, "look")])
    found = go("claude", folder, Budgets(waive_money=True, calls=1), judge=lambda: RED)
    assert (found.reason, argv(folder)) == ("budget-calls", [])


def test_codex_tells_the_whole_thread_and_it_is_counted_once(
    path: Path, go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(path, "codex")
    folder = record(tmp_path / "run", "codex", story("codex"))
    found = go("codex", folder)
    assert (found.tokens, found.calls, found.turns) == (330, 2, 2)
    monkeypatch.setenv("CODEX_HOME", str(tmp_path / "home"))
    log = tmp_path / "home" / "sessions" / "2026" / "11" / "30" / f"rollout-x-{ID}.jsonl"
    log.parent.mkdir(parents=True)
    sums = ({"input_tokens": 100 * n, "output_tokens": 10 * n} for n in (1, 1, 2, 3))
    infos = ({"type": "token_count", "info": {"total_token_usage": each}} for each in sums)
    log.write_text("".join(json.dumps({"payload": each}) + "\n" for each in infos) + "half a li")
    folder = record(tmp_path / "logged", "codex", story("codex")[:5])
    found = go("codex", folder, Budgets(waive_money=True, turns=9, tokens=None))
    assert (found.reason, found.tokens, found.turns) == ("passed", 330, 3)
    assert replay(folder) == found


@programs
@pytest.mark.parametrize("events", [0, 1], ids=["nothing", "nonsense"])
def test_without_a_session_the_task_is_given_anew(
    program: Program, events: int, path: Path, go: Go, tmp_path: Path
):
    install(path, program)
    evil: Event = {"type": "thread.started", "thread_id": "--evil", "session_id": "-x"}
    folder = record(tmp_path / "run", program, [evil] * events)
    assert go(program, folder).reason == "passed"
    (words,) = argv(folder)
    assert "task" in (words[1], words[-1])
    assert not {"resume", "--resume", "--evil", "-x"} & set(words)


@programs
def test_a_call_stays_untold_until_the_model_has_answered(
    program: Program, path: Path, go: Go, tmp_path: Path
):
    """The second sitting died as it began: its session may not hold what it was told."""
    install(path, program)
    folder = record(tmp_path / "run", program, story(program)[:4])
    again, entries = Transcript.reopen(folder)
    again.append("resumed", 6.0, {"at": 5, "session": ID, "ended": False, "command": [],
                                  "budgets": entries[0].data["budgets"]})  # fmt: skip
    again.append("stream", 6.0, first(program))
    go(program, folder)
    (words,) = argv(folder)
    assert "- write" in (words[-1] if program == "codex" else words[1])


@programs
def test_what_cannot_be_resumed_is_said_and_nothing_changes(
    program: Program, path: Path, go: Go, tmp_path: Path
):
    install(path, program)
    over, torn = tmp_path / "over", tmp_path / "torn"
    go(program, over, resumed=False)
    content = (over / FILE).read_bytes()
    shutil.copytree(over, torn)
    (torn / FILE).write_bytes(content[: len(content) // 2])
    other: Program = "codex" if program == "claude" else "claude"
    open_run = record(tmp_path / "open", program, story(program)[:3])
    refused: list[tuple[str, Program, Path, dict[str, Any]]] = [
        (r"is over \(passed\)", program, over, {}),
        ("was cut", program, torn, {}),
        ("another provider", other, open_run, {}),
        ("another task", program, open_run, {"task": "other"}),
        ("does not exist", program, tmp_path / "absent", {}),
    ]
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for words, name, folder, options in refused:
        with pytest.raises(UsageError, match=words):
            go(name, folder, **options)
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before
    with pytest.raises(UsageError, match="resume that run"):
        go(program, open_run, resumed=False)


def test_the_command_line_resumes(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    install(path, "codex")
    record(tmp_path / "run" / "agent", "codex", story("codex"))
    words = ["align", "tiny:llama", "--agent", "codex", "--waive-money", "--resume", "--out"]
    assert run([*words, str(tmp_path / "absent")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert run([*words, str(tmp_path / "run")]) == 2
    assert "another task" in capsys.readouterr().err


KILLED = """
import json, sys
from pathlib import Path
from zeromismatch.agent_tools.drivers.budgets import Budgets
from zeromismatch.agent_tools.drivers.external import run_program
from zeromismatch.agent_tools.drivers.hearing import Hearing
from zeromismatch.agent_tools.drivers.workbench import Workbench
hear = Hearing.hear
Hearing.hear = lambda self, event: (hear(self, event), print(json.dumps(event), flush=True))
folder = Path(sys.argv[1])
budgets = Budgets(waive_money=True, seconds=60, turns=None, tokens=None)
run_program(sys.argv[2], "task", Workbench("tiny:llama", folder), budgets, folder)
"""


@programs
def test_a_killed_run_waits_for_its_program_and_then_goes_on(
    program: Program, path: Path, go: Go, tmp_path: Path
):
    install(path, program, after_write="print('{}', flush=True); signal.sigwait({signal.SIGUSR1})")
    folder = tmp_path / "run"
    driver = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), program], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    try:
        assert "{}\n" in iter(driver.stdout.readline, ""), "it ended before its program wrote"
    finally:
        driver.kill()
        driver.communicate(timeout=20)
    pid = int((folder / "program.lock").read_text())
    try:
        with pytest.raises(UsageError, match=f"process {pid}"):
            go(program, folder)
    finally:
        os.kill(pid, signal.SIGKILL)
    with (folder / "program.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its end takes a moment
    install(path, program)
    found = go(program, folder)
    assert found.reason == "passed"
    assert (folder / "workspace" / "effects").read_text() == "w"
    assert len(argv(folder)) == 2
    assert replay(folder) == found


@programs
def test_an_interrupted_run_goes_on(program: Program, path: Path, go: Go, tmp_path: Path):
    install(path, program, after_write="os.kill(os.getppid(), 2); sys.stdin.read(); os.abort()")
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        go(program, folder, resumed=False)
    assert replay(folder).exit_code == 130
    install(path, program)
    found = go(program, folder)
    assert (found.reason, found.calls) == ("passed", 3)
    assert (folder / "workspace" / "effects").read_text() == "w"
    assert replay(folder) == found


@programs
@pytest.mark.parametrize(
    ("name", "texts", "reason"),
    [
        ("gates", ["red"] * 3, "repeated-call"),
        ("gates", [str(n) for n in range(9)], "repeated-call"),
        ("gates", ["red", "red", "green"], "stopped-early"),
    ],
)
def test_a_program_that_goes_in_circles_is_ended(
    program: Program, name: str, texts: list[str], reason: str, path: Path, go: Go, tmp_path: Path
):
    events = [first(program)]
    for n, text in enumerate(texts):
        events += [begun(program, n, name), returned(program, n, name, text)]
    ends(path, program, [*events, begun(program, 99, "inspect")], hang=reason != "stopped-early")
    found = go(program, tmp_path / "run", resumed=False, judge=lambda: RED)
    assert (found.reason, found.exit_code) == (reason, 1)
    assert replay(tmp_path / "run") == found


@programs
def test_its_own_tools_may_be_repeated_but_not_without_news(
    program: Program, path: Path, go: Go, tmp_path: Path
):
    """A shell that is waited for is no circle; six steps without a new result are."""
    for news, reason in ((True, "stopped-early"), (False, "no-progress")):
        events = [first(program)]
        for n in range(7):
            text = str(n) if news else "the same"
            if program == "codex":
                item = {"id": f"i{n}", "type": "command_execution", "command": "ls",
                        "aggregated_output": text, "exit_code": 0}  # fmt: skip
                events.append({"type": "item.completed", "item": item})
            else:
                step = begun(program, n, "x")
                step["message"]["content"][0]["name"] = "Bash"
                events += [step, returned(program, n, "x", text)]
        ends(path, program, [*events, begun(program, 99, "inspect")], hang=not news)
        found = go(program, tmp_path / f"run-{news}", resumed=False, judge=lambda: RED)
        assert (found.reason, found.exit_code) == (reason, 1)


@programs
def test_a_replay_notices_another_story(program: Program, path: Path, go: Go, tmp_path: Path):
    """The red control of replay: records that our driver would never have written."""
    install(path, program)
    go(program, tmp_path / "run", resumed=False)
    entries = read_transcript(tmp_path / "run")
    forgeries: dict[str, Callable[[str, Event], Event]] = {
        "reason": lambda kind, data: data | ({"passed": False} if kind == "verdict" else {}),
        "tokens": lambda kind, data: data | ({"usage": {}} if "usage" in data else {}),
        "calls": lambda kind, data: {} if data.get("type") in ("assistant", "item.started",
                                                              "item.completed") else data,
    }  # fmt: skip
    for name, change in forgeries.items():
        forged = Transcript.begin(tmp_path / name)
        for entry in entries:
            forged.append(entry.kind, entry.elapsed, change(entry.kind, dict(entry.data)))
        with pytest.raises(MisalignedError, match="replay ends with"):
            replay(tmp_path / name)
