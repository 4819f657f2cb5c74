"""From comparisons to records: logprob report, culprits with their patterns, groups.

    report = logprob_report(left_trace, right_trace, limits=None)
    found = culprits(comparison, grafter.evidence, exact)
    groups = group(found)

Nothing here runs an engine. ``localize.py`` is the flow that calls it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .cause import conclude
from .compare import ABSENT, Comparison, SiteComparison
from .exact import order_is_left
from .graft import Evidence
from .records import Culprit, CulpritGroup, LogprobReport, Pattern, Probe
from .trace import Bools, Samples, Trace

TILE = 16
MAX_ROW_INDEX = 32


def logprob_report(
    left: Trace, right: Trace, limits: Mapping[str, int] | None = None
) -> LogprobReport:
    """Compare every scored token's logprob bits.

    limits: only tokens whose row lies within these leading positions (None: all).
    """
    mine, theirs = _sample_keys(left, left), _sample_keys(right, left)
    mask = _sampled_mask(left)
    common, at_left, at_right = np.intersect1d(mine, theirs, return_indices=True)
    if limits is not None:
        reach = np.asarray([limits.get(request.id, 0) for request in left.requests], np.int64)
        inside = (common & 0xFFFFFFFF) - 1 < reach[common >> 32]
        common, at_left, at_right = common[inside], at_left[inside], at_right[inside]
    own, other = left.samples.logprob_bits[at_left], right.samples.logprob_bits[at_right]
    differs = own != other
    sampled = mask[common >> 32, common & 0xFFFFFFFF]
    values = own.view(np.float32).astype(np.float64), other.view(np.float32).astype(np.float64)
    finite = np.isfinite(values[0]) & np.isfinite(values[1])
    gap = (values[1] - values[0])[finite]
    odd = None if finite.all() else int((~finite).argmax())
    first = int(differs.argmax()) if differs.any() else None
    return LogprobReport(
        compared=len(common),
        differing=int(differs.sum()),
        sampled_compared=int(sampled.sum()),
        sampled_differing=int((differs & sampled).sum()),
        left_only=len(mine) - len(common) if limits is None else 0,
        right_only=len(theirs) - len(common) if limits is None else 0,
        max_abs=float(np.abs(gap).max(initial=0.0)),
        mean=float(gap.mean()) if len(gap) else 0.0,
        std=float(gap.std()) if len(gap) else 0.0,
        k3=float((np.expm1(gap) - gap).mean()) if len(gap) else 0.0,
        nonfinite=int((~finite).sum()),
        first_nonfinite=None if odd is None else _name(left, common[odd]),
        first_request=None if first is None else left.requests[common[first] >> 32].id,
        first_position=None if first is None else int(common[first] & 0xFFFFFFFF),
        first_left_bits=None if first is None else f"{int(own[first]) & 0xFFFFFFFF:08x}",
        first_right_bits=None if first is None else f"{int(other[first]) & 0xFFFFFFFF:08x}",
    )


def _name(trace: Trace, key: np.int64) -> str:
    return f"request {trace.requests[key >> 32].id}, position {int(key & 0xFFFFFFFF)}"


def _sample_keys(trace: Trace, reference: Trace) -> NDArray[np.int64]:
    index = {request.id: at for at, request in enumerate(reference.requests)}
    known = np.asarray([index[request.id] for request in trace.requests], np.int64)
    samples: Samples = trace.samples
    return (known[samples.request] << 32) | samples.position


def _sampled_mask(trace: Trace) -> Bools:
    longest = max((len(request.tokens) for request in trace.requests), default=0)
    mask = np.zeros((len(trace.requests), longest + 1), np.bool_)
    for index, request in enumerate(trace.requests):
        mask[index, : len(request.sampled_mask)] = request.sampled_mask
    return mask


def culprits(
    comparison: Comparison,
    evidence: Mapping[str, Evidence],
    exact: Mapping[str, Sequence[Probe]],
) -> tuple[Culprit, ...]:
    """Every site that got equal inputs and gave other bits, in execution order."""
    return tuple(
        _culprit(comparison, site, evidence.get(site.site, Evidence()), exact.get(site.site, ()))
        for site in comparison.sites
        if site.affected
    )


def _culprit(
    comparison: Comparison, site: SiteComparison, seen: Evidence, exact: Sequence[Probe]
) -> Culprit:
    index = int(np.flatnonzero(site.convicting)[0])
    left, right = comparison.digests(site, index)
    probes = [*seen.probes, *exact]
    order = order_is_left(site.op_class, probes)
    return Culprit(
        site=site.site,
        op_class=site.op_class,
        contract_left=site.contracts[0],
        contract_right=site.contracts[1],
        affected=site.affected,
        compared=site.compared,
        first=comparison.row(site, index),
        left_digest=left,
        right_digest=right,
        difference=seen.difference,
        ulp_histogram=dict(sorted(seen.histogram.items(), key=_bucket_start)),
        pattern=pattern(comparison, site),
        cause=conclude([*probes, *([order] if order else [])]),
    )


def _bucket_start(bucket: tuple[str, int]) -> float:
    start = bucket[0].partition("-")[0]
    return int(start) if start.isdecimal() else float("inf")


def pattern(comparison: Comparison, site: SiteComparison) -> Pattern:
    """Affected rows against row count, row index and tile offset, with what follows from it."""
    table, rows = comparison.left.table, site.rows[site.eligible]
    hit = site.convicting[site.eligible]
    counts, index, position = table.rows[rows], table.row[rows], table.position[rows]
    facts = [*_row_count_facts(counts, hit), *_tile_facts(position, hit)]
    return Pattern(
        by_rows=_tally(counts, hit),
        by_row_index=_tally(index[index < MAX_ROW_INDEX], hit[index < MAX_ROW_INDEX]),
        by_tile_offset=_tally(position % TILE, hit),
        lowest_position=int(position[hit].min()),
        facts=tuple(facts),
    )


def _tally(values: NDArray[np.int32], hit: Bools) -> dict[int, tuple[int, int]]:
    return {
        int(value): (int(hit[values == value].sum()), int((values == value).sum()))
        for value in np.unique(values)
    }


def _row_count_facts(counts: NDArray[np.int32], hit: Bools) -> list[str]:
    touched, spared = np.unique(counts[hit]), np.setdiff1d(counts, counts[hit])
    if not len(spared):
        return [f"affected rows occur at every row count ({_span(touched)})"]
    return [
        f"all affected rows ran in calls of {_span(touched)} rows, none of those in calls of "
        f"{_span(spared)} rows"
    ]


def _tile_facts(position: NDArray[np.int32], hit: Bools) -> list[str]:
    lowest = int(position[hit].min())
    below = int((position < lowest).sum())
    if not below:
        return []
    border = " (a tile border)" if lowest % TILE == 0 else ""
    return [f"no row below position {lowest}{border} is affected, of {below} compared"]


def _span(values: NDArray[np.int32]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values.min()}-{values.max()}"


def group(found: Sequence[Culprit]) -> tuple[CulpritGroup, ...]:
    """Culprits of one operator class and cause together, largest group first."""
    groups: dict[tuple[str, str], list[Culprit]] = {}
    for culprit in found:
        groups.setdefault((culprit.op_class, culprit.cause.name), []).append(culprit)
    return tuple(
        CulpritGroup(
            op_class=members[0].op_class,
            cause=members[0].cause.name,
            count=len(members),
            affected=sum(member.affected for member in members),
            compared=sum(member.compared for member in members),
            sites=tuple(member.site for member in members),
        )
        for members in sorted(groups.values(), key=len, reverse=True)
    )


def within(comparison: Comparison, site: SiteComparison, limits: Mapping[str, int]) -> Bools:
    """Rows of a site that lie within the leading positions of ``limits`` and were compared."""
    table = comparison.left.table
    requests = comparison.left.requests
    reach = np.asarray([limits.get(request.id, 0) for request in requests], np.int64)
    inside = table.position[site.rows] < reach[table.request[site.rows]]
    return inside & (site.output.state != ABSENT)
