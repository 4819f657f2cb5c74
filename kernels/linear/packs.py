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
the weight neither uses kept panels nor leaves any behind, so FSDP2 training needs no call.

``pytest tests/kernels/linear/test_packs.py`` exercises it.
"""

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


@contextmanager
def scoped(weight: Tensor, trains: bool) -> Generator[None]:
    """For a weight in training: no panels from before are used, none made inside are left."""
    if trains:
        forget(weight)
    try:
        yield
    finally:
        if trains:
            forget(weight)


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
    panels = torch.empty(groups * rows * LANES + more, dtype=torch.int32)
    source = weight_NK.detach().contiguous()
    core().call("pack", source, is_bf16(source), outputs, inputs, panels, torch.get_num_threads())
    return panels
