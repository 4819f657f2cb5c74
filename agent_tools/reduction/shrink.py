"""Shrinking a case while it still differs: delta debugging, one axis after the other.

    smaller, status = shrink(case, seconds=30)

In this order: switches of the process, neighbours, number of rows, steps of the sequence, outputs
and heads, inner size, last the values (small integers first: they make every sum exact, so a
difference that survives is no order of summation). Outcomes are cached by the case's bits; when the
budget is spent, what is there so far is handed back with status ``budget``.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ...kernels import bits
from .case import Case, Flags
from .programs import SHRINKABLE

Status = Literal["minimal", "budget", "none"]
COUNTS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 64, 128, 256)


class Shrinker:
    """Holds the smallest case so far, the clock and the cache."""

    def __init__(self, case: Case, seconds: float) -> None:
        self.case = case
        self.until = time.monotonic() + seconds
        self.spent = False
        self.tried = 0
        self._known: dict[str, bool] = {}

    def run(self) -> Status:
        """Shrink as far as the budget goes."""
        start = self.case.nbytes
        self._flags()
        self._calls()
        for axis in SHRINKABLE:
            self._axis(axis)
        self._values()
        if self.spent:
            return "budget"
        return "minimal" if self.case.nbytes <= start else "none"

    def attempt(self, smaller: Case, note: str = "") -> bool:
        """Keep ``smaller`` if it still differs."""
        if self.spent or time.monotonic() > self.until:
            self.spent = True
            return False
        key = _key(smaller)
        if key not in self._known:
            self.tried += 1
            self._known[key] = smaller.differs()
        if self._known[key]:
            reduced = (*self.case.reduced, note) if note else self.case.reduced
            self.case = replace(smaller, reduced=reduced)
        return self._known[key]

    def _flags(self) -> None:
        """One thread, and torch's own products: what still differs then needs neither."""
        flags = self.case.flags
        if flags.threads > 1:
            self._flag(replace(flags, threads=1), f"threads: {flags.threads} -> 1")
        if flags.onednn:
            self._flag(replace(self.case.flags, onednn=False), "oneDNN: off")

    def _flag(self, flags: Flags, note: str) -> None:
        self.attempt(replace(self.case, flags=flags), note)

    def _calls(self) -> None:
        if self.case.op_class == "attention":
            self._sequence()
            return
        for name in ("right", "left"):
            side = getattr(self.case, name)
            alone = replace(side, neighbours=None, row=0)
            if self.attempt(
                replace(self.case, **{name: alone}),
                f"{name}: {side.rows} rows, the others copies of the one",
            ):
                self._counts(name, side.rows)

    def _counts(self, name: str, most: int) -> None:
        for count in (*[each for each in COUNTS if each < most], most):
            side = replace(getattr(self.case, name), rows=count)
            if self.attempt(replace(self.case, **{name: side}), f"{name}: {count} rows"):
                return

    def _sequence(self) -> None:
        at = self.case.position
        for name in ("left", "right"):
            for start in (at, getattr(self.case, name).start):
                side = replace(getattr(self.case, name), start=start, stop=at + 1)
                note = f"{name}: rows {start} to {at} of the sequence"
                if self.attempt(replace(self.case, **{name: side}), note):
                    break
        self._drop_keys()

    def _drop_keys(self) -> None:
        """Fewer keys in front, and none behind the row."""
        end = max(self.case.left.stop, self.case.right.stop)
        if end < self.case.size("positions"):
            self.attempt(self.case.along("positions", range(end)), f"keys up to {end}")
        step = self.case.size("positions") // 2
        while step and not self.spent:
            fits = step <= self.case.position
            if not (fits and self.attempt(_without_front(self.case, step))):
                step //= 2

    def _axis(self, axis: str) -> None:
        size = self.case.size(axis)
        if size <= 1:
            return
        base = self.case

        def test(kept: Sequence[int]) -> bool:
            return self.attempt(base.along(axis, kept))

        kept = minimise(list(range(size)), test, lambda: self.spent)
        if len(kept) < size:
            reduced = (*self.case.reduced, f"{axis}: {size} -> {len(kept)}")
            self.case = replace(self.case, reduced=reduced)

    def _values(self) -> None:
        changes: Iterable[tuple[str, Callable[[Tensor], Tensor]]] = (
            ("small integers", lambda x: torch.round(x * 4 / x.abs().max().clamp(min=1e-30))),
            ("bfloat16 numbers", lambda x: x.bfloat16().to(x.dtype)),
        )
        for name, change in changes:
            if self.attempt(_changed(self.case, change), f"values: {name}"):
                return


def shrink(case: Case, seconds: float) -> tuple[Case, Status, int]:
    """The smallest case found, whether the budget sufficed, and how many were tried."""
    shrinker = Shrinker(case, seconds)
    status = shrinker.run()
    return shrinker.case, status, shrinker.tried


def minimise(
    items: list[int], test: Callable[[Sequence[int]], bool], spent: Callable[[], bool]
) -> list[int]:
    """Zeller's ddmin: a subset that still fails the test and from which no part can go."""
    parts = 2
    while len(items) >= 2 and not spent():
        size = -(-len(items) // parts)
        chunks = [items[at : at + size] for at in range(0, len(items), size)]
        for chunk in chunks:
            if len(chunk) < len(items) and test(chunk):
                items, parts = chunk, 2
                break
        else:
            for at in range(len(chunks)):
                rest = [i for place, chunk in enumerate(chunks) if place != at for i in chunk]
                if rest and len(chunks) > 2 and test(rest):
                    items, parts = rest, max(parts - 1, 2)
                    break
            else:
                if parts >= len(items):
                    return items
                parts = min(2 * parts, len(items))
    return items


def _without_front(case: Case, count: int) -> Case:
    """The sequence without its first ``count`` positions; every row moves down."""
    kept = range(count, case.size("positions"))

    def moved(name: str) -> object:
        side = getattr(case, name)
        return replace(side, start=max(0, side.start - count), stop=side.stop - count)

    smaller = case.along("positions", kept)
    return replace(
        smaller, position=case.position - count, left=moved("left"), right=moved("right")
    )


def _changed(case: Case, change: Callable[[Tensor], Tensor]) -> Case:
    tensors = {
        name: change(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in case.tensors.items()
    }
    same = all(torch.equal(tensors[name], tensor) for name, tensor in case.tensors.items())
    has_neighbours = any(side.neighbours is not None for side in (case.left, case.right))
    return case if same or has_neighbours else replace(case, tensors=tensors)


def _key(case: Case) -> str:
    parts = [f"{name}{bits.digest_tensor(tensor)}" for name, tensor in case.tensors.items()]
    parts.append(f"{case.flags.threads}/{case.flags.onednn}")
    for side in (case.left, case.right):
        parts.append(f"{side.rows}/{side.row}/{side.start}/{side.stop}")
        parts += [bits.digest_tensor(tensor) for tensor in (side.neighbours or {}).values()]
    return "|".join(parts)
