"""Two traces, row against row: which inputs are equal, which outputs differ, and whose fault it is.

Values are paired by (site, call, slot) and rows by (request, position); every occurrence of a row
on the left is compared with every occurrence on the right. An output that differs convicts its
site only if **all** inputs of that row were compared and are equal. Attention also reads state, so
its inputs include the keys and values of all earlier positions of the request, whichever request
computed them (prefix hits), as the executed schedules say (``owners.py``). So do convolutions and
recurrences: what they got at all earlier positions, but for queries.

    comparison = Comparison(left_trace, right_trace)
    for site in comparison.sites: site.affected, site.compared
    comparison.first()

Left out: proving that the two traces may be compared at all (``anchor.py``), and tensors.
``pytest tests/agent_tools/localize`` exercises it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernels import bits
from .owners import by_position, owned_equal, owner_versions
from .records import Coverage, FirstDivergence, RowRef
from .trace import OUTPUT, Bools, ColumnKey, Digests, Trace

ABSENT, EQUAL, DIFFERENT = -1, 0, 1
STATE_CLASSES = frozenset({
    "attention", "convolution", "recurrence_ssd", "recurrence_gated_delta", "recurrence_kda",
})  # fmt: skip
QUERY_SLOTS = frozenset({"in:q"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """One value's left rows against the right's: state per left row, and the right row shown."""

    state: NDArray[np.int8]
    right: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)  # no slots: eligible and convicting are cached
class SiteComparison:
    """One call of one site on both sides. Arrays are aligned with ``rows`` (left row table)."""

    site: str
    call: int
    op_class: str
    contracts: tuple[str | None, str | None]
    rows: NDArray[np.int32]
    output: Joined
    inputs: Mapping[str, Joined]
    one_sided: tuple[str, ...]
    state_equal: Bools

    @cached_property
    def eligible(self) -> Bools:
        """Rows that can convict: output compared, all inputs (with state) compared and equal."""
        fit = self.state_equal & (self.output.state != ABSENT)
        if self.one_sided:
            return np.zeros_like(fit)
        for joined in self.inputs.values():
            fit &= joined.state == EQUAL
        return fit

    @cached_property
    def convicting(self) -> Bools:
        """Rows with equal inputs and another output."""
        return self.eligible & (self.output.state == DIFFERENT)

    @property
    def compared(self) -> int:
        """Number of rows that could convict."""
        return int(self.eligible.sum())

    @property
    def affected(self) -> int:
        """Number of rows that do."""
        return int(self.convicting.sum())


class Comparison:
    """Everything two traces say about each other; computed once, read many times.

    classes: only sites of these operator classes; None for all.
    repeated: the right is the left's schedule once more, so that each row has its own counterpart,
    also where a schedule computes a row twice (a hit on itself) and stock kernels contradict
    themselves.
    """

    def __init__(
        self, left: Trace, right: Trace, *, classes: frozenset[str] | None = None,
        repeated: bool = False,
    ) -> None:  # fmt: skip
        self.left, self.right = left, right
        self._classes = classes
        self.left_keys, self.right_keys = _row_keys(left, left), _row_keys(right, left)
        self._paired_by = self.left_keys, self.right_keys
        if repeated:
            assert np.array_equal(self.left_keys, self.right_keys)
            self._paired_by = (np.arange(len(self.left_keys)),) * 2
        self._pairings: dict[tuple[int, int], _Pairing] = {}
        self.sites: tuple[SiteComparison, ...] = tuple(self._compare_sites())

    def _compare_sites(self) -> Iterator[SiteComparison]:
        order = {name: index for index, name in enumerate(self.left.sites)}
        outputs = [key for key in self.left.columns if key.slot == OUTPUT]
        slots = _slots(self.left), _slots(self.right)
        for key in sorted(outputs, key=lambda k: (order[k.site], k.call)):
            op_class = self.left.columns[key].op_class
            if key in self.right.columns and op_class in (self._classes or {op_class}):
                yield self._compare_site(key, *(side[key.site, key.call] for side in slots))

    def _compare_site(
        self, key: ColumnKey, left_slots: frozenset[str], right_slots: frozenset[str]
    ) -> SiteComparison:
        left, right = self.left.columns[key], self.right.columns[key]
        common = [
            slot
            for slot in sorted(left_slots & right_slots)
            if self.left.columns[key._replace(slot=slot)].rows is left.rows
        ]  # an input that was not there at every call of the site is none that was compared
        inputs = {s: self._join(key._replace(slot=s)) for s in common if s != OUTPUT}
        state_equal = np.ones(len(left.rows), np.bool_)
        if left.op_class in STATE_CLASSES:
            state_equal = self._state_equal(key, [s for s in inputs if s not in QUERY_SLOTS])
        return SiteComparison(
            site=key.site, call=key.call, op_class=left.op_class,
            contracts=(left.contract, right.contract), rows=left.rows, output=self._join(key),
            inputs=inputs, one_sided=tuple(sorted((left_slots | right_slots) - set(common))),
            state_equal=state_equal,
        )  # fmt: skip

    def _join(self, key: ColumnKey) -> Joined:
        left, right = self.left.columns[key], self.right.columns[key]
        identity = (id(left.rows), id(right.rows))
        if identity not in self._pairings:
            ours, theirs = self._paired_by
            pairing = _Pairing(ours[left.rows], theirs[right.rows])
            self._pairings[identity] = pairing
        return self._pairings[identity].join(left.digests, right.digests)

    @cached_property
    def _owners(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return owner_versions(self.left, self.left), owner_versions(self.right, self.left)

    def _state_equal(self, key: ColumnKey, slots: list[str]) -> Bools:
        """Per left row of a site that reads state: all that went into it up to its position is
        equal."""
        shape = self._owners[0].shape[1:]
        fine = np.ones(shape, np.bool_)
        for slot in slots:
            column_key = key._replace(slot=slot)
            left = by_position(self.left.columns[column_key], self.left_keys, shape)
            right = by_position(self.right.columns[column_key], self.right_keys, shape)
            fine &= owned_equal(left, right, *self._owners)
        prefix = np.logical_and.accumulate(fine, axis=1)
        keys = self.left_keys[self.left.columns[key].rows]
        return prefix[keys >> 32, keys & 0xFFFFFFFF]

    def row(self, site: SiteComparison, index: int) -> RowRef:
        """Where row ``index`` of a site's arrays lies in the left run."""
        table, at = self.left.table, int(site.rows[index])
        return RowRef(
            step=int(table.step[at]), request=self.left.requests[table.request[at]].id,
            position=int(table.position[at]), row=int(table.row[at]), rows=int(table.rows[at]),
        )  # fmt: skip

    def digests(self, site: SiteComparison, index: int) -> tuple[str, str]:
        """Both output digests of one row, in hex."""
        key = ColumnKey(site.site, site.call, OUTPUT)
        left = self.left.columns[key].digests[index]
        right = self.right.columns[key].digests[site.output.right[index]]
        return _hex(left), _hex(right)

    def first(self) -> FirstDivergence | None:
        """The first operator in execution order that got equal inputs and gave another output."""
        best: tuple[int, int, SiteComparison, int] | None = None
        for order, site in enumerate(self.sites):
            where = np.flatnonzero(site.convicting)
            if len(where):
                steps = self.left.table.step[site.rows[where]]
                index = int(where[steps.argmin()])
                candidate = (int(steps.min()), order, site, index)
                best = candidate if best is None or candidate[:2] < best[:2] else best
        if best is None:
            return None
        site, index = best[2:]
        left, right = self.digests(site, index)
        return FirstDivergence(
            site=site.site, op_class=site.op_class, at=self.row(site, index),
            left_digest=left, right_digest=right,
        )  # fmt: skip

    def count(self, keep: Callable[[SiteComparison], bool] = lambda _: True) -> tuple[int, int]:
        """(compared, differing) output rows over the sites that ``keep`` admits."""
        states = [site.output.state for site in self.sites if keep(site)]
        return (
            sum(int((state != ABSENT).sum()) for state in states),
            sum(int((state == DIFFERENT).sum()) for state in states),
        )

    def coverage(self, threshold: float) -> Coverage:
        """Which operators were seen on both sides, and how many rows were compared."""
        left, right = set(self.left.sites), set(self.right.sites)
        rows, differing = self.count()
        inputs = [joined.state for site in self.sites for joined in site.inputs.values()]
        compared = {site.site for site in self.sites if (site.output.state != ABSENT).any()}
        return Coverage(
            share=len(compared) / max(1, len(left | right)),
            threshold=threshold,
            shared=len(compared),
            left_only=tuple(name for name in self.left.sites if name not in right),
            right_only=tuple(name for name in self.right.sites if name not in left),
            rows=rows,
            differing_rows=differing,
            inputs=sum(int((state != ABSENT).sum()) for state in inputs),
            differing_inputs=sum(int((state == DIFFERENT).sum()) for state in inputs),
            incomplete=tuple(dict.fromkeys(s.site for s in self.sites if s.one_sided)),
        )


