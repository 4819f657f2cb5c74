"""Publication beside the learner: what it copies at once, and what a thread writes meanwhile.

    publisher = Publisher(versions, buffer.published, timeout=600)
    root = publisher.publish(learner.weights(), 7)    # copied and digested; writing goes on
    publisher.wait()                                  # on disk, and told

The learner stops for a copy in its own memory and a digest. Writing the file and telling producers
happens in a thread, one version after the other, while the next gradient is computed; a version
counts as published when its file is whole. Whoever needs that (a checkpoint, the end of a run)
waits; what goes wrong there is raised by the next call.
"""

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from ...kernels.errors import BudgetError
from .crossing import Crossing
from .versions import Versions, digest


class Publisher:
    """See the module. told: called in the thread with each version that is on disk. failed: called
    in the thread with what stopped it."""

    def __init__(
        self,
        versions: Versions,
        told: Callable[[int], None],
        failed: Callable[[BaseException], None],
        *,
        timeout: float,
    ) -> None:
        self.versions, self.timeout = versions, timeout
        self._told, self._failed = told, failed
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def publish(self, weights: Mapping[str, Tensor], version: int) -> str:
        """Start to publish; returns the digest over all tensors."""
        self.wait()
        held = {name: tensor.detach().clone() for name, tensor in weights.items()}
        root = digest(held)
        self._thread = threading.Thread(target=self._write, args=(held, version, root), daemon=True)
        self._thread.start()
        return root

    def wait(self) -> None:
        """Until the last version is on disk; raises what stopped it."""
        if self._thread is not None:
            self._thread.join(self.timeout)
            if self._thread.is_alive():
                raise BudgetError(
                    f"a publication did not end in {self.timeout:.0f} s; raise wait_seconds, or "
                    "find out what holds the disk"
                )
            self._thread = None
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Let a write that is under way end; its error, if any, is the run's already."""
        if self._thread is not None:
            self._thread.join(self.timeout)

    def _write(self, weights: Mapping[str, Tensor], version: int, root: str) -> None:
        with Crossing() as crossing:
            self.versions.publish(weights, version, root=root)
            self._told(version)
        if crossing.error is not None:
            self._error = crossing.error
            self._failed(crossing.error)
