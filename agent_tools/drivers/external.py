"""External agents: the ``claude`` and ``codex`` programs, run without a person.

    outcome = run_program("claude", task, bench, budgets, folder)
    outcome = run_program("claude", task, bench, budgets, folder, resumed=True)
    replay_program(entries)

The program gets the task, the workbench's tools over stdio, and a working folder of its own. What
it prints goes into the transcript line by line, as data. What it claims counts for nothing: the
judge runs when it has ended. It is stopped, with all it started, when time, tokens or the calls of
one tool are used up, and when it goes in circles; ``claude`` holds turns and money itself, and for
``codex`` its log tells (``codex_log.py``).

Resuming hears the record again and goes on with the program's own session, told which calls were
under way: nothing repeats them. Where no session was told yet, nothing had happened: the task is
given anew. A lock that the program inherits keeps a second one out while anything of the first
lives, also when we were killed and it was not. Budgets count over all sittings.

Each sitting is ``begin`` or ``resumed``, its ``stream``, and ``exited``; a replay derives from them
how the run had to end, starts nothing, and fails where the record says otherwise.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ...kernels.errors import MisalignedError, UsageError
from .budgets import Budgets, budgets_from
from .codex_log import CodexLog
from .hearing import Hearing
from .loop import EXITS, Judgement, Outcome
from .programs import Program, command_line, go_on
from .transcript import Entry, Transcript, read_transcript, require_open
from .workbench import Workbench

WAIT_AFTER_KILL = 10.0
MAX_LINE = 200_000
LOCK = "program.lock"
SAID = ("passed", "needs-tick", "stopped-early")
"""Ends of which the judge says more."""


def run_program(
    program: Program, task: str, bench: Workbench, budgets: Budgets, folder: Path, *,
    resumed: bool = False, judge: Callable[[], Judgement] | None = None,
    progress: Callable[[str], None] = lambda s: None,
) -> Outcome:  # fmt: skip
    """Run the program to its end, then ask the judge. resumed: go on with the run in ``folder``.

    UsageError: the run is over, its file is damaged, or its program still runs.
    """
    budgets.check()
    if resumed:
        require_open(read_transcript(folder), _identity(program, task), folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder) as lock:
        sitting = _Sitting(program, task, bench, budgets, folder.resolve(), resumed)
        words = sitting.words()
        sitting.open(words)
        try:
            if sitting.due():
                sitting.listen_to(words, lock, progress)
            found = sitting.judged(judge or bench.judge)
        except KeyboardInterrupt:
            sitting.close("cancelled", EXITS["cancelled"][1])
            raise
        return sitting.close(*conclude(sitting.hearing, sitting.exited, found))


class _Sitting:
    """One process of a run, and what the transcript holds of those before it."""

    def __init__(
        self, program: Program, task: str, bench: Workbench, budgets: Budgets, folder: Path,
        resumed: bool,
    ) -> None:  # fmt: skip
        self.program: Program = program
        self.task, self.bench, self.budgets, self.folder = task, bench, budgets, folder
        self.began, self.before = time.monotonic(), 0.0
        self.hearing = Hearing()
        self.exited: Entry | None = None
        self.found = Judgement(passed=False, reason="no run")
        self.entries: list[Entry] = []
        if resumed:
            self.transcript, self.entries = Transcript.reopen(folder)
            self.before = self.entries[-1].elapsed
            self.exited = hear_again(self.hearing, self.entries, budgets)
        else:
            self.transcript = Transcript.begin(folder)

    @property
    def elapsed(self) -> float:
        """Seconds of the whole run, earlier sittings included."""
        return self.before + time.monotonic() - self.began

    def words(self) -> list[str]:
        """The command that begins, or goes on where the record ends, with what is left."""
        heard, budgets = self.hearing, self.budgets
        prompt = go_on(heard.pending) if heard.session else self.task
        turns = None if budgets.turns is None else budgets.turns - heard.turns
        money = None if budgets.money is None else budgets.money - (heard.money or 0.0)
        return command_line(
            self.program, prompt, self.bench, self.folder, session=heard.session,
            turns=turns, money=money,
        )  # fmt: skip

    def open(self, words: Sequence[str]) -> None:
        """Write that the sitting begins."""
        given = {"budgets": asdict(self.budgets), "command": list(words[1:])}
        if self.entries:
            self._write("resumed", {"at": len(self.entries), "session": self.hearing.session,
                                    "ended": self.exited is not None, **given})  # fmt: skip
        else:
            self._write("begin", {**_identity(self.program, self.task), **given})
        if self.exited is None:
            self.hearing.sit_down(self.budgets, self.elapsed)

    def due(self) -> bool:
        """Whether the program has to run: it had not ended, and nothing is used up."""
        return self.exited is None and self.hearing.stop is None

    def listen_to(self, words: list[str], lock: IO[str], progress: Callable[[str], None]) -> None:
        """Run the program, and write down what it says and how it ended."""
        progress(f"{self.program} works; its output goes to {self.transcript.path}")
        self.hearing.worked = True
        code = self._watch(words, lock)
        self.exited = self._write("exited", {"code": code})

    def judged(self, judge: Callable[[], Judgement]) -> Judgement:
        """The judge's word on what the program left; none where nothing ran."""
        self.found = judge() if self.hearing.worked else self.found
        self._write("verdict", self.found.model_dump())
        return self.found

    def close(self, reason: str, detail: str) -> Outcome:
        """Write the end."""
        heard = self.hearing
        outcome = Outcome(
            reason=reason, detail=detail, turns=heard.turns, calls=heard.calls,
            tokens=heard.usage.total, money=heard.money, seconds=self.elapsed,
            rules=rules_of(heard, self.found), transcript=str(self.transcript.path),
        )  # fmt: skip
        self._write("end", outcome.model_dump())
        return outcome

    def _write(self, kind: str, data: dict[str, Any]) -> Entry:
        return self.transcript.append(kind, self.elapsed, data)

    def _watch(self, words: list[str], lock: IO[str]) -> int | None:
        """Run and listen; the exit code, or None when the time is used up."""
        workspace = self.folder / "workspace"
        workspace.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            words, cwd=workspace, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
            pass_fds=(lock.fileno(),),
        )  # fmt: skip
        lock.truncate(0)
        lock.write(str(process.pid))
        lock.flush()

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it left running

        def listen() -> None:
            assert process.stdout is not None
            log = CodexLog() if self.program == "codex" else None
            for event in _events(process.stdout):
                self.hearing.hear(self._write("stream", event).data)
                news = log.news(self.hearing.session) if log else None
                if news is not None:
                    self.hearing.used(self._write("used", news).data)
                if self.hearing.stop is not None and process.poll() is None:
                    end()

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        seconds = self.budgets.seconds
        try:
            return process.wait(None if seconds is None else max(0.0, seconds - self.elapsed))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end()
            process.wait(WAIT_AFTER_KILL)
            listener.join(WAIT_AFTER_KILL)
            assert process.stdout is not None
            process.stdout.close()


