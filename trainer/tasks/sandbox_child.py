"""The sandbox's process: confine this process for good, then run the code that comes on stdin.

Started by path as ``python -s -S -P -B sandbox_child.py READY CPU MEGABYTES MODULE…`` by
:mod:`.sandbox`; it imports nothing of this project. After the limits and the filter are in place it
writes one byte to the descriptor READY, and only then compiles the code.

The filter is a list of what is allowed; every other system call fails with EPERM. What is allowed
reads and writes open pipes, maps memory, sleeps, tells the time and exits. It cannot be taken off
again (``PR_SET_NO_NEW_PRIVS``).
"""

import ctypes
import importlib
import os
import platform
import resource
import struct
import sys
import traceback
from types import TracebackType

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # DENY: the call returns EPERM
NUMBER_AT, ARCHITECTURE_AT = 0, 4

# read write close fstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn
# mremap madvise getpid gettid exit exit_group futex sched_yield nanosleep clock_nanosleep
# clock_gettime gettimeofday times getrusage getrandom sigaltstack
ALLOWED = {
    "x86_64": (0xC000003E, (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 25, 28, 39, 186, 60, 231, 202,
                            24, 35, 230, 228, 96, 100, 98, 318, 131)),
    "aarch64": (0xC00000B7, (63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 216, 233, 172,
                             178, 93, 94, 98, 124, 101, 115, 113, 169, 153, 165, 278, 132)),
}  # fmt: skip


def _instruction(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
    return struct.pack("HBBI", code, jump_true, jump_false, value)


def _program(architecture: int, allowed: tuple[int, ...]) -> bytes:
    """The filter: another architecture's call kills, a listed one passes, the rest fails."""
    body = [
        _instruction(LOAD, 0, 0, ARCHITECTURE_AT),
        _instruction(JUMP_IF_EQUAL, 1, 0, architecture),
        _instruction(RETURN, 0, 0, KILL),
        _instruction(LOAD, 0, 0, NUMBER_AT),
    ]
    for left, number in zip(range(len(allowed), 0, -1), allowed, strict=True):
        body.append(_instruction(JUMP_IF_EQUAL, left, 0, number))
    return b"".join([*body, _instruction(RETURN, 0, 0, DENY), _instruction(RETURN, 0, 0, ALLOW)])


def _limit(cpu_seconds: int, megabytes: int) -> None:
    size = megabytes << 20
    for what, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(what, (value, value))


def _confine() -> None:
    """Install the filter, or exit."""
    if platform.machine() not in ALLOWED:
        sys.exit(f"no list of system calls for {platform.machine()}")
    program = _program(*ALLOWED[platform.machine()])
    held = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    )
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    steps = (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0),
    )
    for arguments in steps:
        if prctl(*(ctypes.c_ulong(value) for value in arguments)):
            sys.exit(f"prctl {arguments[0]}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    """See the module."""
    ready, cpu_seconds, megabytes, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    code = sys.stdin.buffer.read()
    _limit(int(cpu_seconds), int(megabytes))
    _confine()
    os.write(int(ready), b"1")
    os.close(int(ready))
    sys.excepthook = _told
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


def _told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print what the code raised, without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


if __name__ == "__main__":
    main()
