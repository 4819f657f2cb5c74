"""The verifier's side of a worker: start it, look at it from outside, ask it, end it.

    with Nursery() as nursery:
        worker = nursery.start(folder, threads=1, pattern="nan")
        worker.ask({"do": "load", "source": "candidate.py"}, seconds=10)

A worker that answers late, dies, or says what no worker says ends with a :class:`StoppedError`
that names the rule. Leaving a block ends every process it started: the kernel kills a worker's
whole process-id namespace with it.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ...kernels.errors import CapabilityError
from ...model_recipes.native import errors_of
from . import frames
from .records import Isolation, Limits

MOST = 1 << 30
START_SECONDS = 120.0
IDLE_SECONDS, IDLE_WORK_NS = 0.05, 1_000_000
REQUIRED = ("seccomp", "landlock", "capabilities")
"""Without one of these nothing is verified, unless the caller says so. Namespaces come on top."""
_HELD = (
    ("capabilities", "CapEff", "0" * 16),
    ("no-new-privileges", "NoNewPrivs", "1"),
    ("seccomp", "Seccomp", "2"),
)
_SIGSYS, _SIGXCPU, _SIGKILL = 31, 24, 9
_SYSTEM = (
    "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/etc/ld.so.cache",
    "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system", "/dev/null", "/dev/urandom",
)  # fmt: skip
_GPU = ("/usr", "/bin", "/etc", "/opt", "/proc", "/sys", "/dev")


class StoppedError(Exception):
    """The candidate broke a rule that ends its worker."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail


def readable(gpu: bool) -> list[str]:
    """What a worker may read: Python, installed packages without this one, system libraries."""
    prefixes = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    paths = [*_SYSTEM, *(_GPU if gpu else ()), *map(str, prefixes), f"{sys.base_prefix}/lib"]
    own = str(Path(__file__).resolve().parents[2])
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        if Path(folder).is_dir():
            paths += [
                str(entry) for entry in Path(folder).iterdir()
                if not entry.name.startswith(("zeromismatch", "zero_mismatch", "__editable__"))
                and not own.startswith(str(entry.resolve()))
            ]  # fmt: skip
    return paths


