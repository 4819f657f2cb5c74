"""The outer process of a job: waits for a slot, runs the tool in a child, writes what became of it.

It holds the job's lock (an open file it was given) until it ends, so a lock that nobody holds means
a job that nobody works on. The child is ended, with everything that it started, when the job is
cancelled, takes too long, or leaves processes behind; if this process is killed, the kernel ends
the child. Imports little: dozens of these may wait at once.

    python -m zeromismatch.agent_tools.jobs.supervise FOLDER LOCK_FD      # `store.py` calls it
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path

from ...kernels.files import replace_whole

SLOTS = max(2, (os.cpu_count() or 2) // 4)
POLL_SECONDS = 0.2
PR_SET_CHILD_SUBREAPER = 36


class _Ended(Exception):
    """The job ends before its tool does: state and reason."""

    def __init__(self, state: str, reason: str):
        super().__init__(reason)
        self.state = state


def supervise(folder: Path) -> str:
    """Run the job in ``folder`` to its end and return the state that was written."""
    call = json.loads((folder / "call.json").read_text())
    noted = json.loads((folder / "state.json").read_text())
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        with _slot(folder) if call["slot"] else contextlib.nullcontext():
            noted |= {"state": "running", "started": _now()}
            replace_whole(folder / "state.json", json.dumps(noted))
            state, reason = _run(folder, call["limit_seconds"])
    except _Ended as end:
        state, reason = end.state, str(end)
    noted |= {"state": state, "reason": reason, "ended": _now()}
    replace_whole(folder / "state.json", json.dumps(noted))
    return state


def _run(folder: Path, limit: float) -> tuple[str, str]:
    command = [sys.executable, "-m", f"{__package__}.perform", str(folder), str(os.getpid())]
    (folder / "result.json").unlink(missing_ok=True)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as child:
        try:
            _watch(folder, child.pid, limit)
        finally:
            _end_family(child)
        code = child.returncode
    if (folder / "result.json").is_file():
        error = json.loads((folder / "result.json").read_text())["error"]
        return ("done", "") if error is None else ("failed", error)
    if code < 0:
        name = signal.Signals(-code).name
        spent = "; most often memory is spent: use --quick or a smaller model"
        return "failed", f"the tool was ended by {name}{spent if code == -9 else ''}; see its log"
    return "failed", f"the tool ended with code {code} and no answer; see its log"


def _watch(folder: Path, pid: int, limit: float) -> None:
    """Return when the child has ended; raises _Ended where it must be ended."""
    until = time.monotonic() + limit
    child = os.pidfd_open(pid)
    try:
        ended = select.poll()
        ended.register(child, select.POLLIN)
        while not ended.poll(POLL_SECONDS * 1000):
            _stop_if_cancelled(folder)
            if time.monotonic() > until:
                raise _Ended(
                    "timed-out", f"it took more than {limit:.0f} s; ask for less, or for --quick"
                )
    finally:
        os.close(child)


def _stop_if_cancelled(folder: Path) -> None:
    if (folder / "cancel").exists():
        raise _Ended("cancelled", "it was cancelled; start it again under another key")


@contextlib.contextmanager
def _slot(folder: Path) -> Generator[None]:
    """Hold one of the slots that heavy jobs of a workspace share, waiting for it if need be."""
    slots = folder.parent / "slots"
    slots.mkdir(exist_ok=True)
    with contextlib.ExitStack() as files:
        locks = [files.enter_context((slots / str(n)).open("ab")) for n in range(SLOTS)]
        while not any(_taken(lock) for lock in locks):
            _stop_if_cancelled(folder)
            time.sleep(POLL_SECONDS)
        yield


def _taken(lock: object) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
    except BlockingIOError:
        return False
    return True


def _end_family(child: "subprocess.Popen[bytes]") -> None:
    """Kill the child and all that descends from it; orphans are handed to this process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    while rest := _children():
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            for pid in rest:
                os.waitpid(pid, 0)


def _children() -> list[int]:
    """Processes whose parent is this one (a process between them that dies makes more of them)."""
    found: list[int] = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            stat = Path("/proc", name, "stat").read_text()
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


if __name__ == "__main__":
    supervise(Path(sys.argv[1]))
