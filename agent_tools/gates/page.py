"""A gate report as a page: one claim per gate, with its count and its red control.

    write_report(out / "report.html", page_of(report, command="zm gate tiny:llama"))

The culprits of C4 and C5 are shown as the comparisons that they come from.
"""

import shlex

from ..records import Status
from ..report import Claim, Command, Comparison, ReportData
from .base import GateReport, GateResult

VERDICTS: dict[str, Status] = {
    "pass": "EQUAL",
    "fail": "DIVERGENT",
    "inconclusive": "INCONCLUSIVE",
}


def page_of(report: GateReport, command: str, folder: str = "gates.json") -> ReportData:
    """What the page shows; every number is in the report. folder: where the report lies."""
    counts = [gate.tokens for gate in report.gates]
    return ReportData(
        title=f"{report.identity.spec}: gates under plan {report.plan.name}",
        verdict=VERDICTS[report.status],
        headline=report.reason,
        model=report.identity.spec,
        plan=report.plan.name,
        dtype=report.request.dtype,
        compared=sum(compared for compared, _ in counts),
        differing=sum(differing for _, differing in counts),
        created=report.created,
        comparisons=tuple(
            Comparison(
                title=f"{gate.id} {gate.title}",
                note=gate.claim,
                divergence=gate.divergence,
                heat=gate.heat,
            )
            for gate in report.gates
            if gate.divergence is not None
        ),
        claims=tuple(claim_of(gate) for gate in report.gates),
        speeds=tuple(speed for gate in report.gates for speed in gate.speeds),
        digests={
            "report": report.digest,
            "weights": report.identity.weights_root,
            "config": report.identity.config_digest,
            "plan": report.plan_digest,
            "environment": report.environment_digest,
            "prompts": report.requests_digest,
        },
        environment=report.environment,
        commands=(
            Command(label="The same gates", command=command),
            Command(
                label="Again, against this report", command=shlex.join(["zm", "regress", folder])
            ),
        ),
        notes=tuple(
            f"{gate.id}: {note}"
            for gate in report.gates
            for note in gate.not_applicable + gate.notes
        ),
    )


def claim_of(gate: GateResult) -> Claim:
    """One gate as one claim."""
    own = "" if gate.status == gate.result else f"own result: {gate.result}. "
    facts = [f"{entry.name}: {entry.value}" for entry in gate.preconditions]
    return Claim(
        name=f"{gate.id} {gate.title}: {gate.claim}",
        status=gate.status,
        compared=gate.compared,
        differing=gate.differing,
        control=gate.control_text,
        detail=f"{own}{gate.reason}" + (f" ({'; '.join(facts)})" if facts else ""),
    )
