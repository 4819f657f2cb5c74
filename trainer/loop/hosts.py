"""Where a rollout worker lives: in this process, in another one, or in a Ray actor.

    host = host_named("processes", spec)
    generated = host.generate((3, 4), version=2, timeout=600)

All three take the same calls and give the same bits. A worker that is gone (killed, crashed, its
node lost) raises :class:`WorkerDied`; whoever asked makes a new host and asks again, since a group
depends on nothing that died with it. An answer that does not come in time raises BudgetError.
Workers read weights from the run folder, so with Ray on several hosts it must be shared.
"""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol, cast

from ...kernels.errors import BudgetError, CapabilityError, ZeroMismatchError
from ...model_recipes.models import LoadedModel
from .crossing import Crossing
from .worker import Generated, RolloutWorker, WorkerSpec

STOP_SECONDS = 10.0
IDLE_FACTOR = 4
"""A worker process ends that nobody asked for anything for this many ``wait_seconds``."""


class WorkerDied(ZeroMismatchError):
    """The worker is gone; what it was asked for can be asked again."""


class Host(Protocol):
    """See the module."""

    def generate(self, groups: Sequence[int], version: int, timeout: float) -> Generated:
        """Whole groups, scored."""
        ...

    def close(self) -> None:
        """End the worker."""
        ...


class ThreadHost:
    """The worker computes in the calling thread; torch releases the interpreter meanwhile."""

    def __init__(self, spec: WorkerSpec, model: LoadedModel | None = None) -> None:
        self.worker = RolloutWorker(spec, model)

    def generate(self, groups: Sequence[int], version: int, timeout: float) -> Generated:
        """``timeout`` bounds the task's calls through the spec; computing ends by itself."""
        return self.worker.generate(groups, version)

    def close(self) -> None:
        """Take the plan off the worker's model."""
        self.worker.close()


class ProcessHost:
    """The worker is a process of its own, spawned, with a pipe."""

    def __init__(self, spec: WorkerSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, spec), daemon=True)
        self.process.start()
        theirs.close()

    def generate(self, groups: Sequence[int], version: int, timeout: float) -> Generated:
        """See :class:`Host`."""
        try:
            self.connection.send((tuple(groups), version))
            if not self.connection.poll(timeout):
                raise BudgetError(
                    f"worker process {self.process.pid} did not finish groups {tuple(groups)} in "
                    f"{timeout:.0f} s; raise wait_seconds, or lower max_new_tokens"
                )
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            if isinstance(error, BudgetError):
                raise
            self.process.join(STOP_SECONDS)
            raise WorkerDied(
                f"worker process {self.process.pid} ended with exit code {self.process.exitcode} "
                f"while it generated groups {tuple(groups)}; look at its output above"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return cast(Generated, answer)

    def close(self) -> None:
        """Ask it to end; kill it if it does not."""
        with contextlib.suppress(OSError):  # it may be gone already
            self.connection.send(None)
        self.process.join(STOP_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(STOP_SECONDS)
        self.connection.close()


def _serve(connection: Connection, spec: WorkerSpec) -> None:
    """The worker process: answer calls until there are no more."""
    worker: RolloutWorker | None = None
    idle = IDLE_FACTOR * spec.config.wait_seconds
    while True:
        try:
            if not connection.poll(idle):
                return  # nobody asks any more; whoever does finds a worker gone and starts another
            asked = connection.recv()
        except (EOFError, OSError):
            return  # the run is gone
        if asked is None:
            return
        with Crossing() as crossing:
            worker = worker or RolloutWorker(spec)
            connection.send(worker.generate(*asked))
        error = crossing.error
        if isinstance(error, ZeroMismatchError):
            connection.send(error)
        elif error is not None:
            text = "".join(traceback.format_exception(error))
            connection.send(CapabilityError(f"a worker failed; please report this:\n{text}"))


class RayHost:
    """The worker is a Ray actor. Where Ray is not initialised, it is: the cluster of
    RAY_ADDRESS, else this machine alone."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._ray = _ray()
        if not self._ray.is_initialized():
            # a cluster is named by RAY_ADDRESS; else only this machine may reach what is started
            # (Ray replaces 127.0.0.1 by the machine's outward address, but not its neighbour)
            own = {} if os.environ.get("RAY_ADDRESS") else {"_node_ip_address": "127.0.0.2"}
            self._ray.init(include_dashboard=False, log_to_driver=False, **own)
        actor = cast(Callable[..., Any], self._ray.remote(num_cpus=1, max_restarts=0))
        self.actor = actor(RolloutWorker).remote(spec)

    def generate(self, groups: Sequence[int], version: int, timeout: float) -> Generated:
        """See :class:`Host`."""
        failures = self._ray.exceptions
        try:
            return self._ray.get(
                self.actor.generate.remote(tuple(groups), version), timeout=timeout
            )
        except failures.GetTimeoutError as error:
            raise BudgetError(
                f"a Ray worker did not finish groups {tuple(groups)} in {timeout:.0f} s; raise "
                "wait_seconds, or look at `ray status`"
            ) from error
        except failures.RayActorError as error:
            raise WorkerDied(f"a Ray worker is gone ({error}); look at `ray status`") from error
        except failures.RayTaskError as error:
            raise error.cause if isinstance(error.cause, ZeroMismatchError) else error from error

    def close(self) -> None:
        """End the actor."""
        self._ray.kill(self.actor)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise CapabilityError(
            "placement ray needs Ray; install it with: pip install 'zero-mismatch[ray]'"
        ) from error
    return ray


HOSTS: dict[str, Callable[[WorkerSpec], Host]] = {
    "threads": ThreadHost,
    "processes": ProcessHost,
    "ray": RayHost,
}