class Worker:
    """One confined process; every request has a deadline."""

    def __init__(
        self, job: socket.socket, status: int, limits: Limits, *, device: str = "cpu"
    ) -> None:
        self.device = device
        self._job, self._status, self._limits = job, status, limits
        self._handle: int | None = None
        self._count = 0
        self.pid = 0
        self.missing: tuple[str, ...] = ()

    def begin(self) -> None:
        """Wait until it is confined, and keep a handle that no other process can inherit."""
        deadline = time.monotonic() + START_SECONDS
        self.pid = int(self._line(deadline))
        self._handle = os.pidfd_open(self.pid)
        head, _ = self._receive(deadline)
        self.missing = tuple(str(each) for each in head.get("missing", ()))

    def wait(self, seconds: float) -> int:
        """How it ended by itself: the exit code, or minus the signal."""
        deadline = time.monotonic() + seconds
        self.pid = int(self._line(deadline))
        self._handle = os.pidfd_open(self.pid)
        return int(self._line(deadline))

    def ask(
        self, head: dict[str, Any], parts: tuple[bytes, ...] | list[bytes] = (), *,
        seconds: float | None = None, most: int = MOST,
    ) -> tuple[dict[str, Any], bytearray]:  # fmt: skip
        """Send a request and wait for its answer; StoppedError where there is none, or another."""
        self._count += 1
        token = f"{self._count}-{secrets.token_hex(8)}"
        self.tell({**head, "token": token}, parts)
        deadline = time.monotonic() + (seconds or self._limits.call_seconds)
        answer, body = self._receive(deadline, most=most)
        if answer.pop("token", None) != token:
            raise StoppedError("protocol", "an answer that nobody asked for")
        return answer, body

    def tell(self, head: dict[str, Any], parts: tuple[bytes, ...] | list[bytes] = ()) -> None:
        """Send a request."""
        self._job.settimeout(self._limits.call_seconds)
        try:
            frames.send(self._job, head, parts)
        except (frames.ClosedError, frames.LateError) as error:
            raise self._fate() from error

    def _receive(self, deadline: float, *, most: int = MOST) -> tuple[dict[str, Any], bytearray]:
        try:
            head, body = frames.receive(self._job, deadline, most=most)
        except frames.LateError as error:
            raise StoppedError("time", "did not answer in time and was stopped") from error
        except frames.ClosedError as error:
            raise self._fate() from error
        if "banned" in head:
            raise StoppedError("runtime-ban", f"{head['banned']} {head.get('text', '')}".strip())
        if "failed" in head:
            raise StoppedError("protocol", f"the worker failed: {head['failed']}")
        return head, body

    def _fate(self) -> StoppedError:
        """Why the worker is gone, from how it ended."""
        self._job.setblocking(False)
        with contextlib.suppress(OSError, frames.ClosedError, frames.LateError):
            head, _ = frames.receive(self._job, time.monotonic() + 1.0, most=MOST)
            if "banned" in head:
                return StoppedError("runtime-ban", f"{head['banned']} {head.get('text', '')}")
        try:
            code = int(self._line(time.monotonic() + 2.0))
        except (ValueError, frames.LateError):
            return StoppedError("protocol", "the worker's connection ended while it still runs")
        if code == -_SIGSYS:
            return StoppedError("syscall", "made a forbidden system call and was killed")
        if code in (-_SIGXCPU, -_SIGKILL):
            return StoppedError("time", "used up its processor time and was killed")
        if code < 0:
            name = signal.Signals(-code).name
            return StoppedError("crash", f"died of {name}")
        return StoppedError("protocol", f"the worker left with code {code}")

    def _line(self, deadline: float) -> str:
        held = b""
        while not held.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._status], [], [], left)[0]:
                raise frames.LateError
            piece = os.read(self._status, 1)
            if not piece:
                break
            held += piece
        return held.decode().strip()

    def seen(self) -> tuple[str, ...]:
        """Isolation in force on every thread, read from /proc by the verifier, not told to it.

        Landlock alone does not show there: a worker's word, and a probe in the same run.
        """
        threads = [
            dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
            for text in (
                (task / "status").read_text() for task in Path(f"/proc/{self.pid}/task").iterdir()
            )
        ]
        active = ["limits"]
        for name, field, wanted in _HELD:
            active += [name] if all(each.get(field) == wanted for each in threads) else []
        active += [] if any("landlock" in each for each in self.missing) else ["landlock"]
        for name in ("user", "net", "pid", "ipc"):
            if os.readlink(f"/proc/{self.pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
                active.append(f"{name}-namespace")
        return tuple(active)

    def worked_ns(self) -> int:
        """Processor time of all its threads, in nanoseconds."""
        total = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError):
                total += int((task / "schedstat").read_text().split()[0])
        return total

    def check_idle(self) -> None:
        """It has answered, so it has nothing to do: StoppedError where it works on."""
        try:
            before = self.worked_ns()
            spoke = select.select([self._job], [], [], IDLE_SECONDS)[0]
            after = self.worked_ns()
        except OSError as error:
            raise self._fate() from error
        if spoke:
            self._receive(time.monotonic() + 1.0)
            raise StoppedError("protocol", "an answer that nobody asked for")
        if after - before > IDLE_WORK_NS:
            detail = f"used {(after - before) / 1e6:.0f} ms of processor time after it returned"
            raise StoppedError("background", detail)

    def end(self) -> None:
        """Kill it and all it started; wait until it is gone."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            select.select([self._handle], [], [], 5.0)
            with contextlib.suppress(frames.LateError):
                self._line(time.monotonic() + 5.0)  # told once it is reaped
            os.close(self._handle)
            self._handle = None
            os.close(self._status)
            self._job.close()


class Nursery:
    """A clean process with torch in it, and the workers that were forked from it."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._workers: list[Worker] = []

    def __enter__(self) -> "Nursery":
        ours, theirs = socket.socketpair()
        package = Path(__file__).absolute().parents[3]
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_WAIT_POLICY": "passive",
        }  # fmt: skip
        for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "CUDA_HOME"):
            if name in os.environ:
                environment[name] = os.environ[name]
        command = [sys.executable, "-P", "-s", "-m", f"{__package__}.worker", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, cwd="/",
        )  # fmt: skip
        theirs.close()
        self._control, self._started = ours, False
        return self

    def _wait(self) -> None:
        if self._started:
            return
        try:
            frames.receive(self._control, time.monotonic() + START_SECONDS, most=0)
        except (frames.ClosedError, frames.LateError) as error:
            self._process.kill()
            said = (self._process.stderr.read() if self._process.stderr else b"").decode()[-400:]
            raise CapabilityError(
                f"the worker process did not start ({said.strip() or error}); `zm doctor` shows "
                "what is missing"
            ) from error
        self._started = True

    def start(
        self, folder: Path, *, threads: int = 1, pattern: str | None = None, device: str = "cpu",
        trusted: bool = False, probe: str | None = None,
        operators: Mapping[str, Any] | None = None,
    ) -> Worker:  # fmt: skip
        """Fork a worker whose working directory is ``folder``, and wait until it is confined.

        operators: those of this package that it imports before, for a candidate that may use them.
        """
        settings = {
            "folder": str(folder), "threads": threads, "pattern": pattern, "device": device,
            "trusted": trusted, "probe": probe, "readable": readable(device != "cpu"),
            "cpu_seconds": self.limits.cpu_seconds, "memory_bytes": self.limits.memory_bytes,
            "file_bytes": self.limits.file_bytes, "operators": operators,
        }  # fmt: skip
        worker = self._fork(settings)
        try:
            worker.begin()
        except (frames.LateError, ValueError, StoppedError, ProcessLookupError) as error:
            raise CapabilityError(
                f"a worker could not be confined ({error}); `zm doctor` shows what is missing"
            ) from error
        return worker

    def end_workers(self) -> None:
        """End every worker that is left; the clean process stays."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _fork(self, settings: dict[str, Any]) -> Worker:
        self._wait()
        ours, theirs = socket.socketpair()
        status, told = os.pipe()
        socket.send_fds(self._control, [json.dumps(settings).encode()], [theirs.fileno(), told])
        theirs.close()
        os.close(told)
        worker = Worker(ours, status, self.limits, device=settings.get("device", "cpu"))
        self._workers.append(worker)
        return worker

    def compile(self, folder: Path, command: list[str], *, seconds: float) -> None:
        """Run a compiler in ``folder``, confined; StoppedError where it fails or takes too long."""
        worker = self._fork({"folder": str(folder), "command": command})
        try:
            code = worker.wait(seconds)
        except frames.LateError as error:
            raise StoppedError("time", "took too long to compile") from error
        finally:
            worker.end()
        if code != 0:
            said = (folder / "compiler.log").read_text(errors="replace")
            raise StoppedError("load", f"C++ does not compile: {errors_of(said)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.end_workers()
        self._control.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def isolation(worker: Worker, allowed: frozenset[str]) -> Isolation:
    """What holds this worker; CapabilityError where a required part is missing and not waived."""
    active = worker.seen()
    missing = tuple(name for name in REQUIRED if name not in active)
    refused = [name for name in missing if name not in allowed]
    if refused:
        raise CapabilityError(
            f"this machine does not give a worker {', '.join(refused)} "
            f"({'; '.join(worker.missing)}): verify on another machine, or, for a candidate that "
            f"you trust, pass --allow-missing {','.join(refused)}"
        )
    extra = tuple(each for each in worker.missing if each.startswith("namespaces"))
    return Isolation(active=active, missing=(*missing, *extra), waived=missing)
