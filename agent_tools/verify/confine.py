"""What the kernel of the operating system enforces on a worker before it loads a candidate.

    unshare_namespaces()      # no network but an empty one, no other process in sight
    set_limits({...})         # processor time, address space, files
    drop_capabilities()
    restrict_files(readable=[...], writable=[...])     # Landlock
    filter_system_calls(threads=False, exec_=False)    # seccomp: what breaks it is killed

Each needs no privilege on a current Linux, none can be taken back, and the parent looks from
outside whether it holds (:mod:`.watch`). Functions return a reason where the machine lacks
something, and None when it is in force. Standard library only: this runs inside the worker.
"""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_SIGKILL = 9
_NEW = {"ipc": 0x08000000, "user": 0x10000000, "pid": 0x20000000, "net": 0x40000000}

# Landlock: system calls and access bits (the same numbers on every architecture).
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _READ, _READ_DIR = 1, 1 << 2, 1 << 3
_ACCESS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_ON_FILES = _EXECUTE | _READ | 1 << 1 | 1 << 14 | 1 << 15

# seccomp: numbers of what a kernel never needs, by architecture.
_NAMES = (
    "socket", "bind", "listen", "accept", "connect", "accept4", "execve", "execveat", "kill",
    "tkill", "ptrace", "mount", "umount2", "pivot_root", "chroot", "unshare", "setns",
    "perf_event_open", "process_vm_readv", "process_vm_writev", "bpf", "userfaultfd",
    "init_module", "finit_module", "delete_module", "keyctl", "add_key", "request_key", "reboot",
    "kexec_load", "open_by_handle_at", "clone",
)  # fmt: skip
_COMMON = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "pidfd_open": 434,
    "pidfd_getfd": 438,
}  # fmt: skip
_CALLS = {
    "x86_64": (0xC000003E, {**_COMMON, "fork": 57, "vfork": 58, **dict(zip(_NAMES, (
        41, 49, 50, 43, 42, 288, 59, 322, 62, 200, 101, 165, 166, 155, 161, 272, 308, 298, 310,
        311, 321, 323, 175, 313, 176, 250, 248, 249, 169, 246, 304, 56), strict=True))}),
    "aarch64": (0xC00000B7, {**_COMMON, **dict(zip(_NAMES, (
        198, 200, 201, 202, 203, 242, 221, 281, 129, 130, 117, 40, 39, 41, 51, 97, 268, 241, 270,
        271, 280, 282, 105, 273, 106, 219, 217, 218, 142, 104, 265, 220), strict=True))}),
}  # fmt: skip
_ON_GPU = (
    "execve", "execveat", "fork", "vfork", "kill", "tkill", "connect", "bind", "listen", "accept",
    "accept4",
)  # fmt: skip
_CLONE3 = 435
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_CLONE_THREAD, _AF_UNIX = 0x10000, 1
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def die_with_parent() -> None:
    """The kernel kills this process when the one that made it goes away."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def unshare_namespaces(names: Iterable[str] = ("ipc", "user", "pid", "net")) -> str | None:
    """Own network (empty), process ids (of children), IPC and users; call with one thread only."""
    uid, gid = os.getuid(), os.getgid()
    if _LIBC.unshare(sum(_NEW[name] for name in names)) != 0:
        return f"namespaces: {os.strerror(ctypes.get_errno())}"
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return None


def set_limits(limits: Mapping[str, int]) -> None:
    """Hard limits by name (``cpu``, ``as``, ``fsize``, ``nofile``, ``core``), never raised."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name.upper()}")
        held = resource.getrlimit(kind)[1]
        limit = value if held == resource.RLIM_INFINITY else min(value, held)
        soft = max(1, limit - 1) if name == "cpu" else limit
        resource.setrlimit(kind, (soft, limit))


def drop_capabilities() -> str | None:
    """No capability is left, and no program gives one back."""
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if _LIBC.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        return f"capabilities: {os.strerror(ctypes.get_errno())}"
    return None


def landlock_abi() -> int:
    """Landlock's version on this machine; 0 where there is none."""
    return max(0, _LIBC.syscall(_CREATE_RULESET, None, 0, 1))


def restrict_files(
    *, readable: Iterable[str], writable: Iterable[str], execute: bool
) -> str | None:
    """Read below some paths, write below others, nothing else; no TCP where Landlock knows it."""
    abi = landlock_abi()
    if abi == 0:
        return "landlock: this kernel has none"
    handled = _ACCESS_BY_ABI[max(known for known in _ACCESS_BY_ABI if known <= abi)]
    network, scoped = (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)
    attributes = struct.pack("=QQQ", handled, network, scoped)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _LIBC.syscall(_CREATE_RULESET, attributes[:size], size, 0)
    if ruleset < 0:
        return f"landlock: {os.strerror(ctypes.get_errno())}"
    read = _READ | _READ_DIR | (_EXECUTE if execute else 0)
    for access, paths in ((read, readable), (handled, writable)):
        for path in paths:
            _allow(ruleset, path, access & handled)
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    result = _LIBC.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return None if result == 0 else f"landlock: {os.strerror(ctypes.get_errno())}"


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a path that this machine does not have
    try:
        access &= -1 if os.path.isdir(path) else _ON_FILES
        _LIBC.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", access, handle), 0)
    finally:
        os.close(handle)


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def program(architecture: int, calls: Mapping[str, int], *, threads: bool, exec_: bool) -> bytes:
    """The filter as BPF: a forbidden call kills the process, everything else is allowed.

    threads: new threads are allowed, never new processes. exec_: so are new processes and local
    sockets (a GPU's compiler and driver need both; the driver listens on one).
    """
    wanted = dict(calls)
    clone, socket = wanted.pop("clone"), wanted.pop("socket")
    if exec_:
        for name in _ON_GPU:
            wanted.pop(name, None)
    steps = [_step(_LOAD, 4), _step(_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL)]
    steps += [_step(_LOAD, 0), _step(_AT_LEAST, 0x40000000, 0, 1), _step(_RETURN, _KILL)]
    for number in sorted(wanted.values()):
        steps += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _KILL)]
    if not exec_:
        no_clone3 = _ERRNO | errno.ENOSYS  # glibc then uses clone, whose flags a filter can read
        steps += [_step(_EQUAL, _CLONE3, 0, 1), _step(_RETURN, no_clone3)]
        allowed = _step(_ANY_BIT, _CLONE_THREAD, 1, 0) if threads else _step(_EQUAL, 1 << 31, 1, 0)
        steps += [_step(_EQUAL, clone, 0, 4), _step(_LOAD, 16), allowed, _step(_RETURN, _KILL)]
        steps += [_step(_RETURN, _ALLOW)]
    steps += [_step(_EQUAL, socket, 0, 4), _step(_LOAD, 16)]
    steps += [_step(_EQUAL, _AF_UNIX if exec_ else 1 << 31, 1, 0), _step(_RETURN, _KILL)]
    steps += [_step(_RETURN, _ALLOW), _step(_RETURN, _ALLOW)]
    return b"".join(steps)


def filter_system_calls(*, threads: bool, exec_: bool) -> str | None:
    """Install the filter for this process and whatever it starts."""
    machine = platform.machine()
    if machine not in _CALLS:
        return f"seccomp: no filter is written for {machine}"
    architecture, calls = _CALLS[machine]
    code = program(architecture, calls, threads=threads, exec_=exec_)
    held = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("@HP", len(code) // 8, ctypes.addressof(held))
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _LIBC.prctl(_PR_SET_SECCOMP, 2, head, 0, 0) != 0:
        return f"seccomp: {os.strerror(ctypes.get_errno())}"
    return None
