"""What the MCP server, the red team, the skill's validators and a scripted agent leave, kept.

    python benchmarks/mcp.py     # writes mcp.md, redteam.md and agent_pr.md in this folder

It runs the tests that `make test` runs too and writes down what each recorded. A test that fails or
is skipped is shown as such: the pages claim nothing that did not happen in this very run.
"""

import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as Tree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "tests/agent_tools/server"
SERVER = (
    f"{FOLDER}/test_conformance.py", f"{FOLDER}/test_fuzz.py", f"{FOLDER}/test_process.py",
    "tests/skill/test_skill.py",
)  # fmt: skip
CHEATS = ("tests/agent_tools/verify/test_redteam.py",)
AGENTS = ("tests/agent_tools/drivers/test_workbench.py", "-k", "competent")
SECONDS = 3600
COLUMNS = ("cheat", "rule", "watched", "past the static rules", "named", "said")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test: where, how it ended, and what it recorded."""

    file: str
    name: str
    result: str
    seconds: float
    told: dict[str, str]


def run(words: tuple[str, ...]) -> list[Case]:
    """Run tests in one process; every case in the order of its run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        more = ["-q", "-n", "0", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *more, *words], cwd=ROOT, timeout=SECONDS, check=False
        )
        if not report.is_file():
            raise SystemExit(f"pytest ended with {done.returncode} and no report")
        return list(_cases(Tree.parse(report)))


def _cases(tree: "Tree.ElementTree[Tree.Element]") -> Iterator[Case]:
    for case in tree.iter("testcase"):
        result = next(
            (kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None),
            "passed",
        )
        yield Case(
            file=case.get("classname", "").rpartition(".")[2], name=case.get("name", ""),
            result=result, seconds=float(case.get("time", 0)),
            told={str(p.get("name")): str(p.get("value")) for p in case.iter("property")},
        )  # fmt: skip


def counts(cases: list[Case]) -> str:
    """How the tests ended, in words."""
    kinds = sorted({case.result for case in cases})
    return ", ".join(f"{sum(c.result == kind for c in cases)} {kind}" for kind in kinds)


def table(cases: list[Case]) -> list[str]:
    """A row a test."""
    rows = [
        f"| {case.name.removeprefix('test_').replace('_', ' ').replace('|', ' ')} | {case.result} "
        f"| {case.seconds:.1f} |"
        for case in cases
    ]
    return ["| test | result | s |", "|---|---|--:|", *rows]


def server_page(cases: list[Case]) -> str:
    """benchmarks/mcp.md."""
    by = {
        name: [case for case in cases if case.file == name]
        for name in ("test_conformance", "test_fuzz", "test_process", "test_skill")
    }
    lines = ["# The MCP server and the skill, judged by other people's programs", "", MADE, ""]
    lines += ["## Conformance suite, both protocol eras", "", counts(by["test_conformance"]), ""]
    for case in by["test_conformance"]:
        for value in case.told.values():
            text = value.replace("\x1b", "").strip()
            lines += [f"`{case.name}`, {case.result}:", "", "```", *text.splitlines(), "```", ""]
    lines += ["What fails asks for the suite's own tools, prompts or resources, which no other "
              "server has; the test lists them.", "",
              "## Fuzzing", "", "| what | count |", "|---|--:|"]  # fmt: skip
    lines += [f"| {k} | {v} |" for case in by["test_fuzz"] for k, v in case.told.items()]
    lines += ["", *table(by["test_fuzz"]), "",
              "## Killed, cancelled, slow and parallel", "", *table(by["test_process"]), "",
              "## The skill's validators", ""]  # fmt: skip
    for case in by["test_skill"]:
        for name, value in case.told.items():
            lines += [
                f"`{name}`, {case.result}:",
                "",
                "```",
                *value.strip().splitlines(),
                "```",
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


def redteam_page(cases: list[Case]) -> str:
    """benchmarks/redteam.md."""
    cheats = [case for case in cases if "cheat" in case.told]
    caught = sum(case.result == "passed" for case in cheats)
    told = f"{len(cheats)} cheats, {caught} caught with the rule that they break. The rules in "
    told += "words: `zm verify --rules`. *Past the static rules*: the check of the file's text was "
    told += "taken away first, so that what stands behind it is tried."
    lines = ["# The red team: kernels that cheat", "", MADE, "", told, ""]
    lines += [f"| {' | '.join((*COLUMNS, 'result'))} |", f"|{'---|' * (len(COLUMNS) + 1)}"]
    for case in cheats:
        cells = [case.told.get(name, "").replace("/tmp/", "TMP/") for name in COLUMNS]
        cells = [" ".join(cell.split()).replace("|", "\\|")[:160] for cell in cells]
        lines.append(f"| {' | '.join(cells)} | {case.result} |")
    return "\n".join(lines) + "\n"


MADE = (
    f"Made by `python benchmarks/mcp.py` on {platform.machine()} with Python "
    f"{platform.python_version()}; seconds are those of a machine that did other work too."
)


def main() -> None:
    """Run the tests and write the pages; the request is the one that the scripted agent made."""
    here = Path(__file__).parent
    cases = run(SERVER)
    (here / "mcp.md").write_text(server_page(cases))
    cheats = run(CHEATS)
    (here / "redteam.md").write_text(redteam_page(cheats))
    agents = run(AGENTS)
    (here / "agent_pr.md").write_text(next(c.told["body"] for c in agents if "body" in c.told))
    print(counts([*cases, *cheats, *agents]))


if __name__ == "__main__":
    main()
