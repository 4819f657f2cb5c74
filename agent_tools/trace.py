"""Traces: what every operator site read and wrote, as one digest per row.

A :class:`Tracer` watches one run of any engine and takes, in one pass, the 128-bit digest of every
row of every input and of the output of every site call, keyed by (request, position, site, call).
Nothing is keyed by batch slot: that is data. A row that is computed twice (after a preemption,
say) appears twice. Storage is columnar: one int64 pair per row and value, no Python object per
row.

Tensors themselves are kept only where a :class:`Keep` asks for them, within a byte budget.

    tracer = Tracer()
    run = engine.run(scenario, tracer)
    trace = tracer.finish(run, engine.describe(), weight_digests(model.module))
    save_trace(trace, Path("runs/7/left"))        # trace_store.py

Left out: comparing (``compare.py``) and files (``trace_store.py``). A traced run costs at most
twice an untraced one; ``pytest tests/agent_tools/trace`` exercises all of it.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..kernels import bits
from ..kernels.errors import DiskError, InconclusiveError
from ..trainer.engines.base import Observation, Request, Run, Schedule, Site, SiteCall

OUTPUT = "out"
DEFAULT_DISK_BYTES = 500_000_000

Digests = NDArray[np.int64]
"""[rows, 2]: one 128-bit digest per row."""
Bools = NDArray[np.bool_]


class ColumnKey(NamedTuple):
    """Which value of which call of which site; ``slot`` is ``out`` or ``in:<name>``."""

    site: str
    call: int
    slot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which tensors to keep beside their digests; None means all of them.

    Keep(sites=frozenset({"model.norm"}), positions=range(16, 48))
    """

    sites: frozenset[str] | None = None
    requests: frozenset[str] | None = None
    positions: range | None = None
    inputs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Digests of one value over a run. ``rows`` indexes the trace's row table."""

    op_class: str
    contract: str | None
    dtype: str
    shape: tuple[int, ...]
    rows: NDArray[np.int32]
    digests: Digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Kept rows of one value, in the order of ``rows`` (indices into the row table)."""

    rows: NDArray[np.int32]
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """Every row of every forward pass, in execution order; padding rows are left out.

    request indexes ``Trace.requests``; row and rows are index and number of rows in the call.
    """

    step: NDArray[np.int32]
    request: NDArray[np.int32]
    position: NDArray[np.int32]
    row: NDArray[np.int32]
    rows: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The run's scored tokens as columns."""

    request: NDArray[np.int32]
    position: NDArray[np.int32]
    token: NDArray[np.int64]
    logprob_bits: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One traced run.

    weights: per tensor, one digest per row (leading index), so that a difference can be placed.
    sites: site names in the order in which they first ran.
    """

    run: str
    engine: str
    model: str
    plan: str
    environment: Mapping[str, Any]
    requests: tuple[Request, ...]
    executed: Schedule
    table: RowTable
    samples: Samples
    columns: Mapping[ColumnKey, Column]
    sites: tuple[str, ...]
    weights: Mapping[str, Digests]
    blobs: Mapping[ColumnKey, Blob] = field(default_factory=dict[ColumnKey, Blob])

    def observations(self, site: str | None = None) -> Iterator[Observation]:
        """The trace row by row, as records; for printing, not for comparing."""
        for key, column in self.columns.items():
            if site not in (None, key.site):
                continue
            kind = "value" if column.dtype.startswith(("float", "bfloat")) else "choice"
            blob = "|".join(map(str, key)) if key in self.blobs else None
            for row, digest in zip(column.rows, column.digests, strict=True):
                yield Observation(
                    run=self.run, site=key.site, call=key.call, kind=kind, dtype=column.dtype,
                    request=self.requests[self.table.request[row]].id,
                    position=int(self.table.position[row]), shard=key.slot,
                    digest=bits.digest_hex(torch.from_numpy(digest)), blob=blob,
                )  # fmt: skip


@dataclass(slots=True)
class _Group:
    """The rows of one forward pass (or of its head): ``live`` are those that are not padding."""

    step: int
    request: NDArray[np.int32]
    position: NDArray[np.int32]
    live: NDArray[np.int32]
    rows: int
    base: int


@dataclass(slots=True)
class _Building:
    key: ColumnKey
    op_class: str
    contract: str | None
    dtype: str
    shape: tuple[int, ...]
    groups: list[int] = field(default_factory=list[int])
    count: int = 0
    digests: Digests = field(default_factory=lambda: np.empty((64, 2), np.int64))

    def append(self, group: int, digests: Digests) -> None:
        """Add rows to one growing array: a list of small tensors would keep the collector busy."""
        end = self.count + len(digests)
        if end > len(self.digests):
            grown = np.empty((max(end, 2 * len(self.digests)), 2), np.int64)
            grown[: self.count] = self.digests[: self.count]
            self.digests = grown
        self.digests[self.count : end] = digests
        self.count = end
        self.groups.append(group)


class Tracer:
    """Observer that records digests of every site call; see the module's docstring."""

    def __init__(self, *, keep: Keep | None = None, disk_bytes: int = DEFAULT_DISK_BYTES) -> None:
        self._keep = keep
        self._disk_bytes = disk_bytes
        self._kept_bytes = 0
        self._ids: dict[str, int] = {}
        self._groups: list[_Group] = []
        self._columns: dict[ColumnKey, _Building] = {}
        self._sites: dict[str, Site] = {}
        self._met: list[Site] = []
        self._known: dict[tuple[int, int], dict[str, _Building]] = {}
        self._blobs: dict[ColumnKey, list[tuple[NDArray[np.int32], Tensor]]] = {}

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        """The engine says whose rows the next calls hold."""
        ids = self._ids
        request = np.fromiter((ids.setdefault(r, len(ids)) if r else -1 for r, _ in rows), np.int32)
        position = np.fromiter((p for _, p in rows), np.int32)
        live = np.flatnonzero(request >= 0).astype(np.int32)
        base = self._groups[-1].base + len(self._groups[-1].live) if self._groups else 0
        self._groups.append(_Group(step, request, position, live, len(rows), base))

    def on_site(self, call: SiteCall, /) -> Tensor | None:
        """Record; never replaces anything."""
        self.record(call)

    @property
    def group(self) -> _Group:
        """The rows of the call that is being recorded."""
        return self._groups[-1]

    def record(self, call: SiteCall) -> dict[str, Digests]:
        """Digest inputs and output; returns them by slot, one int64 pair per live row."""
        columns = self._known.get((id(call.site), call.call)) or self._meet(call)
        tensors = {f"in:{name}": tensor for name, tensor in call.inputs.items()}
        tensors[OUTPUT] = call.output
        self._require_rows(call, tensors)
        digests = _on_host({slot: bits.digest_rows(each) for slot, each in tensors.items()})
        group = self.group
        for slot, tensor in tensors.items():
            if len(group.live) != group.rows:
                digests[slot] = digests[slot][group.live]
            column = columns.get(slot) or self._meet(call)[slot]
            column.append(len(self._groups) - 1, digests[slot])
            if self._keep is not None:
                self._keep_tensor(self._keep, column.key, tensor)
        return digests

    def _meet(self, call: SiteCall) -> dict[str, _Building]:
        """First call of a site: its columns by slot. Sites are kept, so that ids stay theirs."""
        self._sites.setdefault(call.site.name, call.site)
        tensors = {f"in:{name}": tensor for name, tensor in call.inputs.items()}
        columns: dict[str, _Building] = {}
        for slot, tensor in (tensors | {OUTPUT: call.output}).items():
            key = ColumnKey(call.site.name, call.call, slot)
            fresh = _Building(
                key=key, op_class=call.site.op_class, contract=call.site.contract,
                dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape[1:]),
            )  # fmt: skip
            columns[slot] = self._columns.setdefault(key, fresh)
        self._known[id(call.site), call.call] = columns
        self._met.append(call.site)
        return columns

    def _require_rows(self, call: SiteCall, tensors: Mapping[str, Tensor]) -> None:
        rows = self.group.rows
        for slot, tensor in tensors.items():
            if not tensor.dim() or tensor.size(0) != rows:
                raise InconclusiveError(
                    f"site {call.site.name}: {slot} has shape {tuple(tensor.shape)}, but the "
                    f"engine announced {rows} rows; such a trace compares nothing: report the "
                    "engine"
                )

    def _keep_tensor(self, keep: Keep, key: ColumnKey, tensor: Tensor) -> None:
        if keep.sites is not None and key.site not in keep.sites:
            return
        if key.slot != OUTPUT and not keep.inputs:
            return
        group = self._groups[-1]
        wanted = group.request[group.live] >= 0
        if keep.requests is not None:
            chosen = [self._ids[r] for r in keep.requests if r in self._ids]
            wanted &= np.isin(group.request[group.live], chosen)
        if keep.positions is not None:
            wanted &= np.isin(group.position[group.live], np.asarray(keep.positions))
        index = group.live[wanted]
        if not len(index):
            return
        rows = tensor.detach()[torch.from_numpy(index)].contiguous().cpu()
        self._kept_bytes += rows.nbytes
        if self._kept_bytes > self._disk_bytes:
            raise DiskError(
                f"the tensors asked for pass {self._disk_bytes / 1e6:.0f} MB at site {key.site}; "
                "name fewer sites, requests or positions, or raise the disk budget"
            )
        base = group.base + np.flatnonzero(wanted)
        self._blobs.setdefault(key, []).append((base.astype(np.int32), rows))

    def finish(
        self, run: Run, environment: Mapping[str, Any], weights: Mapping[str, Digests]
    ) -> Trace:
        """Close the trace of ``run``. environment: ``engine.describe()``."""
        order = {request.id: index for index, request in enumerate(run.requests)}
        known = np.asarray([order[name] for name in self._ids], np.int32)
        return Trace(
            run=uuid.uuid4().hex[:12], engine=run.engine, model=run.scenario.model,
            plan=run.scenario.plan, environment=environment, requests=run.requests,
            executed=run.executed, table=self._row_table(known), samples=_samples(run, order),
            columns=self._finish_columns(), sites=tuple(self._sites), weights=weights,
            blobs={
                key: Blob(rows=np.concatenate([r for r, _ in parts]),
                          tensor=torch.cat([t for _, t in parts]))
                for key, parts in self._blobs.items()
            },
        )  # fmt: skip

    def _row_table(self, known: NDArray[np.int32]) -> RowTable:
        groups = self._groups

        def join(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
            return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)

        return RowTable(
            step=join([np.full(len(g.live), g.step, np.int32) for g in groups]),
            request=join([known[g.request[g.live]] for g in groups]),
            position=join([g.position[g.live] for g in groups]),
            row=join([g.live for g in groups]),
            rows=join([np.full(len(g.live), g.rows, np.int32) for g in groups]),
        )

    def _finish_columns(self) -> dict[ColumnKey, Column]:
        spans = [np.arange(g.base, g.base + len(g.live), dtype=np.int32) for g in self._groups]
        shared: dict[tuple[int, ...], NDArray[np.int32]] = {}
        columns: dict[ColumnKey, Column] = {}
        for key, built in self._columns.items():
            groups = tuple(built.groups)
            if groups not in shared:
                shared[groups] = np.concatenate([spans[g] for g in groups])
            columns[key] = Column(
                op_class=built.op_class, contract=built.contract, dtype=built.dtype,
                shape=built.shape, rows=shared[groups],
                digests=built.digests[: built.count].copy(),
            )  # fmt: skip
        return columns


