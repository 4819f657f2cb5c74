"""Jobs end as they should, whatever is killed: by a cancel, a limit, their starter, or themselves.

A job that asks for the result of a job whose state is a pipe stays at work until the test writes to
the pipe, and opening the pipe for writing returns at the very moment when it has begun to read.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from zeromismatch.agent_tools.jobs import supervise
from zeromismatch.agent_tools.jobs.store import Call, Store
from zeromismatch.kernels.errors import InconclusiveError, UsageError

PATIENCE = 120
PIPED = "report-ffffffffffff"
ASKED = {"job": PIPED}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path)
    yield found
    for name in os.listdir(found.root) if found.root.exists() else ():
        if name not in (PIPED, "slots"):
            with contextlib.suppress(UsageError):
                found.cancel(name, seconds=PATIENCE)


def pipe_of(store: Store) -> Path:
    """The pipe where a job's state should be."""
    folder = store.root / PIPED
    if not folder.exists():
        folder.mkdir(parents=True)
        call = Call(id=PIPED, tool="report", arguments={}, key=None, slot=False,
                    limit_seconds=1.0, created="2026")  # fmt: skip
        (folder / "call.json").write_text(call.model_dump_json())
        (folder / "lock").touch()
        os.mkfifo(folder / "state.json")
    return folder / "state.json"


def start_blocked(store: Store, **options: object) -> tuple[str, int]:
    """A job at work, and the pipe's end that it waits for."""
    pipe = pipe_of(store)
    job = store.start("job_result", ASKED, **options)
    end = os.open(pipe, os.O_WRONLY)
    until = time.monotonic() + PATIENCE
    while store.read(job.id).state == "queued":  # the pipe may have another job's reader
        assert time.monotonic() < until, "the job did not start"
    return job.id, end


def processes(folder: Path) -> list[int]:
    """Supervisor and tool of a job."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path("/proc", name, "cmdline").read_text().split("\0")
        except OSError:
            continue
        if str(folder) in words:
            found.append(int(name))
    return sorted(found)


def wait_for_end(*pids: int) -> None:
    """Return when these processes are gone; the test fails if they stay."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            file = os.pidfd_open(pid)
            ended, _, _ = select.select([file], [], [], PATIENCE)
            os.close(file)
            assert ended


def test_a_job_answers_as_the_command_does(store: Store):
    (store.workspace / "runs" / "older").mkdir(parents=True)
    job = store.wait(store.start("list_runs", {"limit": 5}).id, seconds=PATIENCE)
    assert (job.state, job.attempt) == ("done", 1)
    result = store.result(job.id)
    assert result.exit_code == 0
    assert [run["run"] for run in result.document["runs"]] == ["older"]
    assert "older" in result.text


def test_an_error_is_kept_with_its_next_step(store: Store):
    job = store.wait(store.start("report", {"run": "nowhere"}).id, seconds=PATIENCE)
    assert job.state == "failed"
    result = store.result(job.id)
    assert result.exit_code == 2
    assert result.error == job.reason
    assert "zm" in job.reason


def test_the_same_key_is_the_same_job(store: Store):
    asked = {"limit": 3}
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: store.start("list_runs", asked, key="mine"), range(8)))
    assert len({job.id for job in made}) == 1
    assert len(store.list()) == 1
    done = store.wait(made[0].id, seconds=PATIENCE)
    assert (done.state, done.attempt) == ("done", 1)
    assert store.start("list_runs", asked, key="mine") == done
    with pytest.raises(UsageError, match="another key"):
        store.start("list_runs", {"limit": 4}, key="mine")


def test_a_cancelled_job_leaves_no_process(store: Store):
    job, pipe = start_blocked(store)
    folder = store.folder(job)
    assert len(processes(folder)) == 2
    assert store.read(job).state == "running"
    ended = store.cancel(job, seconds=PATIENCE)
    os.close(pipe)
    assert ended.state == "cancelled"
    wait_for_end(*processes(folder))
    with pytest.raises(InconclusiveError, match="cancelled"):
        store.result(job)


def test_a_job_that_takes_too_long_is_ended(store: Store):
    pipe_of(store)
    job = store.start("job_result", ASKED, limit_seconds=0.1).id
    ended = store.wait(job, seconds=PATIENCE)
    assert ended.state == "timed-out"
    assert "--quick" in ended.reason
    wait_for_end(*processes(store.folder(job)))


def test_a_tool_that_is_killed_is_a_failure_with_the_signal(store: Store):
    job, pipe = start_blocked(store)
    supervisor, tool = processes(store.folder(job))
    os.kill(tool, signal.SIGKILL)
    ended = store.wait(job, seconds=PATIENCE)
    os.close(pipe)
    assert ended.state == "failed"
    assert "SIGKILL" in ended.reason
    assert supervisor != tool


