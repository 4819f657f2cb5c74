"""Publication between two processes (gloo here, NCCL on GPUs): whole, or the old version serves."""

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import (
    BudgetError,
    CapabilityError,
    MisalignedError,
    UsageError,
    ZeroMismatchError,
)
from zeromismatch.trainer.publication.across import Channel, Receiver, Sender
from zeromismatch.trainer.publication.in_place import LiveWeights
from zeromismatch.trainer.publication.shelf import Shelf

CPU = torch.device("cpu")


def weights(value: float) -> dict[str, Tensor]:
    return {
        "a.weight": torch.full((500, 7), value),
        "b.weight": torch.full((3,), value, dtype=torch.bfloat16),
    }


class DyingChannel(Channel):
    """Sends the first tensor and is gone."""

    def broadcast(self, tensors: Any, deadline: float) -> None:
        super().broadcast(tensors[:1], deadline)
        os._exit(1)


class StallingChannel(Channel):
    """Sends the first tensor, and then waits for the reader's word."""

    def broadcast(self, tensors: Any, deadline: float) -> None:
        super().broadcast(tensors[:1], deadline)


class OtherBits(Channel):
    """One element arrives as another one."""

    def broadcast(self, tensors: Any, deadline: float) -> None:
        tensors[0].view(-1)[5] += 1
        super().broadcast(tensors, deadline)


def send(meet: str, told: Any, kinds: list[str]) -> None:
    """The trainer's process: one publication after the other; tells what became of each."""
    torch.set_num_threads(1)
    channel: Channel | None = None
    for index, kind in enumerate(kinds, 1):
        kinds_of = {"dies": DyingChannel, "bits": OtherBits, "stalls": StallingChannel}
        made = kinds_of.get(kind, Channel)
        if channel is None or type(channel) is not made:
            channel = made(f"{meet}-{made.__name__}", 0, device=CPU)
        new = weights(float(index))
        if kind == "silent":
            continue
        if kind == "partial":
            del new["a.weight"]
        version = 0 if kind == "old" else index
        lying = None
        if kind == "slot":
            folder = Path(meet).parent / "shelf"
            folder.mkdir(exist_ok=True)
            lying = Shelf(folder).put(new, version)
        try:
            sent = Sender(channel).publish(new, version, seconds=30.0, lying=lying)
            told.put(("sent", sent.root))
        except ZeroMismatchError as error:
            told.put((type(error).__name__, str(error)))


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    started: list[Any] = []

    def start(*kinds: str) -> tuple[str, Any]:
        told = context.Queue()
        meet = str(tmp_path / "meet")
        process = context.Process(target=send, args=(meet, told, list(kinds)), daemon=True)
        process.start()
        started.append(process)
        return meet, told

    yield start
    for process in started:
        process.join(30.0)
        if process.is_alive():
            process.kill()


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return weights(0.5)


@pytest.fixture
def live(tensors: dict[str, Tensor]) -> LiveWeights:
    return LiveWeights(tensors, cleared=lambda: True)


def serves(live: LiveWeights, tensors: dict[str, Tensor], version: int, value: float) -> bool:
    same = all(bits.equal(tensors[name], new) for name, new in weights(value).items())
    return same and live.version == version


def test_refused_offers_leave_the_old_version_and_whole_ones_serve(
    trainer: Any, live: LiveWeights, tensors: dict[str, Tensor]
) -> None:
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    meet, told = trainer("whole", "partial", "old", "whole")
    receiver = Receiver(Channel(f"{meet}-Channel", 1, device=CPU), live)
    done = receiver.receive(seconds=60.0)
    assert told.get(timeout=30.0) == ("sent", done.publish.digest)
    assert serves(live, tensors, 1, 1.0)
    for reason in ("needs 'a.weight'", "does not exceed"):
        with pytest.raises(UsageError, match=reason):
            receiver.receive(seconds=30.0)
        name, message = told.get(timeout=30.0)
        assert name == "UsageError"
        assert reason in message
        assert serves(live, tensors, 1, 1.0)
    receiver.receive(seconds=30.0)
    assert told.get(timeout=30.0)[0] == "sent"
    assert serves(live, tensors, 4, 4.0)
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == places


def test_a_slot_of_the_shelf_is_sent_as_one_buffer(
    trainer: Any, live: LiveWeights, tensors: dict[str, Tensor]
) -> None:
    meet, told = trainer("whole", "slot", "slot", "whole")
    receiver = Receiver(Channel(f"{meet}-Channel", 1, device=CPU), live)
    for version in range(1, 5):
        done = receiver.receive(seconds=60.0)
        assert told.get(timeout=30.0) == ("sent", done.publish.digest)
        assert serves(live, tensors, version, float(version))


def test_a_trainer_that_dies_half_way_leaves_the_old_version(
    trainer: Any, live: LiveWeights, tensors: dict[str, Tensor]
) -> None:
    meet, _ = trainer("dies")
    receiver = Receiver(Channel(f"{meet}-DyingChannel", 1, device=CPU), live)
    with pytest.raises(CapabilityError, match="broke off"):
        receiver.receive(seconds=60.0)
    assert serves(live, tensors, 0, 0.5)
    with pytest.raises(CapabilityError, match="channel is closed"):
        receiver.receive(seconds=1.0)


def test_a_transfer_that_stalls_ends_on_both_sides_and_another_channel_serves(
    trainer: Any, live: LiveWeights, tensors: dict[str, Tensor]
) -> None:
    meet, told = trainer("stalls", "whole")
    receiver = Receiver(Channel(f"{meet}-StallingChannel", 1, device=CPU), live)
    with pytest.raises(CapabilityError, match="broke off"):
        receiver.receive(seconds=3.0)
    name, message = told.get(timeout=10.0)  # long before the sender's own limit
    assert name == "CapabilityError"
    assert "broke off" in message
    assert serves(live, tensors, 0, 0.5)
    Receiver(Channel(f"{meet}-Channel", 1, device=CPU), live).receive(seconds=30.0)
    assert told.get(timeout=30.0)[0] == "sent"
    assert serves(live, tensors, 2, 2.0)


def test_other_bits_than_offered_are_not_installed(
    trainer: Any, live: LiveWeights, tensors: dict[str, Tensor]
) -> None:
    meet, told = trainer("bits")
    receiver = Receiver(Channel(f"{meet}-OtherBits", 1, device=CPU), live)
    with pytest.raises(MisalignedError, match=r"first 'a\.weight'"):
        receiver.receive(seconds=60.0)
    assert told.get(timeout=30.0)[0] == "MisalignedError"
    assert serves(live, tensors, 0, 0.5)


def test_an_installation_that_fails_puts_the_old_weights_back(
    trainer: Any, tensors: dict[str, Tensor]
) -> None:
    live = LiveWeights(tensors, cleared=lambda: False)
    meet, told = trainer("whole")
    with pytest.raises(CapabilityError, match="kept caches"):
        Receiver(Channel(f"{meet}-Channel", 1, device=CPU), live).receive(seconds=60.0)
    name, message = told.get(timeout=30.0)
    assert name == "MisalignedError"
    assert "kept caches" in message
    assert serves(live, tensors, 0, 0.5)


def test_a_trainer_that_says_nothing_is_a_time_out(trainer: Any, live: LiveWeights) -> None:
    meet, _ = trainer("silent")
    receiver = Receiver(Channel(f"{meet}-Channel", 1, device=CPU), live)
    with pytest.raises(BudgetError, match="no offer in time"):
        receiver.receive(seconds=0.2)
    assert live.version == 0