def _identity(program: Program, task: str) -> dict[str, str]:
    """What a run is resumed with, as it began."""
    return {"task": task, "provider": program, "model": ""}


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[IO[str]]:
    """Hold the folder's lock; what we start inherits it, and holds it as long as it lives."""
    with (folder / LOCK).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise UsageError(
                f"the program of the run in {folder} still works, or something that it started "
                f"does (it was process {lock.read() or 'unknown'}); wait for it or end it first"
            ) from error
        yield lock


def hear_again(hearing: Hearing, entries: Sequence[Entry], budgets: Budgets | None) -> Entry | None:
    """Bring ``hearing`` to where the record ends; how the last sitting's program exited, if so.

    budgets: of now; None takes those of the time.
    """
    exited: Entry | None = None
    for entry in entries:
        match entry.kind:
            case "begin" | "resumed":
                if not entry.data.get("ended"):
                    hearing.sit_down(budgets or budgets_from(entry.data["budgets"]), entry.elapsed)
                    exited = None
            case "stream":
                hearing.hear(entry.data)
            case "used":
                hearing.used(entry.data)
            case "exited":
                hearing.worked, exited = True, entry
            case _:
                pass
    return exited


def conclude(hearing: Hearing, exited: Entry | None, found: Judgement) -> tuple[str, str]:
    """(reason, detail) of the end: the judge's word first, then ours, then the program's."""
    code = None if exited is None else exited.data["code"]
    late = "budget-time" if exited is not None and code is None else None
    failed = "program-failed" if code and not hearing.end else None
    judged = "passed" if found.passed else "needs-tick" if found.waits else None
    reason = judged or hearing.stop or late or failed or hearing.end or "stopped-early"
    if reason in SAID:
        return reason, found.waits or found.reason
    said = f" ({hearing.said[:300]})" if reason == "program-failed" and hearing.said else ""
    return reason, EXITS[reason][1] + said


def rules_of(hearing: Hearing, found: Judgement) -> tuple[str, ...]:
    """Rules that the tools or the judge named as broken."""
    return tuple(dict.fromkeys([*hearing.rules, *([found.rule] if found.rule else [])]))


def replay_program(entries: Sequence[Entry]) -> Outcome:
    """A finished run from its record alone; MisalignedError when it had to end another way."""
    hearing, end = Hearing(), entries[-1].data
    exited = hear_again(hearing, entries, None)
    verdicts = [entry.data for entry in entries if entry.kind == "verdict"]
    reason, rules = end["reason"], end["rules"]
    if reason != "cancelled":  # a person's decision, and so not in the record
        verdict = Judgement.model_validate(verdicts[-1])
        reason, _ = conclude(hearing, exited, verdict)
        rules = list(rules_of(hearing, verdict))
    found = {"reason": reason, "turns": hearing.turns, "calls": hearing.calls, "rules": rules,
             "tokens": hearing.usage.total, "money": hearing.money}  # fmt: skip
    for name, value in found.items():
        if end[name] != value:
            raise MisalignedError(
                f"replay ends with {name} {value}, the record with {end[name]}; replay with the "
                "version that wrote the transcript"
            )
    return Outcome.model_validate(end)


def _events(stream: IO[str]) -> Iterator[dict[str, Any]]:
    while line := stream.readline(MAX_LINE):
        try:
            event = json.loads(line)
        except ValueError:
            event = {"type": "text", "text": line.rstrip("\n")}
        if isinstance(event, dict):
            yield event
