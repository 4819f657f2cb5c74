"""Publication into another process: NCCL between two GPUs of a host, gloo between two CPUs.

    sender = Sender(Channel(meet, 0, device=torch.device("cuda", 0)))         # the trainer
    sender.publish(named_state(module), version=3)

    receiver = Receiver(Channel(meet, 1, device=torch.device("cuda", 1)), live, install)
    receiver.receive()                                                        # the rollout engine

One round: the sender names version, shapes and digests; the receiver refuses or agrees; the tensors
arrive in buffers of their own; the receiver takes their digests, installs all of them in place
(:mod:`.in_place`) and answers with the digest over what is installed. Live tensors are written in
that last step alone, which puts the old bytes back if it fails: whatever else goes wrong (a sender
that dies, half of the tensors, the time limit) the old version serves on. What was refused may be
offered again; after a transfer that broke off the channel is closed, and both sides open another.

The two sides meet at a file that both can open; the handshake goes through it, so a peer that is
gone is a time-out; a transfer that stalls is aborted, and both sides end within their limit. The
group is theirs alone: it does not touch torch's default process group, which vLLM and FSDP2 use.
Two processes of one host are what is shown.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from ...kernels.errors import (
    BudgetError,
    CapabilityError,
    MisalignedError,
    UsageError,
    ZeroMismatchError,
)
from ...model_recipes.state import digests_of, weights_root
from .flat import Layout
from .in_place import SECONDS, Installed, LiveWeights, Offer, described
from .shelf import Shelved

Install = Callable[[Offer], Installed]
GROUP_SECONDS = 3600.0
"""The group's own limit, after which torch ends the process; every wait here has a shorter one."""
ABORT_SECONDS = 10.0
POLL_SECONDS = 0.001
_GIVEN_UP: list[Any] = []
_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # a transfer that broke off is ours to report,
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # no reason to dump, which holds both sides for minutes,
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor to end the process
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}


class Manifest(BaseModel):
    """What is offered. tensors: name -> (dtype, shape). flat: they come as one buffer, laid out as
    :class:`.flat.Layout` does.

    Manifest(version=3, tensors={"model.norm.weight": ("bfloat16", (576,))}, digests={...})
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    digests: dict[str, str]
    flat: bool = False


class Answer(BaseModel):
    """What the receiver says: why not, or the digest over what is installed now.

    broke_off: the tensors did not all arrive, and this channel is of no more use.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    refused: str = ""
    root: str = ""
    broke_off: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a publication took on the sender's side, the receiver's work included."""

    version: int
    root: str
    nbytes: int
    seconds: float


class Channel:
    """One side of a pair. rank: 0 sends, 1 receives. meet: a fresh file name."""

    def __init__(self, meet: str, rank: int, *, device: torch.device) -> None:
        self.device = device
        self.round = 0
        self.closed = ""
        self._store = dist.FileStore(meet, 2)  # pyright: ignore[reportPrivateImportUsage]
        self._group = _group(self._store, rank, device)

    def say(self, what: str, message: BaseModel) -> None:
        """Leave a message of this round."""
        self._store.set(f"{self.round}/{what}", message.model_dump_json())

    def hear(self, what: str, kind: type[Any], deadline: float) -> Any:
        """The other side's message of this round; BudgetError when it does not come in time."""
        key = f"{self.round}/{what}"
        try:
            self._store.wait([key], _left(deadline))
            return kind.model_validate_json(self._store.get(key))
        except RuntimeError as error:  # a file store says no more than that
            raise BudgetError(
                f"the other side gave no {what} in time; see whether it runs, or raise the limit"
            ) from error
        except ValidationError as error:
            raise UsageError(f"the other side's {what} is no such message: {error}; run the same "
                             "version of this package on both sides") from error  # fmt: skip

    def broadcast(self, tensors: Sequence[Tensor], deadline: float) -> None:
        """Every tensor from rank 0 to rank 1; CapabilityError when it breaks off, in time."""
        try:
            if self.device.type == "cpu":
                for tensor in tensors:  # one after the other: none is left behind in the queue
                    self._begin(tensor, deadline).wait()
            else:
                self._on_gpu(tensors, deadline)
        except RuntimeError as error:
            raise CapabilityError(
                f"the transfer broke off ({str(error).splitlines()[0]}); the old version serves "
                "on: open another channel on both sides and publish again"
            ) from error

    def _begin(self, tensor: Tensor, deadline: float) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self.device.type == "cpu":
            options.timeout = _left(deadline)
        return self._group.broadcast([tensor], options)

    def _on_gpu(self, tensors: Sequence[Tensor], deadline: float) -> None:
        """On a stream of its own: nothing else waits for a transfer that never ends."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        done = torch.cuda.Event()
        with torch.cuda.stream(side):
            for work in [self._begin(tensor, deadline) for tensor in tensors]:
                work.wait()  # makes this stream wait, not this process
            done.record()
        while not done.query():
            if time.perf_counter() > deadline:
                raise RuntimeError(f"{len(tensors)} tensors were not across in time")
            time.sleep(POLL_SECONDS)
        torch.cuda.current_stream(self.device).wait_stream(side)

    def close(self, why: str) -> None:
        """No more rounds: give the group up in bounded time, or the GPU would wait in it for good.

        A group is kept then, since destroying it may wait for the other side once more.
        """
        self.closed = why
        if self.device.type != "cpu":
            ending = threading.Thread(target=self._group.abort, daemon=True)
            ending.start()
            ending.join(ABORT_SECONDS)
            _GIVEN_UP.append(self._group)

    def require_open(self) -> None:
        """Raise CapabilityError after a transfer that broke off."""
        if self.closed:
            raise CapabilityError(
                f"this channel is closed ({self.closed}); open another one on both sides"
            )


class Sender:
    """The trainer's side."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def publish(
        self,
        weights: Mapping[str, Tensor],
        version: int,
        *,
        seconds: float = SECONDS,
        lying: Shelved | None = None,
    ) -> Sent:
        """Offer, send, and hear that it serves; raises with the old version serving.

        lying: the slot of a shelf that the weights lie in, digested already: one buffer is sent.

        UsageError (refused), BudgetError (no answer), CapabilityError (broke off), MisalignedError
        (installed as something else, or not at all).
        """
        self.channel.require_open()
        began = time.perf_counter()
        deadline = began + seconds
        digests = digests_of(weights) if lying is None else lying.card.digests
        kinds = {name: described(tensor) for name, tensor in weights.items()}
        root = weights_root(digests)
        parts = [weights[name].detach().contiguous() for name in sorted(weights)]
        offer = Manifest(version=version, tensors=kinds, digests=digests, flat=lying is not None)
        with _round(self.channel):
            self.channel.say("offer", offer)
            agreed = self.channel.hear("agreement", Answer, deadline)
            if agreed.refused:
                raise UsageError(agreed.refused)
            with _closing(self.channel):
                self.channel.broadcast(parts if lying is None else [lying.flat], deadline)
                done = self.channel.hear("result", Answer, deadline)
                if done.broke_off:
                    raise CapabilityError(done.refused)
            if done.root != root:
                raise MisalignedError(
                    f"version {version} is not installed: {done.refused or done.root}; the old one "
                    "serves on, publish again"
                )
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        return Sent(version=version, root=root, nbytes=nbytes,
                    seconds=time.perf_counter() - began)  # fmt: skip


