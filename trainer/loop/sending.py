"""Published weights to a rollout worker on a device of its own: over NCCL, or gloo between CPUs.

    sending = Sending(elsewhere, spec)
    sending.bring(7, timeout=600)        # before the worker is asked for groups that start on 7

The learner's process sends from the slot in which the version lies (:mod:`..publication.shelf`), in
the producer's thread and on a stream of its own: the learner goes on meanwhile. The worker installs
between two requests. A version that is in no slot (any more) is not sent: the worker reads its
file, and the bits are the same.
"""

import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch

from ...kernels.errors import CapabilityError, MisalignedError, ZeroMismatchError
from ..publication.across import Channel, Sender
from .elsewhere import Elsewhere, WorkerDied
from .versions import Versions
from .worker import WorkerSpec

SECONDS = 60.0
"""No transfer takes longer."""


class Sending:
    """See the module."""

    def __init__(self, elsewhere: Elsewhere, spec: WorkerSpec) -> None:
        self._elsewhere, self._versions = elsewhere, Versions(spec.versions)
        self.device = torch.device(spec.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.seconds: list[float] = []
        self._sender: Sender | None = None
        self._version = 0
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def bring(self, version: int, timeout: float) -> None:
        """Make the worker have ``version``, where it can be sent."""
        there = self._versions.shelved(version, self.device)
        if version == self._version or there is None:
            return
        sender = self._sender = self._sender or self._met(timeout)
        self._elsewhere.begin("receive", SECONDS)
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                sent = sender.publish(there.tensors, version, seconds=SECONDS, lying=there)
        except ZeroMismatchError as error:
            self._failed(error, gone=there.is_gone())
            return
        self._elsewhere.end("receive", timeout=SECONDS)
        self.seconds.append(sent.seconds)
        self._version = version

    def _met(self, timeout: float) -> Sender:
        """Once the worker's engine has started, which takes longer than any transfer."""
        self._elsewhere.call("ready", timeout=timeout)
        meet = str(Path(tempfile.mkdtemp(prefix="zm-send-")) / "meet")
        self._elsewhere.begin("meet", meet)
        sender = Sender(Channel(meet, 0, device=self.device))
        self._elsewhere.end("meet", timeout=SECONDS)
        return sender

    def _failed(self, error: ZeroMismatchError, *, gone: bool) -> None:
        """A worker that died is another's to replace; a slot that was used again has its file."""
        try:
            self._elsewhere.end("receive", timeout=SECONDS)
        except WorkerDied:
            raise
        except MisalignedError:
            if gone:
                return
        except ZeroMismatchError as theirs:
            raise CapabilityError(
                f"weights could not be sent to a rollout worker: {error} (it says: {theirs})"
            ) from error
        raise error
