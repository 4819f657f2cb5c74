"""Create, read, wait for and cancel jobs: the only module that knows what their folders look like.

Whoever creates a job takes its lock and hands the open file to the supervisor, so that at every
moment either a living process holds the lock or nobody works on the job. That is how a job that
died (the machine went down, somebody killed it) differs from one that is at work, without pids.

    job = Store(Path.cwd()).start("localize", {"model": "tiny:llama", ...}, key="my first")
    Store(Path.cwd()).wait(job.id, seconds=55).state

The same key gives the same job, whoever asks and however often; a job that died is then started
again. Left out: what tools there are (``operations.py``) and running (``supervise.py``).
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from pydantic import ValidationError

from ...kernels.errors import DiskError, InconclusiveError, UsageError
from ...kernels.files import replace_whole
from ..records import Record

State = Literal["queued", "running", "done", "failed", "cancelled", "timed-out", "died"]
FINAL: frozenset[State] = frozenset({"done", "failed", "cancelled", "timed-out"})
CALL, STATE, LOCK, LOG, RESULT, CANCEL = (
    "call.json", "state.json", "lock", "log", "result.json", "cancel",
)  # fmt: skip
JOBS = Path("runs") / "jobs"
NAME = re.compile(r"[a-z][a-z0-9_]*-[0-9a-f]{12}")
POLL_SECONDS = 0.1
LOG_TAIL = 20_000
R = TypeVar("R", bound=Record)
LOCK_STRUCT = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class Call(Record):
    """What was asked; written once. ``out``: the folder the tool writes to, if it does.

    Call(id="doctor-9f86d081884c", tool="doctor", arguments={}, key=None, slot=False,
         limit_seconds=600.0, created="2026-01-01T00:00:00+00:00")
    """

    id: str
    tool: str
    arguments: dict[str, Any]
    key: str | None
    slot: bool
    """Whether it waits for one of the slots that heavy work shares."""
    limit_seconds: float
    created: str


class Progress(Record):
    """What the supervisor writes down; ``died`` is what others see when it is gone."""

    state: State
    reason: str = ""
    started: str | None = None
    ended: str | None = None
    attempt: int = 1


class Job(Record):
    """One job as it stands. ``reason`` ends with the next step where there is one."""

    schema_version: Literal[1] = 1
    kind: Literal["job"] = "job"
    id: str
    tool: str
    arguments: dict[str, Any]
    key: str | None
    state: State
    reason: str
    stage: str
    """The last thing it said it was doing."""
    created: str
    started: str | None
    ended: str | None
    attempt: int
    log_bytes: int

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in FINAL or self.state == "died"


class Result(Record):
    """What came out: ``error`` is set where there is no answer, ``exit_code`` as in a shell."""

    document: dict[str, Any]
    text: str
    exit_code: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Store:
    """The jobs of one workspace."""

    workspace: Path

    @property
    def root(self) -> Path:
        """Where the folders of the jobs are."""
        return self.workspace / JOBS

    def folder(self, job: str) -> Path:
        """A job's folder; UsageError for a name that is none."""
        if not NAME.fullmatch(job) or not (self.root / job / CALL).is_file():
            raise UsageError(f"there is no job {job[:80]!r} here; `zm job list` names them")
        return self.root / job

    def start(
        self,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        key: str | None = None,
        slot: bool = True,
        limit_seconds: float = 3600.0,
        out: str | None = None,
    ) -> Job:
        """Start a job, or return the one that this key started. out: ``arguments`` entry to fill.

        Raises UsageError where the key belongs to other arguments, DiskError where nothing can be
        written.
        """
        seed = f"{tool}\0{key}" if key is not None else uuid.uuid4().hex
        name = f"{tool}-{hashlib.blake2b(seed.encode(), digest_size=6).hexdigest()}"
        asked = dict(arguments)
        if out is not None and asked.get(out) is None:
            asked[out] = str(Path("runs") / name)
        call = Call(
            id=name, tool=tool, arguments=asked, key=key, slot=slot,
            limit_seconds=limit_seconds, created=_now(),
        )  # fmt: skip
        with self._create(call) or (self.root / name / LOCK).open("r+b") as lock:
            known = _load(Call, self.root / name / CALL)
            if (known.tool, known.arguments) != (call.tool, call.arguments):
                raise UsageError(
                    f"the key {key!r} belongs to job {name} with other arguments; use another key"
                )
            if self.read(name).state not in FINAL:
                self._launch(self.root / name, lock)
        return self.read(name)

    def read(self, job: str) -> Job:
        """The job as it stands now."""
        folder = self.folder(job)
        call = _load(Call, folder / CALL)
        alive = _held(folder / LOCK)  # asked before the state is read: it may end in between
        noted = _load(Progress, folder / STATE) if (folder / STATE).exists() else None
        progress = noted or Progress(state="queued")
        if progress.state not in FINAL and not alive:
            progress = _gone(folder, progress)
        return Job(
            id=call.id, tool=call.tool, arguments=call.arguments, key=call.key,
            state=progress.state, reason=progress.reason, stage=_stage(folder / LOG),
            created=call.created, started=progress.started, ended=progress.ended,
            attempt=progress.attempt, log_bytes=_size(folder / LOG),
        )  # fmt: skip

    def list(self) -> list[Job]:
        """All jobs, the newest first."""
        names = os.listdir(self.root) if self.root.is_dir() else []
        found: list[Job] = []
        for name in names:
            if NAME.fullmatch(name):
                with contextlib.suppress(UsageError):  # removed by somebody just now
                    found.append(self.read(name))
        return sorted(found, key=lambda job: (job.created, job.id), reverse=True)

    def wait(self, job: str, *, seconds: float) -> Job:
        """The job once it is over, or as it stands after ``seconds``."""
        until = time.monotonic() + seconds
        while not (found := self.read(job)).over and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return found

    def result(self, job: str) -> Result:
        """What a job gave, an error included; InconclusiveError while it has nothing to show."""
        found = self.read(job)
        path = self.folder(job) / RESULT
        if found.state in ("done", "failed") and path.is_file():
            return _load(Result, path)
        if found.over:
            raise InconclusiveError(f"job {job} is {found.state}: {found.reason}")
        raise InconclusiveError(
            f"job {job} is {found.state} ({found.stage or 'not begun'}); wait with `zm job show "
            f"{job} --wait 50`, or read its log"
        )

    def cancel(self, job: str, *, seconds: float = 10.0) -> Job:
        """End a job with all its processes; one that is over stays as it is."""
        folder = self.folder(job)
        if not self.read(job).over:
            (folder / CANCEL).touch()
        return self.wait(job, seconds=seconds)

    def log(self, job: str, offset: int = 0, limit: int = LOG_TAIL) -> tuple[str, int]:
        """(text, where to read on): ``limit`` bytes of the log from ``offset``, -1 for its end."""
        path = self.folder(job) / LOG
        size = _size(path)
        start = max(0, size - limit) if offset < 0 else min(offset, size)
        if not size:
            return "", 0
        with path.open("rb") as file:
            file.seek(start)
            read = file.read(limit)
        return read.decode(errors="replace"), start + len(read)

    def _create(self, call: Call) -> BinaryIO | None:
        """Make the folder appear whole, its lock taken; None where it is there already."""
        final = self.root / call.id
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(prefix=".new-", dir=self.root))
            try:
                replace_whole(part / CALL, call.model_dump_json(indent=2) + "\n")
                (part / LOG).touch()
                with contextlib.ExitStack() as undo:
                    lock = undo.enter_context((part / LOCK).open("w+b"))
                    _take(lock)  # before anybody sees the job: one that nobody holds looks dead
                    part.rename(final)
                    undo.pop_all()
            except OSError:
                shutil.rmtree(part, ignore_errors=True)
                if not (final / CALL).is_file():
                    raise
                return None
        except OSError as error:
            raise DiskError(
                f"cannot create a job in {self.root}: {error.strerror}; free some room or serve "
                "another workspace"
            ) from error
        return lock

    def _launch(self, folder: Path, lock: BinaryIO) -> None:
        """Give a job to a new supervisor, unless one has it."""
        if not _take(lock):
            return
        (folder / CANCEL).unlink(missing_ok=True)
        noted = _load(Progress, folder / STATE) if (folder / STATE).exists() else None
        attempt = 1 if noted is None else noted.attempt + 1
        if noted is not None and noted.state in FINAL:
            return
        replace_whole(folder / STATE, Progress(state="queued", attempt=attempt).model_dump_json())
        with (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.supervise", str(folder), str(lock.fileno())],
                cwd=self.workspace, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=(lock.fileno(),), start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=process.wait, daemon=True).start()  # no zombie, no waiting here


