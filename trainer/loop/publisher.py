"""Publication beside the learner: what it copies at once, and what a thread writes meanwhile.

    publisher = Publisher(versions, buffer.published, run.written, buffer.close, timeout=600)
    copied = publisher.copy(learner.weights(), 7)     # the learner may go on; nobody knows of it
    root = publisher.publish(copied)                  # under way, told and written in a thread
    root.result()                                     # the digest over all tensors, once told
    publisher.wait()                                  # on disk

The learner stops for a copy in its own memory, which on a GPU it does not wait for either. A thread
reads the digests and tells who waits for the version: with a shelf (:mod:`..publication.shelf`)
that copy is what readers take, and they are told as soon as it is digested; without one they are
told when the version's file is whole. The same thread writes the file, one version after the other,
while the next gradient is computed: resuming needs it, and so does a reader elsewhere. Whoever
needs files (a checkpoint, the end of a run) waits; what goes wrong is raised by the next call.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
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

    def publish(self, copied: Placed | Copied) -> "Future[str]":
        """Start to publish; the digest over all tensors is there once readers were told."""
        root: Future[str] = Future()
        work = (copied, root)
        self._thread = threading.Thread(target=self._write, args=work, daemon=True)
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
        """Let a write that is under way end; its error, if any, is the run's already. The shelf is
        given back."""
        if self._thread is not None:
            self._thread.join(self.timeout)
        if self.shelf is not None:
            self.shelf.close()

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

    def _write(self, copied: Placed | Copied, root: "Future[str]") -> None:
        """The thread of one version."""
        version = copied.version
        with Crossing() as crossing:
            if isinstance(copied, Placed):
                assert self.shelf is not None
                put = self.shelf.announce(copied, seconds=self.timeout)
                self._told(version)
                root.set_result(put.card.root)
                self.versions.publish_flat(put, self._on_host(put.flat))
            else:
                found = digest(copied.tensors)
                self.versions.publish(copied.tensors, version, root=found)
                self._told(version)
                root.set_result(found)
            self._written(version)
        if crossing.error is not None:
            self._error = crossing.error
            if not root.done():
                root.set_exception(crossing.error)
            self._failed(crossing.error)