def test_a_job_whose_supervisor_is_killed_died_and_can_be_started_again(store: Store):
    job, pipe = start_blocked(store, key="again")
    supervisor, tool = processes(store.folder(job))
    os.kill(supervisor, signal.SIGKILL)
    wait_for_end(supervisor, tool)  # the kernel ends the one with the other
    os.close(pipe)
    assert store.read(job).state == "died"
    assert "same key" in store.read(job).reason
    again, pipe = start_blocked(store, key="again")
    assert again == job
    os.write(pipe, b"no state")
    os.close(pipe)
    ended = store.wait(job, seconds=PATIENCE)
    assert (ended.state, ended.attempt) == ("failed", 2)  # it ran to its end: that is no state


def test_a_job_outlives_whoever_started_it(store: Store):
    pipe = pipe_of(store)
    script = (
        "import os, sys; from pathlib import Path; from zeromismatch.agent_tools.jobs.store "
        "import Store; store = Store(Path(sys.argv[1])); "
        "print(store.start('job_result', {'job': sys.argv[2]}).id, flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(store.workspace), PIPED], capture_output=True,
        text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    with pipe.open("w") as state:
        assert store.read(done.stdout.strip()).state == "running"
        state.write("no state")
    assert store.wait(done.stdout.strip(), seconds=PATIENCE).state == "failed"


def test_heavy_jobs_wait_for_a_slot(store: Store):
    held = [start_blocked(store) for _ in range(supervise.SLOTS)]
    waiting = store.start("list_runs", {}).id
    light = store.start("list_runs", {}, slot=False).id
    assert store.wait(light, seconds=PATIENCE).state == "done"
    assert store.read(waiting).state == "queued"
    job, pipe = held[0]
    store.cancel(job, seconds=PATIENCE)
    assert store.wait(waiting, seconds=PATIENCE).state == "done"
    for _, pipe in held:
        os.close(pipe)


def test_what_a_tool_leaves_behind_is_ended_too():
    script = """
import ctypes, subprocess
from zeromismatch.agent_tools.jobs import supervise
ctypes.CDLL(None).prctl(supervise.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
left = "setsid sh -c 'trap : TERM HUP; echo ready; exec sleep 1000' & read line; exit 0"
with subprocess.Popen(["sh", "-c", left], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                      start_new_session=True) as child:
    child.stdout.readline()
    child.stdin.write(b"go\\n"); child.stdin.flush(); child.wait()
    before = supervise._children()
    supervise._end_family(child)
print(len(before), len(supervise._children()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert done.stdout.split() == ["1", "0"]


def test_a_damaged_job_is_named_and_does_not_hide_the_others(store: Store):
    good = store.start("list_runs", {}, slot=False)
    bad = store.start("list_runs", {"limit": 2}, slot=False)
    for job in (good, bad):
        store.wait(job.id, seconds=PATIENCE)
    (store.folder(bad.id) / "state.json").write_text('{"state": "do')
    with pytest.raises(UsageError, match="damaged"):
        store.read(bad.id)
    assert [job.id for job in store.list()] == [good.id]


@pytest.mark.parametrize("name", ["", "../runs", "list_runs-000000000000", "a/b", "x" * 5000, "\0"])
def test_a_job_that_is_none_is_refused(store: Store, name: str):
    with pytest.raises(UsageError, match="zm job list"):
        store.read(name)


def test_a_state_is_read_whole_at_any_moment(store: Store):
    job = store.start("list_runs", {}, slot=False)
    states = []
    while not states or not states[-1].over:
        states.append(store.read(job.id))  # raises where a file is torn
    order = ["queued", "running", "done"]
    seen = [order.index(each.state) for each in states]
    assert seen == sorted(seen)


def test_a_job_that_is_being_started_does_not_look_dead(store: Store):
    """Between its folder's appearance and its supervisor's start, whoever creates it holds it."""
    seen: list[str] = []

    class Watched(Store):
        def _launch(self, folder: Path, *rest: BinaryIO) -> None:
            seen.append(store.read(folder.name).state)
            super()._launch(folder, *rest)

    job = Watched(store.workspace).start("job_list", {}, slot=False)
    assert seen == ["queued"]
    assert store.wait(job.id, seconds=PATIENCE).state == "done"


def test_a_log_is_read_in_pages(store: Store):
    job = store.wait(store.start("list_runs", {}, slot=False).id, seconds=PATIENCE)
    log = "".join(f"line {n}\n" for n in range(1000))
    (store.folder(job.id) / "log").write_text(log)
    pages, at = [], 0
    while at < len(log):
        text, at = store.log(job.id, at, 700)
        pages.append(text)
    assert "".join(pages) == log
    assert store.log(job.id, -1, 9) == ("line 999\n", len(log))