def _gone(folder: Path, progress: Progress) -> Progress:
    if (folder / CANCEL).exists():
        return progress.model_copy(update={"state": "cancelled", "reason": "it was cancelled"})
    reason = "its process is gone without a word; start it again with the same key"
    return progress.model_copy(update={"state": "died", "reason": reason})


def _held(lock: Path) -> bool:
    """Whether a living process holds the lock; asks without taking it, even for a moment."""
    wanted = struct.pack(LOCK_STRUCT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with lock.open("rb") as file:
        answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, wanted)
    return struct.unpack(LOCK_STRUCT, answer)[0] != fcntl.F_UNLCK


def _take(lock: BinaryIO) -> bool:
    """Lock an open file; the lock goes to whoever inherits it and ends with the last of them."""
    wanted = struct.pack(LOCK_STRUCT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, wanted)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _load(kind: type[R], path: Path) -> R:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(f"{path} is damaged or was edited ({error}); remove its folder") from error


def _stage(log: Path) -> str:
    """The last line that a command's progress wrote."""
    size = _size(log)
    if not size:
        return ""
    with log.open("rb") as file:
        file.seek(max(0, size - 4000))
        lines = file.read().decode(errors="replace").splitlines()
    told = [line for line in lines if line.startswith("zm: ")]
    return told[-1].removeprefix("zm: ")[:300] if told else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def as_plain(record: Record) -> dict[str, Any]:
    """The record as JSON would have it."""
    return json.loads(record.model_dump_json())
