"""Verdicts: what a comparison amounts to, in a status and a sentence.

    compare_traces(load_trace(Path("runs/7/left")), load_trace(Path("runs/7/right")))

Saved traces can be compared without engines or models: alignment, coverage, logprob bits, and the
operators that got equal inputs and gave other bits. Operators behind the first one are judged only
where their inputs happen to be equal; ``localize`` grafts and finds them all.
"""

from collections.abc import Sequence
from typing import Any

from ..kernels.errors import NonFiniteError
from .anchor import prove_alignment
from .compare import Comparison
from .findings import culprits, group, logprob_report
from .records import Coverage, Culprit, Divergence, LogprobReport, SideRecord, Status
from .trace import Trace


def compare_traces(left: Trace, right: Trace, *, coverage: float = 0.8) -> Divergence:
    """Compare two finished traces. coverage: share of operators needed on both sides."""
    anchor = prove_alignment(left, right)

    def verdict(status: Status, reason: str, **found: Any) -> Divergence:
        return Divergence(
            status=status, reason=reason, model=left.model,
            dtype=str(left.environment.get("dtype", "unknown")), anchor=anchor,
            left=side_record(left, left.engine), right=side_record(right, right.engine), **found,
        )  # fmt: skip

    if anchor.misalignment is not None:
        return verdict("MISALIGNED", anchor.misalignment.message)
    comparison = Comparison(left, right)
    seen, logprobs = comparison.coverage(coverage), logprob_report(left, right)
    compared = {"coverage": seen, "logprobs": logprobs}
    lacking = too_little(seen, logprobs)
    if lacking:
        return verdict("INCONCLUSIVE", lacking, **compared)
    if not (seen.differing_rows or seen.differing_inputs or logprobs.differing):
        return verdict("EQUAL", equal_reason(seen, logprobs), **compared)
    found = culprits(comparison, {}, {})
    status, reason = judge(found, seen, logprobs)
    return verdict(
        status, reason, first_divergence=comparison.first(), culprits=found, groups=group(found),
        notes=("nothing was grafted: later culprits may be missing",), **compared,
    )  # fmt: skip


def side_record(
    trace: Trace, side: str, *, seconds: float = 0.0, folder: str | None = None
) -> SideRecord:
    """One side as it ran."""
    return SideRecord(
        side=side, engine=trace.engine, plan=trace.plan, run=trace.run,
        steps=len(set(trace.table.step.tolist())), rows=len(trace.table.step),
        samples=len(trace.samples.position), seconds=seconds, trace=folder,
    )  # fmt: skip


def equal_reason(coverage: Coverage, logprobs: LogprobReport) -> str:
    """What EQUAL rests on; NonFiniteError where both sides agree on something that is no number."""
    if logprobs.nonfinite:
        raise NonFiniteError(
            f"{logprobs.nonfinite} logprobs are not finite on both sides, first at "
            f"{logprobs.first_nonfinite}; check the weights and the request there"
        )
    return (
        f"all {logprobs.compared} scored tokens and all {coverage.rows} operator rows have equal "
        "bits"
    )


def too_little(coverage: Coverage, logprobs: LogprobReport) -> str | None:
    """Why nothing may be concluded, or None."""
    if coverage.rows == 0 or logprobs.compared == 0:
        return (
            f"{coverage.rows} operator rows and {logprobs.compared} scored tokens were compared; "
            "give requests with at least two tokens that both sides run"
        )
    if coverage.share < coverage.threshold:
        return (
            f"only {coverage.share:.0%} of the operators were seen on both sides, "
            f"{coverage.threshold:.0%} are needed; compare engines that run the same operators"
        )
    return None


def judge(
    found: Sequence[Culprit], coverage: Coverage, logprobs: LogprobReport
) -> tuple[Status, str]:
    """Status and reason of two runs that differ."""
    tokens = f"{logprobs.differing} of {logprobs.compared} scored tokens differ"
    if found:
        return "DIVERGENT", f"{tokens}; {len(found)} operators give other bits on equal inputs"
    unseen = [*coverage.incomplete, *coverage.left_only, *coverage.right_only]
    if unseen:
        return "INCONCLUSIVE", (
            f"{tokens}, but every operator seen is innocent; not compared: {', '.join(unseen[:5])}"
        )
    return "DIVERGENT", (
        f"{tokens} and {coverage.differing_rows} operator rows, but on the reference's inputs "
        "every operator agrees; run it again: the left side may not repeat itself"
    )
