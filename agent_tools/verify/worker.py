"""The process that workers are forked from, and how each is confined before it sees a candidate.

    python -m zeromismatch.agent_tools.verify.worker FD          started by :mod:`.watch` alone

The parent process imports torch once and never runs a candidate; each worker is a fork of it, in
namespaces of its own, whose first acts are irrevocable: limits, no capabilities, no files but the
libraries and its own folder, no system calls but those of arithmetic. ``trusted`` workers run the
baseline, or a probe that must be stopped (the red control of the isolation).
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from . import baseline, confine, frames, serve

MOST = 1 << 30
_FORBIDDEN_EVENTS = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
    "os.putenv", "os.unsetenv", "os.kill", "ctypes.dlopen", "ctypes.dlsym", "_thread.start",
    "sys.settrace", "sys.setprofile", "gc.get", "signal.", "webbrowser.", "urllib.", "shutil.",
)  # fmt: skip
_FORBIDDEN_ON_GPU = ("socket.connect", "socket.bind", "urllib.", "webbrowser.")
_FORBIDDEN_IMPORTS = frozenset(
    ("zeromismatch", "socket", "subprocess", "multiprocessing", "_posixsubprocess", "ssl", "http")
)


def main(handle: int) -> None:
    """Fork a worker for each request on the control socket, until the verifier goes away."""
    control = socket.socket(fileno=handle)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.ones(64).sum()
    frames.send(control, {"ready": True})
    while True:
        try:
            data, handles, _, _ = socket.recv_fds(control, 1 << 16, 2)
        except OSError:
            return
        if not data:
            return
        if os.fork() == 0:
            control.close()
            _hold(json.loads(data), *handles)
        for each in handles:
            os.close(each)


def _hold(settings: dict[str, Any], job: int, status: int) -> NoReturn:
    """Make the namespaces, fork the worker into them, and tell the verifier how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    confine.die_with_parent()
    own = ["ipc", "user", "net"]
    if settings.get("device", "cpu") == "cpu":
        own.append("pid")  # the driver of a GPU does not start under a process id of its own
    missing = confine.unshare_namespaces(own)
    inner = os.fork()
    if inner == 0:
        os.close(status)
        confine.die_with_parent()
        connection = socket.socket(fileno=job)
        try:
            with _Told(connection):
                _work(settings, connection, missing)
        except (frames.ClosedError, BrokenPipeError):
            os._exit(0)
        os._exit(0)
    os.close(job)
    os.write(status, f"{inner}\n".encode())
    _, code = os.waitpid(inner, 0)
    with contextlib.suppress(OSError):
        os.write(status, f"{os.waitstatus_to_exitcode(code)}\n".encode())
    os._exit(0)


@dataclass(frozen=True, slots=True)
class _Told:
    """An error of the worker itself reaches the verifier before it ends the worker.

    A candidate's own errors are its answers.
    """

    job: socket.socket

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        if kind and issubclass(kind, Exception):
            with contextlib.suppress(frames.ClosedError, frames.LateError, OSError):
                frames.send(self.job, {"failed": f"{kind.__name__}: {error}"[:400]})


def _work(settings: dict[str, Any], job: socket.socket, namespaces: str | None) -> None:
    os.setsid()
    os.chdir(settings["folder"])
    if settings.get("command"):
        _compile(settings)
    for handle in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), handle)
    gpu = settings["device"] != "cpu"
    if gpu:
        os.environ |= {"HOME": settings["folder"], "TRITON_CACHE_DIR": settings["folder"]}
    operators = serve.operators_of(settings.get("operators"))
    if settings["trusted"] and not settings.get("probe"):
        baseline.load(gpu=gpu)  # before the confinement hides a file that it needs
    missing = [namespaces, *_confined(settings)]
    torch.set_num_threads(settings["threads"])
    if settings["threads"] > 1:
        torch.ones(1 << 20).mul_(2.0).sum()  # torch's pool: threads made now are confined too
    if gpu:
        torch.zeros(1, device="cuda").add_(1)  # the driver's threads likewise
    server = serve.Server(settings["device"], settings["pattern"], operators)
    frames.send(job, {"ready": True, "missing": [each for each in missing if each]})
    if settings.get("probe"):
        head, _ = frames.receive(job, most=MOST)
        frames.send(job, {"reached": _probe(settings["probe"]), "token": head["token"]})
        return
    while True:
        head, body = frames.receive(job, most=MOST)
        if head["do"] == "load":
            answer, parts = server.load(head, lambda: _watch_events(job, gpu=gpu)), []
        elif head["do"] == "trust" and settings["trusted"]:
            answer, parts = _trust(server, head), []
        else:
            answer, parts = _answer(server, head, body)
        frames.send(job, {**answer, "token": head["token"]}, parts)