def _on_host(digests: dict[str, Tensor]) -> dict[str, Digests]:
    """The same as numpy arrays; a GPU is waited for once, not once a value."""
    devices = {each.device for each in digests.values()}
    if len(devices) > 1 or devices == {torch.device("cpu")}:
        return {slot: each.cpu().numpy() for slot, each in digests.items()}
    whole = torch.stack(list(digests.values())).cpu().numpy()
    return dict(zip(digests, whole, strict=True))


def _samples(run: Run, order: Mapping[str, int]) -> Samples:
    samples = run.samples
    return Samples(
        request=np.fromiter((order[s.request] for s in samples), np.int32, len(samples)),
        position=np.fromiter((s.position for s in samples), np.int32, len(samples)),
        token=np.fromiter((s.token for s in samples), np.int64, len(samples)),
        logprob_bits=np.fromiter((s.logprob_bits for s in samples), np.int32, len(samples)),
    )


def weight_digests(module: nn.Module) -> dict[str, Digests]:
    """One digest per row of every parameter and buffer: places a difference without the tensors."""
    named = [*module.named_parameters(), *module.named_buffers()]
    digests: dict[str, Digests] = {}
    for name, tensor in named:
        value = tensor.detach()
        rows = value.shape[0] if value.dim() else 1
        digests[name] = bits.digest_rows(value.reshape(rows, *value.shape[1:])).cpu().numpy()
    return digests
