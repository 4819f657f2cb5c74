"""Where a rollout worker lives: in this process, in another one, or in a Ray actor.

    host = host_named("processes", spec)
    generated = host.generate((3, 4), version=2, timeout=600)

All three take the same calls and give the same bits. A worker that is gone (killed, crashed, its
node lost) raises :class:`WorkerDied`; whoever asked makes a new host and asks again, since a group
depends on nothing that died with it. An answer that does not come in time raises BudgetError.
Workers read weights from the run folder, so with Ray on several hosts it must be shared.
"""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor

from ...kernels.errors import BudgetError, CapabilityError, ZeroMismatchError
from ...model_recipes.models import LoadedModel, load_model
from ..losses.catalogue import loss_named
from .audit import Auditor, Group, audited
from .elsewhere import Elsewhere, WorkerDied
from .records import Trajectory
from .sending import Sending
from .versions import Versions
from .worker import Generated, RolloutWorker, WorkerSpec

__all__ = ["HOSTS", "AuditHost", "Host", "ProcessHost", "RayHost", "ThreadHost", "WorkerDied"]


RESTARTS = 3
"""How often one claim may lose its worker, or a run its auditor, before the run gives up."""


GPU_SHARE = 0.01
"""What a Ray actor on a GPU asks for: without a share Ray may hide all GPUs from it; the learner,
of which Ray does not know, uses the same one."""


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
    """The worker is a process of its own, with a pipe; where the config says so, on a GPU of its
    own, to which published weights are sent before it is asked for groups."""

    worker: ClassVar[Callable[[WorkerSpec], RolloutWorker]] = RolloutWorker

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        own_gpu = spec.config.apart and spec.device != "cpu"
        self.elsewhere = Elsewhere(
            functools.partial(type(self).worker, spec),
            wait_seconds=spec.config.wait_seconds,
            noun="a rollout worker",
            gpu=spec.config.ranks + spec.index if own_gpu else None,
        )
        self._sending = Sending(self.elsewhere, spec) if spec.config.apart else None

    def generate(self, groups: Sequence[int], version: int, timeout: float) -> Generated:
        """See :class:`Host`."""
        if self._sending is not None:
            self._sending.bring(version, timeout)
        asked = (tuple(groups), version)
        return cast(Generated, self.elsewhere.call("generate", *asked, timeout=timeout))

    def sent_seconds(self) -> list[float]:
        """What each version took that was sent to a device of the worker's own."""
        return [] if self._sending is None else list(self._sending.seconds)

    def close(self) -> None:
        """End the process."""
        self.elsewhere.close()


class AuditHost:
    """The auditor in a process of its own, used like the one in ``audit.py``; one that is gone is
    made again, RESTARTS times."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._everything = loss_named(spec.config.loss).needs_old
        self._lock = threading.Lock()  # producers and the learner, one pipe
        self._restarts = 0
        self._elsewhere = self._made()

    def groups(self, numbers: Sequence[int], groups: Sequence[Sequence[Trajectory]]) -> list[Group]:
        """See :meth:`.audit.Auditor.groups`."""
        return audited(numbers, groups, self.spec.config, self.scored, everything=self._everything)

    def scored(self, trajectories: Sequence[Trajectory]) -> tuple[int, ...]:
        """See :meth:`.audit.Auditor.scored`."""
        return cast("tuple[int, ...]", self._call("scored", tuple(trajectories)))

    def under(self, trajectories: Sequence[Trajectory], version: int) -> Tensor:
        """See :meth:`.audit.Auditor.under`."""
        return cast(Tensor, self._call("under", tuple(trajectories), version))

    def close(self) -> None:
        """End the process."""
        self._elsewhere.close()

    def _made(self) -> Elsewhere:
        make = functools.partial(auditor_of, self.spec)
        wait = self.spec.config.wait_seconds
        return Elsewhere(make, wait_seconds=wait, noun="the auditor")

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            while True:
                try:
                    wait = self.spec.config.wait_seconds
                    return self._elsewhere.call(name, *arguments, timeout=wait)
                except WorkerDied:
                    self._elsewhere.close()
                    self._restarts += 1
                    if self._restarts > RESTARTS:
                        raise
                    self._elsewhere = self._made()


def auditor_of(spec: WorkerSpec, model: LoadedModel | None = None) -> Auditor:
    """An auditor of a worker's run, with a copy of the model that is its alone."""
    model = model or load_model(
        spec.model, dtype=spec.dtype, device=spec.device, seed=spec.model_seed
    )
    everything = loss_named(spec.config.loss).needs_old
    versions = Versions(spec.versions)
    return Auditor(model, spec.plan, spec.config, versions, everything=everything)


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
        own_gpu = {} if spec.device == "cpu" else {"num_gpus": GPU_SHARE}
        actor = cast(Callable[..., Any], self._ray.remote(num_cpus=1, max_restarts=0, **own_gpu))
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