def _compile(settings: dict[str, Any]) -> NoReturn:
    """Become a compiler that sees the system's files and writes into its folder alone."""
    log = os.open("compiler.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for handle in (1, 2):
        os.dup2(log, handle)
    confine.set_limits({"cpu": 60, "core": 0, "as": 4 << 30, "fsize": 64 << 20})
    confine.drop_capabilities()
    readable, writable = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache"], [settings["folder"]]
    writable += ["/dev/null"]
    confine.restrict_files(readable=readable, writable=writable, execute=True)
    confine.filter_system_calls(threads=True, exec_=True)
    command = settings["command"]
    place = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": settings["folder"], "LANG": "C"}
    os.execve(command[0], command, place)


def _confined(settings: dict[str, Any]) -> list[str | None]:
    gpu = settings["device"] != "cpu"
    limits = {"cpu": settings["cpu_seconds"], "core": 0, "nofile": 256}
    limits["fsize"] = settings["file_bytes"] if gpu else 0
    if not gpu:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits["as"] = held + settings["memory_bytes"]
    confine.set_limits(limits)
    missing = [confine.drop_capabilities()]
    confine.die_with_parent()
    if not settings["trusted"]:
        writable = [settings["folder"], "/dev", "/proc", "/dev/shm", "/tmp"] if gpu else []
        readable = [*settings["readable"], settings["folder"]]
        missing.append(confine.restrict_files(readable=readable, writable=writable, execute=gpu))
    missing.append(confine.filter_system_calls(threads=settings["threads"] > 1, exec_=gpu))
    return missing


def _watch_events(job: socket.socket, *, gpu: bool) -> None:
    """What the static check forbids is also stopped when it happens: one frame, and the end.

    This package leaves the table of modules first, so that a candidate finds no way to it by name.
    """
    for name in [each for each in sys.modules if each.split(".")[0] == "zeromismatch"]:
        del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")
    forbidden = _FORBIDDEN_ON_GPU if gpu else _FORBIDDEN_EVENTS
    leave, send = os._exit, frames.send

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        bad = event.startswith(forbidden)
        if event == "open" and not gpu:
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            bad = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if event == "import":
            bad = str(arguments[0]).split(".")[0] in _FORBIDDEN_IMPORTS and not gpu
        if bad:
            send(job, {"banned": event, "text": str(arguments[:1])[:100]})
            leave(13)

    sys.addaudithook(hook)


def _answer(
    server: serve.Server, head: dict[str, Any], body: bytearray
) -> tuple[dict[str, Any], list[bytes]]:
    match head["do"]:
        case "call":
            return server.call(head, body)
        case "prepare":
            return server.prepare(head, body), []
        case "launch":
            return server.launch(head["entry"], head["count"]), []
        case _:
            return server.results()


def _trust(server: serve.Server, head: dict[str, Any]) -> dict[str, Any]:
    """Serve the project's own function: a contract's implementation, or a formula in torch."""
    run = baseline.find(head)
    server.entries = {"run": run, "twice": baseline.twice(run), "stale": baseline.stale(run)}
    return {"ok": True}


def _probe(kind: str) -> bool:
    """Try what the confinement must stop, and say how far it came; a kill says nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    reached = False
    if kind == "network":
        reached = libc.socket(2, 1, 0) >= 0
    elif kind == "process":
        reached = libc.fork() >= 0
    elif kind == "files":
        with contextlib.suppress(OSError):
            Path(__file__).read_bytes()
            reached = True
    return reached


if __name__ == "__main__":
    importlib.import_module("numpy")
    main(int(sys.argv[1]))
    os._exit(0)  # tearing torch down takes seconds, and nobody waits for anything in here
