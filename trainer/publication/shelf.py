"""Published versions in the memory of a GPU, for every reader that shares it: no file in between.

    shelf = Shelf(folder)                              # the learner's process
    shelf.put(weights, version=7)                      # copied, digested, announced

    found = shelved(folder, 7)                         # any process of this machine, or None
    live.install(found.offer())                        # copied over the reader's tensors

A slot is one buffer that never moves. A version is announced by a *card*, a small file in the
folder, whole or absent, which names the slot, what lies where, and every tensor's digest, taken on
the GPU from what lies in the slot. Another process opens the slot through its CUDA IPC handle; in
the learner's own process it is the buffer itself.

Slots are used again, the oldest first, and its card goes before a byte changes. A reader copies,
takes the digests of its copy and compares them with the card's. Where they differ and the card is
gone, it came too late and reads the version's file; where the card is still there, something is
broken, and it says so. Nobody waits for anybody, and nobody ends up with half of a version.

Left out: who is told (``trainer/loop``), how a reader installs (:mod:`.in_place`), other machines.
"""

import base64
import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from ...kernels.errors import BudgetError, CapabilityError, DiskError
from ...model_recipes.state import Digests, weights_root
from ..engines.base import Publish
from .flat import Entry, Layout, copy_all
from .in_place import SECONDS, Offer, require_finite, wait_for

SUFFIX = ".card"
SPARE_SLOTS = 3
"""Versions that stay beyond one for each reader."""
_OWN: dict[tuple[str, int], Tensor] = {}
"""This process's slots, by folder and number."""


