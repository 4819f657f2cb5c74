"""Digests from inside the GPU operators, which survive torch.compile and CUDA graph replay.

A listener in Python sees nothing of compiled or replayed code. The operators' own bodies do run, in
eager and compiled code and while a graph is captured; there they hand each output to the active
recorder, which launches a digest of its rows into memory allocated before::

    taps = Taps(calls=400, rows=256, device="cuda")
    with taps.recording():
        model(batch)                       # eager or compiled, or the capture of a graph
    graph.replay()                         # refreshes the same memory
    taps.read()                            # {"rmsnorm.0": int64 [rows, 2], "linear.0": ...}

Names count the calls of an operator, in the order in which they ran. Digests are ``digest.v1`` of
``kernels.bits.digest_rows``, so that traces of any engine compare. With nobody recording, a call
costs one test.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from .errors import CapabilityError
from .gpu.digest import digest_into

_ACTIVE: "list[Taps]" = []


class Taps:
    """See the module. calls: operator outputs of one forward; rows: the most rows of one output."""

    def __init__(self, *, calls: int, rows: int, device: str | torch.device) -> None:
        self._store = torch.zeros(calls, rows, 2, dtype=torch.int64, device=device)
        self._taken: list[tuple[str, int]] = []
        self._counts: dict[str, int] = {}

    @contextmanager
    def recording(self) -> Generator[None]:
        """Operators that run in this block are recorded, from the first slot on."""
        self._taken.clear()
        self._counts.clear()
        _ACTIVE.append(self)
        try:
            yield
        finally:
            _ACTIVE.remove(self)

    def record(self, op: str, x: Tensor) -> None:
        """Digest the rows of ``x [rows, ...]`` into the next slot."""
        slot, rows = len(self._taken), x.shape[0]
        if slot == self._store.shape[0] or rows > self._store.shape[1]:
            raise CapabilityError(
                f"output {slot} ({op}, {rows} rows) does not fit taps of {self._store.shape[0]} "
                f"outputs of {self._store.shape[1]} rows; make Taps with more"
            )
        count = self._counts.get(op, 0)
        self._counts[op] = count + 1
        self._taken.append((f"{op}.{count}", rows))
        digest_into(x, self._store[slot, :rows])

    def read(self) -> dict[str, Tensor]:
        """The digests of the last recorded, or replayed, forward: int64 ``[rows, 2]`` by name."""
        return {
            name: self._store[slot, :rows].clone() for slot, (name, rows) in enumerate(self._taken)
        }


def tapped(op: str, x: Tensor) -> Tensor:
    """``x`` itself, recorded where somebody asked; for the bodies of custom operators."""
    for taps in _ACTIVE:
        taps.record(op, x)
    return x