class Receiver:
    """The reader's side. install: puts an offer in, all of it or nothing."""

    def __init__(self, channel: Channel, live: LiveWeights, install: Install | None = None) -> None:
        self.channel, self.live = channel, live
        self.install = install or live.install
        self._staged: dict[str, Tensor] | None = None
        self._flat: Tensor | None = None

    def receive(self, *, seconds: float = SECONDS) -> Installed:
        """Wait for an offer and install it; raises with the old version serving."""
        self.channel.require_open()
        deadline = time.perf_counter() + seconds
        with _round(self.channel):
            manifest = self.channel.hear("offer", Manifest, deadline)
            try:
                self.live.require_fit(manifest.tensors, manifest.version)
            except UsageError as error:
                self.channel.say("agreement", Answer(refused=str(error)))
                raise
            self.channel.say("agreement", Answer())
            staged, parts = self._room(manifest.flat)
            try:
                with _closing(self.channel):
                    self.channel.broadcast(parts, deadline)
            except CapabilityError as error:
                self.channel.say("result", Answer(refused=str(error), broke_off=True))
                raise
            try:
                done = self.install(self._offer(staged, manifest))
            except (ZeroMismatchError, RuntimeError) as error:
                self.channel.say("result", Answer(refused=str(error)))
                raise
            self.channel.say("result", Answer(root=self.live.root))
        return done

    def _room(self, flat: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Where tensors arrive, kept between rounds, and what of it is sent at once."""
        self._staged = self._staged or self.live.empty_copy()
        if not flat:
            return self._staged, [self._staged[name] for name in sorted(self._staged)]
        if self._flat is None:
            layout = Layout.of(self._staged)
            some = next(iter(self._staged.values()))
            self._flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=some.device)
            self._staged = layout.views(self._flat)
        return self._staged, [self._flat]

    def _offer(self, staged: Mapping[str, Tensor], manifest: Manifest) -> Offer:
        offer = self.live.stage(staged, manifest.version)
        odd = [name for name, digest in manifest.digests.items() if offer.digests[name] != digest]
        if odd:
            raise MisalignedError(
                f"version {manifest.version}: {len(odd)} tensor(s) arrived as something else, "
                f"first {odd[0]!r}; the old version serves on, publish again"
            )
        return offer


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.01, deadline - time.perf_counter()))


@contextmanager
def _round(channel: Channel) -> Generator[None]:
    """Both sides count rounds, whatever becomes of one."""
    try:
        yield
    finally:
        channel.round += 1


@contextmanager
def _closing(channel: Channel) -> Generator[None]:
    """A transfer that breaks off leaves the two sides at different places: no more rounds."""
    try:
        yield
    except ZeroMismatchError as error:
        channel.close(str(error).partition(";")[0])
        raise


def _group(store: Any, rank: int, device: torch.device) -> Any:
    """A group of two, outside of torch's registry."""
    limit = timedelta(seconds=GROUP_SECONDS)
    if device.type == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return dist.ProcessGroupGloo(store, rank, 2, limit)
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)  # read when the group is made
    try:
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
