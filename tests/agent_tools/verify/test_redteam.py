"""The red-team suite: every cheat is caught, and the report names the rule that it broke."""

from collections.abc import Callable
from pathlib import Path

import pytest

from zeromismatch.agent_tools.verify import verify as verifier
from zeromismatch.agent_tools.verify import verify_kernel
from zeromismatch.agent_tools.verify.records import Verification
from zeromismatch.agent_tools.verify.rules import RULES
from zeromismatch.agent_tools.verify.watch import Nursery

from .redteam import DYNAMIC, STATIC, Cheat, native, rotary

Record = Callable[[str, object], None]


def tried(cheat: Cheat, folder: Path, nursery: Nursery) -> Verification:
    file = folder / "cheat.py"
    file.write_text(cheat.source)
    return verify_kernel(
        file,
        cheat.contract,
        quick=True,
        questions=cheat.questions,  # type: ignore[arg-type]
        nursery=nursery,
        limits=nursery.limits,
    )


def tell(record: Record, name: str, cheat: Cheat, report: Verification) -> None:
    """A row of benchmarks/redteam.md."""
    record("cheat", name)
    record("rule", cheat.rule)
    record("watched", RULES[cheat.rule].watched)
    record("past the static rules", "yes" if cheat.hole else "no")
    record("named", ", ".join(report.broken))
    record("said", report.violations[0].detail if report.violations else report.reason)


@pytest.mark.parametrize("name", STATIC)
def test_a_cheat_is_seen_in_the_file(
    name: str, tmp_path: Path, nursery: Nursery, record_property: Record
):
    report = tried(STATIC[name], tmp_path, nursery)
    tell(record_property, name, STATIC[name], report)
    assert report.status == "fail"
    assert STATIC[name].rule in report.broken, report.reason
    assert report.isolation is None, "it ran"


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_cheat_is_caught_at_work(
    name: str, tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch,
    record_property: Record,
):  # fmt: skip
    cheat = DYNAMIC[name]
    if cheat.hole:
        monkeypatch.setattr(verifier, "check", lambda source, entries: ())
    report = tried(cheat, tmp_path, nursery)
    tell(record_property, name, cheat, report)
    assert report.status == "fail", report.reason
    # On a busy machine the clock may refuse a slow kernel before it compares speeds.
    allowed = {cheat.rule, "launches"} if cheat.rule == "speed" else {cheat.rule}
    assert allowed & set(report.broken), report.reason
    assert report.isolation is not None or cheat.rule == "load", "nothing ran"


@pytest.mark.parametrize("source", [rotary(), native()], ids=["torch", "C++"])
def test_what_the_cheats_are_made_of_is_honest(source: str, tmp_path: Path, nursery: Nursery):
    report = tried(Cheat(rule="", source=source), tmp_path, nursery)
    assert report.violations == ()
    assert report.bits.status == "pass"
    assert report.status == "void", "speed was not asked"


def test_every_rule_is_broken_by_some_cheat():
    assert {cheat.rule for cheat in (*STATIC.values(), *DYNAMIC.values())} == set(RULES)
