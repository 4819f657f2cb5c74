"""Run a model's Python where it can compute and nothing else. Linux only.

A process per call, started from nothing, that confines itself before it sees the code
(:mod:`.sandbox_child`): a seccomp filter leaves it memory, clocks and the pipes that it has, so no
socket, no file, no new process, no signal to others; limits bound processor time, memory and
output; this side bounds wall time and kills it. Modules that were loaded before are there (math,
fractions, itertools, …); another import fails.

    Sandbox().run("print(6 * 7)")      # Ran(output="42\\n", end="finished")

Where the filter cannot be installed nothing runs: that is an error, never an open door.
"""

import os
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal

from ...kernels.errors import BudgetError, CapabilityError

CHILD = Path(__file__).with_name("sandbox_child.py")
READY = b"1"
START_SECONDS = 60.0

End = Literal["finished", "failed", "timeout", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of it. output: stdout and stderr together. end: finished; failed (exception, limit,
    crash); timeout (wall time); output (it wrote more than it may)."""

    output: str
    end: End

    def told(self) -> str:
        """The output, and why it ended where that is not plain."""
        ends = {"timeout": "[stopped: out of time]", "output": "[stopped: too much output]"}
        return "\n".join(part for part in (self.output.strip(), ends.get(self.end, "")) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """seconds: wall time. megabytes: address space. characters: bytes of output at most.
    preloaded: modules that the code may import."""

    seconds: float = 5.0
    megabytes: int = 512
    characters: int = 4096
    preloaded: tuple[str, ...] = (
        "collections", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
        "json", "math", "operator", "random", "re", "statistics", "string",
    )  # fmt: skip

    def check(self) -> None:
        """Raise CapabilityError unless code runs confined here."""
        self.run("pass")

    def run(self, code: str) -> Ran:
        """Run it to its end, or to a limit."""
        ready, told = os.pipe()
        # By path and without site: the child sees the standard library and none of our packages.
        command = [sys.executable, "-s", "-S", "-P", "-B", str(CHILD)]
        limits = [str(told), str(int(self.seconds) + 1), str(self.megabytes), *self.preloaded]
        with os.fdopen(ready, "rb", buffering=0) as confined:
            try:
                process = subprocess.Popen(
                    [*command, *limits],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(told,),
                    cwd="/",
                    env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
                )
            finally:
                os.close(told)
            with process:
                try:
                    ran = self._watch(process, confined, code.encode(errors="replace"))
                finally:
                    process.kill()
        if ran is None:
            raise BudgetError(
                f"the sandbox did not start in {START_SECONDS:g} s; run fewer things at once here"
            )
        return ran

    def _watch(
        self, process: "subprocess.Popen[bytes]", confined: FileIO, code: bytes
    ) -> Ran | None:
        """Feed the code, read what comes, stop at a limit; None where it did not even start.

        No wait passes START_SECONDS before the child is confined, nor ``seconds`` after.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + START_SECONDS
        held, sent, ready = bytearray(), 0, False
        os.set_blocking(process.stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(confined, selectors.EVENT_READ)
            while process.stdout in selector.get_map():
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    return _ran(held, "timeout", self.characters) if ready else None
                for key, _ in events:
                    if key.fileobj is process.stdin:
                        sent = _send(process, code, sent, selector)
                    elif key.fileobj is confined:
                        ready = confined.read(1) == READY
                        deadline = time.monotonic() + self.seconds
                        selector.unregister(confined)
                    else:
                        piece = os.read(process.stdout.fileno(), 65536)
                        held += piece
                        if not piece:
                            selector.unregister(process.stdout)
                if len(held) > self.characters:
                    return _ran(held, "output", self.characters)
        ready = ready or confined.read(1) == READY
        if not ready:
            raise CapabilityError(
                f"the sandbox could not confine itself, so nothing was run: "
                f"{held.decode(errors='replace').strip()}; use Linux with seccomp on x86-64 or "
                "arm64, or a task without tools"
            )
        try:
            failed = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:  # it closed its output and goes on
            return _ran(held, "timeout", self.characters)
        return _ran(held, "failed" if failed else "finished", self.characters)


def _ran(held: bytearray, end: End, characters: int) -> Ran:
    return Ran(output=bytes(held).decode(errors="replace")[:characters], end=end)


def _send(
    process: "subprocess.Popen[bytes]", code: bytes, sent: int, selector: selectors.BaseSelector
) -> int:
    """Write a piece of the code; close the pipe after the last, or where nobody reads."""
    assert process.stdin is not None
    try:
        sent += os.write(process.stdin.fileno(), code[sent : sent + 65536])
    except BrokenPipeError:
        sent = len(code)
    if sent >= len(code):
        selector.unregister(process.stdin)
        process.stdin.close()
    return sent