class _Pairing:
    """Which right rows belong to each left row; shared by all values with the same rows."""

    def __init__(self, left: NDArray[np.int64], right: NDArray[np.int64]) -> None:
        self._keys, self._first, self._inverse = np.unique(
            right, return_index=True, return_inverse=True
        )
        place = np.searchsorted(self._keys, left)
        place[place == len(self._keys)] = 0
        self._present = self._keys[place] == left if len(self._keys) else left != left
        self._place = place

    def join(self, left: Digests, right: Digests) -> Joined:
        state = np.full(len(left), ABSENT, np.int8)
        shown = np.zeros(len(left), np.int64)
        if not len(self._keys):
            return Joined(state=state, right=shown)
        shown = self._first[self._place]
        odd = np.flatnonzero((right != right[self._first][self._inverse]).any(axis=1))
        other = self._first.copy()
        other[self._inverse[odd]] = odd  # a row on which the right side contradicts itself
        same = (left == right[shown]).all(axis=1)
        shown = np.where(same, other[self._place], shown)
        same &= (left == right[shown]).all(axis=1)
        state[self._present] = np.where(same, EQUAL, DIFFERENT)[self._present]
        return Joined(state=state, right=shown)


def _row_keys(trace: Trace, reference: Trace) -> NDArray[np.int64]:
    """(request index in ``reference``) << 32 | position, for every row of the table."""
    index = {request.id: at for at, request in enumerate(reference.requests)}
    known = np.asarray([index.get(request.id, -1) for request in trace.requests], np.int64)
    return (known[trace.table.request] << 32) | trace.table.position


def _slots(trace: Trace) -> dict[tuple[str, int], frozenset[str]]:
    slots: dict[tuple[str, int], set[str]] = {}
    for key in trace.columns:
        slots.setdefault((key.site, key.call), set()).add(key.slot)
    return {at: frozenset(names) for at, names in slots.items()}


def _hex(digest: NDArray[np.int64]) -> str:
    return bits.digest_hex(torch.from_numpy(np.ascontiguousarray(digest)))
