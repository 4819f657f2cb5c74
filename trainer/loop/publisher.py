"""Publication beside the learner: what it copies at once, and what a thread writes meanwhile.

    publisher = Publisher(versions, buffer.published, run.written, buffer.close, timeout=600)
    copied = publisher.copy(learner.weights(), 7)     # the learner may go on; nobody knows of it
    root = publisher.publish(copied)                  # told; writing goes on
    publisher.wait()                                  # on disk

The learner stops for a copy in its own memory and a digest. On a GPU it waits for neither before it
publishes, so what lies between the two calls costs nothing more. With a shelf
(:mod:`..publication.shelf`) that copy is what readers take, and they are told at once; without one
they are told when the version's file is whole. The file is written in a thread, one version after
the other, while the next gradient is computed: resuming needs it, and so does a reader elsewhere.
Whoever needs files (a checkpoint, the end of a run) waits; what goes wrong there is raised by the
next call.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.errors import BudgetError
from ..publication.shelf import Placed, Shelf
from .crossing import Crossing
from .versions import Versions, digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Weights that go into a file alone."""

    version: int
    tensors: Mapping[str, Tensor]


class Publisher:
    """See the module. told: called with each version that readers may have. written: called in the
    thread with each version that is on disk. failed: called in the thread with what stopped it."""

    def __init__(
        self,
        versions: Versions,
        told: Callable[[int], None],
        written: Callable[[int], None],
        failed: Callable[[BaseException], None],
        *,
        timeout: float,
        shelf: Shelf | None = None,
    ) -> None:
        self.versions, self.timeout, self.shelf = versions, timeout, shelf
        self._told, self._written, self._failed = told, written, failed
        self._host: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def copy(self, weights: Mapping[str, Tensor], version: int) -> Placed | Copied:
        """The weights as they are now, in memory of the publisher's."""
        self.wait()
        if self.shelf is not None:
            return self.shelf.begin(weights, version)
        held = {name: tensor.detach().clone() for name, tensor in weights.items()}
        return Copied(version=version, tensors=held)

    def publish(self, copied: Placed | Copied) -> str:
        """Start to publish; returns the digest over all tensors."""
        version = copied.version
        if isinstance(copied, Placed):
            assert self.shelf is not None
            put = self.shelf.announce(copied, seconds=self.timeout)
            self._told(version)
            self._start(lambda: self.versions.publish_flat(put, self._on_host(put.flat)), version)
            return put.card.root
        root = digest(copied.tensors)

        def write() -> None:
            self.versions.publish(copied.tensors, version, root=root)
            self._told(version)

        self._start(write, version)
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
        """Let a write that is under way end; its error, if any, is the run's already. The shelf is
        given back."""
        if self._thread is not None:
            self._thread.join(self.timeout)
        if self.shelf is not None:
            self.shelf.close()

    def _start(self, write: Callable[[], None], version: int) -> None:
        self._thread = threading.Thread(target=self._write, args=(write, version), daemon=True)
        self._thread.start()

    def _on_host(self, flat: Tensor) -> Tensor:
        """A slot's bytes in the processor's memory; the learner's stream does not wait for them.

        The slot keeps still: it is used again after this version's file is whole.
        """
        if not flat.is_cuda:
            return flat
        if self._host is None or self._stream is None:
            self._host = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=True)
            self._stream = torch.cuda.Stream(flat.device)
        with torch.cuda.stream(self._stream):
            self._host.copy_(flat, non_blocking=True)
            copied = self._stream.record_event()
        copied.synchronize()
        return self._host

    def _write(self, write: Callable[[], None], version: int) -> None:
        with Crossing() as crossing:
            write()
            self._written(version)
        if crossing.error is not None:
            self._error = crossing.error
            self._failed(crossing.error)