class Handle(BaseModel):
    """What torch needs to open a slot in another process; bytes in base64."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: str
    memory: str
    size: int
    offset: int
    counter: str
    counter_offset: int
    event: str
    event_sync: bool


class Card(BaseModel):
    """An announced version. owner: the learner's process. handle: None for the processor's memory,
    which the owner alone reads.

    Card(version=7, root="5be1...", owner=4711, slot=0, handle=None, nbytes=24,
         tensors={"a.weight": ("BF16", (3, 4), 0)}, digests={"a.weight": "9f..."})
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    root: str
    owner: int
    slot: int
    handle: Handle | None
    nbytes: int
    tensors: dict[str, Entry]
    digests: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelved:
    """A version on the shelf. The tensors lie in its slot: copy them, compare, and let go."""

    card: Card
    file: Path
    flat: Tensor
    tensors: Mapping[str, Tensor]

    @property
    def layout(self) -> Layout:
        """Where each tensor lies in ``flat``."""
        return Layout(entries=self.card.tensors, nbytes=self.card.nbytes)

    def offer(self) -> Offer:
        """For :meth:`.in_place.LiveWeights.install`, which compares digests after its copy."""
        publish = Publish(version=self.card.version, digest=self.card.root)
        return Offer(publish=publish, tensors=self.tensors, digests=self.card.digests)

    def is_gone(self) -> bool:
        """Whether the slot may hold something else by now."""
        return not self.file.exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A version in its slot that nobody knows of yet."""

    version: int
    slot: int
    layout: Layout
    flat: Tensor
    tensors: Mapping[str, Tensor]
    digests: Digests


class Shelf:
    """The owner's side. readers: how many of them may be at different versions. wanted: versions to
    keep, where a quarter of the memory that is free at first has room for them."""

    def __init__(self, folder: Path, *, readers: int = 1, wanted: int = 0) -> None:
        self.folder, self.slots = folder, readers + SPARE_SLOTS
        self._wanted = wanted
        self._held: dict[int, int] = {}  # slot -> version
        self._handles: dict[int, Handle | None] = {}
        self._cut: dict[int, tuple[Layout, Mapping[str, Tensor]]] = {}  # slots, and their views
        remove_cards(folder)

    def put(
        self, weights: Mapping[str, Tensor], version: int, *, seconds: float = SECONDS
    ) -> Shelved:
        """:meth:`begin` and :meth:`announce`."""
        return self.announce(self.begin(weights, version), seconds=seconds)

    def begin(self, weights: Mapping[str, Tensor], version: int) -> Placed:
        """Copy into a slot and take digests there, in the order of this thread's stream; the
        device is not waited for, and the weights may change after this call."""
        layout = Layout.of(weights)
        device = next(iter(weights.values())).device
        self._measure(layout.nbytes, device)
        slot = self._free_slot()
        flat = self._buffer(slot, layout.nbytes, device)
        known = self._cut.get(slot)
        tensors = known[1] if known and known[0] == layout else layout.views(flat)
        self._cut[slot] = (layout, tensors)
        copy_all(tensors, weights)
        return Placed(version=version, slot=slot, layout=layout, flat=flat, tensors=tensors,
                      digests=Digests(tensors))  # fmt: skip

    def announce(self, placed: Placed, *, seconds: float = SECONDS) -> Shelved:
        """Readers may have it when this returns.

        Raises NonFiniteError (nothing is announced), BudgetError (the GPU did not finish in time),
        DiskError (no card could be written).
        """
        version, slot = placed.version, placed.slot
        if not wait_for(placed.digests, time.perf_counter() + seconds):
            raise BudgetError(
                f"version {version} was not copied and digested in {seconds:.0f} s; raise "
                "wait_seconds, or find out what holds the device"
            )
        digests = placed.digests.read()
        require_finite(placed.tensors, placed.digests)
        card = Card(
            version=version, root=weights_root(digests), owner=os.getpid(), slot=slot,
            handle=self._handle(slot, placed.flat), nbytes=placed.layout.nbytes,
            tensors=dict(placed.layout.entries), digests=digests,
        )  # fmt: skip
        file = self.folder / f"{version:08d}{SUFFIX}"
        try:
            part = file.with_suffix(".part")  # not for long: nothing forces it onto the disk
            part.write_text(card.model_dump_json(), encoding="utf-8")
            part.replace(file)
        except OSError as error:
            raise DiskError(
                f"cannot announce version {version} in {self.folder}: {error}; free some space, "
                "then resume"
            ) from error
        self._held[slot] = version
        return Shelved(card=card, file=file, flat=placed.flat, tensors=placed.tensors)

    def close(self) -> None:
        """Take every card away and give the memory back once no reader has it open."""
        remove_cards(self.folder)
        for slot in self._cut:
            _OWN.pop((str(self.folder), slot), None)
        self._held.clear()
        self._handles.clear()
        self._cut.clear()

    def _measure(self, nbytes: int, device: torch.device) -> None:
        """How many slots there are, settled by the first version."""
        if not self._wanted:
            return
        on_gpu = device.type == "cuda"
        free = torch.cuda.mem_get_info(device)[0] if on_gpu else _free_memory()
        self.slots = max(self.slots, min(self._wanted, free // 4 // max(1, nbytes)))
        self._wanted = 0

    def _free_slot(self) -> int:
        """A slot without a card: an unused one, else that of the oldest version."""
        unused = next((slot for slot in range(self.slots) if slot not in self._held), None)
        if unused is not None:
            return unused
        slot = min(self._held, key=lambda each: self._held[each])
        (self.folder / f"{self._held.pop(slot):08d}{SUFFIX}").unlink(missing_ok=True)
        return slot

    def _buffer(self, slot: int, nbytes: int, device: torch.device) -> Tensor:
        key = (str(self.folder), slot)
        if key not in _OWN:
            _OWN[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        assert _OWN[key].numel() == nbytes
        return _OWN[key]

    def _handle(self, slot: int, flat: Tensor) -> Handle | None:
        if slot not in self._handles:
            self._handles[slot] = _share(flat) if flat.is_cuda else None
        return self._handles[slot]


def shelved(folder: Path, version: int) -> Shelved | None:
    """A version on the shelf of a folder; None where it is not there, or not for this process.

    CapabilityError where its memory cannot be opened.
    """
    file = folder / f"{version:08d}{SUFFIX}"
    try:
        card = Card.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise CapabilityError(
            f"{file} is no announcement of weights ({error}); delete it, or publish through files"
        ) from error
    if card.owner == os.getpid():
        flat = _OWN.get((str(folder), card.slot))
    else:
        flat = None if card.handle is None else _opened(card.handle.model_dump_json())
    if flat is None:
        return None
    layout = Layout(entries=card.tensors, nbytes=card.nbytes)
    return Shelved(card=card, file=file, flat=flat, tensors=layout.views(flat))


def remove_cards(folder: Path) -> None:
    """What an earlier run announced is gone with it."""
    for file in folder.glob(f"*{SUFFIX}"):
        file.unlink(missing_ok=True)


def _free_memory() -> int:
    """Bytes of the processor's memory that nobody uses."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _share(flat: Tensor) -> Handle:
    """Open a slot to other processes of this machine."""
    storage: Any = flat.untyped_storage()
    device, memory, size, offset, counter, counter_offset, event, sync = storage._share_cuda_()
    return Handle(
        gpu=str(torch.cuda.get_device_properties(device).uuid), memory=_text(memory), size=size,
        offset=offset, counter=_text(counter), counter_offset=counter_offset, event=_text(event),
        event_sync=sync,
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _opened(told: str) -> Tensor | None:
    """The slot of a handle (JSON) in this process, opened once; None where its GPU is not visible
    here."""
    handle = Handle.model_validate_json(told)
    numbers = [
        index
        for index in range(torch.cuda.device_count())
        if str(torch.cuda.get_device_properties(index).uuid) == handle.gpu
    ]
    if not numbers:
        return None
    kind: Any = torch.UntypedStorage
    try:
        storage = kind._new_shared_cuda(
            numbers[0], _bytes(handle.memory), handle.size, handle.offset, _bytes(handle.counter),
            handle.counter_offset, _bytes(handle.event), handle.event_sync,
        )  # fmt: skip
    except RuntimeError as error:
        raise CapabilityError(
            f"the learner's weights cannot be opened over CUDA IPC ({str(error).splitlines()[0]}); "
            "set share_weights: false, and they go through files"
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{numbers[0]}").set_(storage)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
