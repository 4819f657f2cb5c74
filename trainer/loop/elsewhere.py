"""A process of its own for something that is called, and how its end is told.

    elsewhere = Elsewhere(functools.partial(RolloutWorker, spec), wait_seconds=600, noun="a worker")
    generated = elsewhere.call("generate", (3, 4), 2, timeout=600)

What is made lives there alone. When this process is gone the pipe ends, and so does the other.
"""

import contextlib
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import Any

import torch

from ...kernels.errors import BudgetError, CapabilityError, ZeroMismatchError
from .crossing import Crossing

STOP_SECONDS = 10.0
IDLE_FACTOR = 4
"""A process ends that nobody asked for anything for this many ``wait_seconds``."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
_ENVIRONMENT = threading.Lock()


class WorkerDied(ZeroMismatchError):
    """The worker is gone; what it was asked for can be asked again."""


class Elsewhere:
    """Something in a process of its own, spawned: made there, then called.

    make: what makes it; it and all arguments must pickle. gpu: which of this process's GPUs is the
    other's first; None leaves them in order. noun: what messages call it.
    """

    def __init__(
        self, make: Callable[[], Any], *, wait_seconds: float, noun: str, gpu: int | None = None
    ) -> None:
        self.noun = noun
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        idle = IDLE_FACTOR * wait_seconds
        self.process = context.Process(target=_serve, args=(theirs, make, idle), daemon=True)
        with _first_gpu(gpu):  # the other process reads its environment before anything else
            self.process.start()
        theirs.close()

    def call(self, name: str, *arguments: Any, timeout: float) -> Any:
        """What method ``name`` gives there; raises what it raises."""
        self.begin(name, *arguments)
        return self.end(name, timeout=timeout)

    def begin(self, name: str, *arguments: Any) -> None:
        """Start a call whose answer :meth:`end` waits for."""
        try:
            self.connection.send((name, arguments))
        except OSError as error:
            raise self._died(name) from error

    def end(self, name: str, *, timeout: float) -> Any:
        """The answer. WorkerDied: the process is gone. BudgetError: it took too long."""
        try:
            if not self.connection.poll(timeout):
                raise BudgetError(
                    f"{self.noun} (process {self.process.pid}) did not finish {name!r} in "
                    f"{timeout:.0f} s; raise wait_seconds, or lower max_new_tokens"
                )
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            if isinstance(error, BudgetError):
                raise
            raise self._died(name) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _died(self, name: str) -> WorkerDied:
        self.process.join(STOP_SECONDS)
        return WorkerDied(
            f"{self.noun} (process {self.process.pid}) ended with exit code "
            f"{self.process.exitcode} at {name!r}; look at its output above"
        )

    def close(self) -> None:
        """Ask it to end; kill it if it does not."""
        with contextlib.suppress(OSError):  # it may be gone already
            self.connection.send(None)
        self.process.join(STOP_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(STOP_SECONDS)
        self.connection.close()


def _serve(connection: Connection, make: Callable[[], Any], idle: float) -> None:
    """The other process: make it at once, answer calls until there are no more."""
    made: Any = None
    with Crossing() as making:
        made = make()
    while True:
        try:
            if not connection.poll(idle):
                return  # nobody asks any more; whoever does finds it gone and starts another
            asked = connection.recv()
        except (EOFError, OSError):
            return  # the run is gone
        if asked is None:
            return
        name, arguments = asked
        with Crossing() as crossing:
            if making.error is not None:
                raise making.error
            connection.send(getattr(made, name)(*arguments))
        error = crossing.error
        if error is not None and not isinstance(error, ZeroMismatchError):
            text = "".join(traceback.format_exception(error))
            error = CapabilityError(f"a worker failed; please report this:\n{text}")
        if error is not None:
            with contextlib.suppress(OSError):  # nobody is there: found out by the next poll
                connection.send(error)


@contextlib.contextmanager
def _first_gpu(gpu: int | None) -> Generator[None]:
    """A process started meanwhile counts its GPUs from ``gpu`` on."""
    if gpu is None:
        with _ENVIRONMENT:
            yield
        return
    own = os.environ.get(VISIBLE)
    names = own.split(",") if own else [str(each) for each in range(torch.cuda.device_count())]
    if gpu >= len(names):
        raise CapabilityError(
            f"GPU {gpu} is asked for and there are {len(names)}; make more of them visible, lower "
            "workers or ranks, or set apart: false"
        )
    with _ENVIRONMENT:
        os.environ[VISIBLE] = ",".join([names[gpu], *names[:gpu], *names[gpu + 1 :]])
        try:
            yield
        finally:
            if own is None:
                del os.environ[VISIBLE]
            else:
                os.environ[VISIBLE] = own
