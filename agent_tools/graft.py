"""Graft all: judge every operator on the reference's inputs, in one run.

The right side is the reference. :class:`Reference` watches it and keeps the output rows of chosen
requests (as many leading positions as a memory budget allows). :class:`Grafter` then watches the
left side: it digests each site's inputs and output, compares them with the reference's, and where
the output differs puts the reference's rows in its place, so that the next site again sees the
reference's values. One such run finds every site that differs, however early the first one is.

    limits, size = choose_rows(comparison, memory_bytes=1_500_000_000)
    reference = Reference(limits)
    right = traced(right_side, reference)
    grafter = Grafter(reference)                     # replace={...}: only these sites
    left = traced(left_side, grafter)
    Comparison(left, right).sites                    # .affected > 0: culprits
    grafter.evidence["model.layers.0.mlp"]           # bits, ULP histogram, probes

Whether a verdict counts (all inputs equal, attention state included) is decided by ``compare.py``
from the two traces; this module only moves tensors and samples the differences.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels import bits
from ..kernels.errors import BudgetError
from ..trainer.engines.base import SiteCall
from .compare import Comparison
from .records import BitDifference, Probe
from .sides import closure
from .trace import OUTPUT, Bools, Digests, Trace, Tracer

MAX_SAMPLED = 300_000

Probes = Callable[[SiteCall, int, Tensor, int], tuple[Probe, ...]]
"""(call, row, reference row [1, ...], rows in the reference's call) -> what the probes found."""


def choose_rows(comparison: Comparison, memory_bytes: int) -> tuple[dict[str, int], int]:
    """Leading positions per request whose outputs fit the budget, and the bytes they will take.

    Requests with the most differing rows come first, each after the requests whose cached state it
    uses; the last one chosen may be cut short.
    """
    right = comparison.right
    per_row = _bytes_per_row(right)
    lengths = {request.id: len(request.tokens) for request in right.requests}
    limits: dict[str, int] = {}
    room = memory_bytes // max(1, per_row)
    for name in _by_difference(comparison):
        for request in reversed(closure([comparison.left.executed], [name])):
            take = min(lengths[request] - limits.get(request, 0), room)
            if take > 0:
                limits[request] = limits.get(request, 0) + take
                room -= take
    if not limits:
        raise BudgetError(
            f"one token's reference takes {per_row / 1e6:.1f} MB and the memory budget is "
            f"{memory_bytes / 1e6:.1f} MB; raise the budget"
        )
    return limits, sum(limits.values()) * per_row


def _bytes_per_row(trace: Trace) -> int:
    total = 0
    for key, column in trace.columns.items():
        if key.slot == OUTPUT:
            dtype = getattr(torch, column.dtype)
            total += dtype.itemsize * max(1, int(np.prod(column.shape)))
    return total


def _by_difference(comparison: Comparison) -> list[str]:
    requests = comparison.left.requests
    differing = np.zeros(len(requests), np.int64)
    for site in comparison.sites:
        rows = site.rows[site.output.state > 0]
        np.add.at(differing, comparison.left.table.request[rows], 1)
    return [requests[index].id for index in np.argsort(-differing, kind="stable")]


@dataclass(slots=True)
class _Rows:
    """Reference rows of one site call; ``keys`` ascend, one array for all sites that share them."""

    keys: NDArray[np.int64]
    tensor: Tensor
    digests: Mapping[str, Digests]
    rows: NDArray[np.int32]


class _Watching:
    """Common to both sides: a tracer, and (request, position) keys of the rows at hand."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.tracer = Tracer()
        self.limits = limits
        self._index = {name: index for index, name in enumerate(limits)}
        self._keys = np.empty(0, np.int64)

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        """The engine says whose rows the next calls hold."""
        self.tracer.begin_rows(step, rows)
        live = [(name, position) for name, position in rows if name]
        self._keys = np.fromiter(
            (
                (self._index[name] << 32) | position if position < self.limits.get(name, 0) else -1
                for name, position in live
            ),
            np.int64,
            len(live),
        )


class Reference(_Watching):
    """Observer that keeps the right side's output rows of the chosen requests and positions."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        super().__init__(limits)
        self._parts: dict[tuple[str, int], list[_Rows]] = {}
        self._joined: dict[tuple[str, int], _Rows] = {}
        self._same_keys: dict[bytes, NDArray[np.int64]] = {}

    def on_site(self, call: SiteCall, /) -> Tensor | None:
        """Record digests, keep chosen rows; never replaces anything."""
        digests = self.tracer.record(call)
        chosen = np.flatnonzero(self._keys >= 0)
        if len(chosen):
            group = self.tracer.group
            live = torch.from_numpy(group.live[chosen])
            part = _Rows(
                keys=self._keys[chosen],
                tensor=call.output.detach()[live].contiguous(),
                digests={slot: d[chosen] for slot, d in digests.items()},
                rows=np.full(len(chosen), group.rows, np.int32),
            )
            self._parts.setdefault((call.site.name, call.call), []).append(part)

    def rows(self, site: str, call: int) -> _Rows | None:
        """All kept rows of one site call, first occurrence of each (request, position)."""
        at = site, call
        if at not in self._joined:
            parts = self._parts.pop(at, None)
            if parts is None:
                return None
            keys, first = np.unique(np.concatenate([p.keys for p in parts]), return_index=True)
            slots = parts[0].digests
            self._joined[at] = _Rows(
                keys=self._same_keys.setdefault(keys.tobytes(), keys),
                tensor=torch.cat([p.tensor for p in parts])[torch.from_numpy(first)],
                digests={s: np.concatenate([p.digests[s] for p in parts])[first] for s in slots},
                rows=np.concatenate([p.rows for p in parts])[first],
            )
        return self._joined[at]

    @property
    def nbytes(self) -> int:
        """Bytes of the kept tensors."""
        parts = [part for parts in self._parts.values() for part in parts]
        return sum(rows.tensor.nbytes for rows in [*parts, *self._joined.values()])


@dataclass(slots=True)
class Evidence:
    """What was seen of one site's differences while its inputs were equal."""

    difference: BitDifference | None = None
    histogram: dict[str, int] = field(default_factory=dict[str, int])
    probes: tuple[Probe, ...] = ()


class Grafter(_Watching):
    """Observer that puts the reference's rows in the place of differing outputs.

    Outputs whose dtype differs from the reference's cannot be replaced; what consumes them stays
    unjudged.

    replace: names of the sites whose outputs are replaced; None for all.
    sample: look at differing values (bits, ULP histogram over MAX_SAMPLED elements per site).
    probes: run once per site, at its first differing row.
    """

    def __init__(
        self,
        reference: Reference,
        *,
        replace: frozenset[str] | None = None,
        sample: bool = True,
        probes: Probes | None = None,
    ) -> None:
        super().__init__(reference.limits)
        self._sample = sample
        self._places: dict[int, tuple[NDArray[np.int64], Bools]] = {}
        self._reference = reference
        self._replace = replace
        self._probes = probes
        self.evidence: dict[str, Evidence] = {}

    def on_site(self, call: SiteCall, /) -> Tensor | None:
        """Compare, sample the difference, and hand back the reference's rows where they differ."""
        digests = self.tracer.record(call)
        kept = self._reference.rows(call.site.name, call.call)
        if kept is None or not len(self._keys):
            return None
        place, present = self._find(kept.keys)
        differs = present & (digests[OUTPUT] != kept.digests[OUTPUT][place]).any(axis=1)
        if not differs.any():
            return None
        alike = _kind(call.output) == _kind(kept.tensor)
        if self._sample and self._wanted(call.site.name):
            convicting = differs & self._inputs_equal(digests, kept, place)
            if convicting.any() and alike:
                self._take_evidence(call, kept, place, np.flatnonzero(convicting))
            elif convicting.any():
                self.evidence[call.site.name] = _other_kind(call.output, kept.tensor)
        if not alike or (self._replace is not None and call.site.name not in self._replace):
            return None
        grafted = call.output.detach().clone()
        rows = torch.from_numpy(self.tracer.group.live[differs])
        grafted[rows] = kept.tensor[torch.from_numpy(place[differs])]
        return grafted

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        """The engine says whose rows the next calls hold."""
        super().begin_rows(step, rows)
        self._places.clear()

    def _find(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], Bools]:
        """Index of each row at hand among the reference's keys, and whether it is there."""
        if id(keys) not in self._places:
            place = np.searchsorted(keys, self._keys)
            place[place == len(keys)] = 0
            self._places[id(keys)] = place, keys[place] == self._keys
        return self._places[id(keys)]

    def _wanted(self, site: str) -> bool:
        """Whether more of this site's differences are to be sampled."""
        seen = self.evidence.get(site)
        return seen is None or (
            seen.difference is not None and sum(seen.histogram.values()) < MAX_SAMPLED
        )

    @staticmethod
    def _inputs_equal(
        digests: Mapping[str, Digests], kept: _Rows, place: NDArray[np.int64]
    ) -> Bools:
        fine = np.full(len(place), digests.keys() == kept.digests.keys(), np.bool_)
        for slot in digests.keys() & kept.digests.keys():
            if slot != OUTPUT:
                fine &= (digests[slot] == kept.digests[slot][place]).all(axis=1)
        return fine

    def _take_evidence(
        self, call: SiteCall, kept: _Rows, place: NDArray[np.int64], which: NDArray[np.int64]
    ) -> None:
        evidence = self.evidence.setdefault(call.site.name, Evidence())
        room = MAX_SAMPLED - sum(evidence.histogram.values())
        which = which[: max(1, room // max(1, call.output[0].numel()))]
        live = self.tracer.group.live[which]
        mine = call.output.detach()[torch.from_numpy(live)]
        theirs = kept.tensor[torch.from_numpy(place[which])]
        for bucket, count in bits.ulp_histogram(mine, theirs).items():
            evidence.histogram[bucket] = evidence.histogram.get(bucket, 0) + count
        if evidence.difference is None:
            evidence.difference = first_bits(mine[0], theirs[0])
            if self._probes is not None:
                row = int(live[0])
                rows = int(kept.rows[place[which[0]]])
                evidence.probes = self._probes(call, row, theirs[:1], rows)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape[1:])}"


def _other_kind(left: Tensor, right: Tensor) -> Evidence:
    """Outputs of another dtype or shape cannot be grafted: what follows sees its own side's."""
    result = f"each row is {_kind(left)} on the left, {_kind(right)} on the right"
    return Evidence(probes=(Probe(name="dtype", result=result, decided="intermediate dtype"),))


def first_bits(left: Tensor, right: Tensor) -> BitDifference | None:
    """The first differing coordinate of two equally shaped tensors, as a record."""
    found = bits.first_difference(left, right)
    if found is None:
        return None
    values = found.to_dict()
    for side in ("left", "right"):
        values[side] = None if isinstance(values[side], str) else values[side]
    return BitDifference(**values)
