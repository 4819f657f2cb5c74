"""A gate report as JUnit XML, which every CI shows.

One test case per gate: red gates are failures, inconclusive ones are errors (they prove nothing),
and what is not attributable or not applicable is skipped, with the reason. Counts and red controls
are properties of the case.

    write_whole(Path("gates.xml"), junit(report))

``zm gate MODEL --junit FILE`` writes it.
"""

import xml.etree.ElementTree as ET

from .gates.base import GateReport, GateResult

ELEMENTS = {
    "fail": "failure",
    "inconclusive": "error",
    "not-attributable": "skipped",
    "not-applicable": "skipped",
}


def junit(report: GateReport) -> str:
    """The report as one XML document."""
    statuses = [gate.status for gate in report.gates]
    asked = report.request
    suite = ET.Element(
        "testsuite",
        name=f"zm gate {asked.model} --plan {report.plan.name} --rollout {asked.rollout}",
        tests=str(len(statuses)),
        failures=str(statuses.count("fail")),
        errors=str(statuses.count("inconclusive")),
        skipped=str(sum(ELEMENTS.get(status) == "skipped" for status in statuses)),
        time=f"{report.seconds:.3f}",
        timestamp=report.created,
    )
    _properties(suite, {"digest": report.digest, "reason": report.reason} | report.environment)
    for gate in report.gates:
        _case(suite, gate, asked.model)
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ET.Element, gate: GateResult, model: str) -> None:
    case = ET.SubElement(
        suite,
        "testcase",
        classname=f"gates.{model}",
        name=f"{gate.id} {gate.title}",
        time=f"{gate.seconds:.3f}",
    )
    counts = {"compared": str(gate.compared), "differing": str(gate.differing)}
    _properties(case, counts | {"result": gate.result, "red controls": gate.control_text})
    if gate.status in ELEMENTS:
        outcome = ET.SubElement(case, ELEMENTS[gate.status], message=message(gate))
        outcome.text = "\n".join(gate.culprits)


def message(gate: GateResult) -> str:
    """Status and own result in words."""
    if gate.status == "not-attributable":
        return f"not attributable, an earlier gate is red; its own result: {gate.result}"
    return gate.reason


def _properties(parent: ET.Element, named: dict[str, str]) -> None:
    holder = ET.SubElement(parent, "properties")
    for name, value in named.items():
        ET.SubElement(holder, "property", name=name, value=printable(value))


def printable(text: str) -> str:
    """Without the control characters that XML forbids."""
    return "".join(char for char in text if char >= " " or char in "\t\n")
