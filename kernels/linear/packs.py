"""Weights prepared once for the CPU core: panels [ceil(N / 16)][K][16], fp32, kept while they hold.

Packing moves numbers (bf16 widens exactly), so it never changes a bit; what it must never do is
outlive the numbers. A pack belongs to a *storage*, found by identity through a weak reference: when
the storage dies its packs go with it, and memory that is reallocated at the same address is another
storage. Inside a storage a pack is keyed by (address, shape, strides, dtype) and holds for one
version of the tensor, so every in-place update that torch counts, such as an optimiser step, voids
it. Panels are never kept for inference tensors, which count no versions.

What torch does not count: writes through ``.data``, through another library's pointer, and FSDP2's
all-gather into a reused buffer, which preserves the version on purpose. Whoever writes that way
calls :func:`forget` (one weight) or :func:`forget_all`. A forward pass that records a gradient of
the weight neither uses kept panels nor leaves any behind, so FSDP2 training needs no call. Only the
memory of its panels is used again by the next such pass of that thread, since fresh pages cost more
than packing: as much as the largest weight takes.

``pytest tests/kernels/linear/test_packs.py`` exercises it.
"""

import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..cpu.load import core
from ..cpu.register import is_bf16

LANES = 16
_Key = tuple[Any, ...]


@dataclass(slots=True)
class _Shelf:
    """The packs of one storage; all belong to one version, since views share the counter."""

    storage: weakref.ref[torch.UntypedStorage]
    version: int
    panels: dict[_Key, Tensor] = field(default_factory=dict[_Key, Tensor])


_SHELVES: dict[int, _Shelf] = {}


class _Training(threading.local):
    """This thread's passes that record a gradient: how many are open, and memory for panels."""

    depth = 0
    spare: Tensor | None = None


_TRAINING = _Training()


def panels_of(weight_NK: Tensor) -> Tensor:
    """The panels of a weight [N, K]: kept ones where they hold, else packed now."""
    if weight_NK.is_inference():
        return _pack(weight_NK)
    storage = weight_NK.untyped_storage()
    version = weight_NK._version
    shelf = _SHELVES.get(id(storage))
    if shelf is None or shelf.storage() is not storage or shelf.version != version:
        shelf = _new_shelf(storage, version)
    key = (weight_NK.data_ptr(), weight_NK.shape, weight_NK.stride(), weight_NK.dtype)
    panels = shelf.panels.get(key)
    if panels is None:
        panels = shelf.panels[key] = _pack(weight_NK)
    return panels


def forget(weight: Tensor) -> None:
    """Drop the packs of a weight's storage; needed after a write that torch does not count."""
    _SHELVES.pop(id(weight.untyped_storage()), None)


def forget_all() -> None:
    """Drop every pack; their memory is free once running calls have returned."""
    _SHELVES.clear()
    _TRAINING.spare = None


@contextmanager
def scoped(weight: Tensor, trains: bool) -> Generator[None]:
    """For a weight in training: no panels from before are used, none made inside are left."""
    if not trains:
        yield
        return
    forget(weight)
    _TRAINING.depth += 1
    try:
        yield
    finally:
        _TRAINING.depth -= 1
        shelf = _SHELVES.pop(id(weight.untyped_storage()), None)
        for panels in () if shelf is None else shelf.panels.values():
            whole = panels if panels._base is None else panels._base
            if _TRAINING.spare is None or _TRAINING.spare.numel() < whole.numel():
                _TRAINING.spare = whole


def kept_bytes() -> int:
    """Memory held by all kept panels."""
    shelves = list(_SHELVES.values())
    return sum(panels.nbytes for shelf in shelves for panels in list(shelf.panels.values()))


def _new_shelf(storage: torch.UntypedStorage, version: int) -> _Shelf:
    place = id(storage)

    def drop(dead: weakref.ref[torch.UntypedStorage]) -> None:
        shelf = _SHELVES.get(place)
        if shelf is not None and shelf.storage is dead:
            del _SHELVES[place]

    shelf = _SHELVES[place] = _Shelf(weakref.ref(storage, drop), version)
    return shelf


def _pack(weight_NK: Tensor) -> Tensor:
    outputs, inputs = weight_NK.shape
    groups = -(-outputs // LANES)
    rows, more = (-(-inputs // 2), groups) if is_bf16(weight_NK) else (inputs, 0)
    panels = _memory(groups * rows * LANES + more)
    source = weight_NK.detach().contiguous()
    core().call("pack", source, is_bf16(source), outputs, inputs, panels, torch.get_num_threads())
    return panels


def _memory(words: int) -> Tensor:
    """int32 [words], not initialised: in training the spare memory, where it is large enough."""
    spare = _TRAINING.spare if _TRAINING.depth else None
    if spare is None or spare.numel() < words:
        return torch.empty(words, dtype=torch.int32)
    _TRAINING.spare = None
    return spare[:words]
