"""Honest kernels get four answers; nothing that cannot be judged is ever called green."""

import json
from pathlib import Path

import pytest
import torch

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.verify import calls, verify_kernel, watch
from zeromismatch.agent_tools.verify.formulas import FORMULAS
from zeromismatch.agent_tools.verify.inputs import held_out
from zeromismatch.agent_tools.verify.judge import Accuracy, Gradients, PlainDraw
from zeromismatch.agent_tools.verify.rules import RULES
from zeromismatch.agent_tools.verify.subject import registered
from zeromismatch.agent_tools.verify.watch import Nursery, StoppedError
from zeromismatch.kernels import certify
from zeromismatch.kernels.contract import contracts
from zeromismatch.kernels.dispatch import reference
from zeromismatch.kernels.entry_points import contract_for, entries_of
from zeromismatch.kernels.errors import CapabilityError, UsageError
from zeromismatch.kernels.trial import outputs

from .conftest import CANDIDATES
from .redteam import ROTARY_ID, rotary

certify.load_operators()
JUDGED = [entry.id for entry in contracts(device="cpu") if entry.op in FORMULAS]
NORM = CANDIDATES / "norm.py"
NORM_ID, NEW_ID = "rmsnorm.lanes16.float32.cpu.v1", "rmsnorm.mine.float32.cpu.v1"


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    file = tmp_path / "rotary.py"
    file.write_text(rotary())
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contract", "status", "code"), [(NORM_ID, "pass", 0), (NEW_ID, "needs-review", 3)]
)
def test_an_honest_kernel_has_four_green_answers(
    contract: str, status: str, code: int, nursery: Nursery
):
    report = verify_kernel(NORM, contract, quick=True, nursery=nursery, limits=nursery.limits)
    assert report.violations == ()
    answers = (report.bits, report.accuracy, report.gradient, report.speed)
    assert [answer.status for answer in answers] == ["pass"] * 4
    assert (report.status, report.exit_code) == (status, code), report.reason
    assert report.bits.elements > 100_000
    questions = {control.question for control in report.controls}
    assert questions == {"isolation", "bits", "accuracy", "gradient", "speed"}
    assert all(control.red for control in report.controls)
    assert {"verifier", "comparer", "references", "contract", "core"} <= set(report.hashes)
    assert report.isolation is not None
    assert {"seccomp", "landlock", "capabilities", "limits"} <= set(report.isolation.active)
    assert bool(report.needs_review) == (contract == NEW_ID)


def test_a_blind_comparer_makes_the_verdict_void(
    honest: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calls.bits, "first_difference", lambda a, b: None)
    report = verify_kernel(
        honest, ROTARY_ID, quick=True, questions=["bits"], nursery=nursery, limits=nursery.limits
    )
    assert report.bits.status == "pass"
    assert report.status == "void"
    assert {control.name for control in report.controls if not control.red} == {
        "one flipped bit", "stale kernel",
    }  # fmt: skip


def test_a_missing_isolation_is_an_error_until_a_person_accepts_it(
    honest: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watch, "REQUIRED", (*watch.REQUIRED, "armour"))
    with pytest.raises(CapabilityError, match="--allow-missing armour"):
        verify_kernel(honest, ROTARY_ID, quick=True, nursery=nursery)
    report = verify_kernel(
        honest, ROTARY_ID, quick=True, questions=["bits"], nursery=nursery,
        allow_missing=["armour"],
    )  # fmt: skip
    assert report.isolation is not None
    assert report.isolation.waived == ("armour",)


def test_a_worker_holds_no_module_of_this_package(tmp_path: Path, nursery: Nursery):
    spy = "import sys\ndef forward():\n    raise KeyError([m for m in sys.modules if 'zero' in m])"
    (tmp_path / "candidate.py").write_text(spy)
    worker = nursery.start(tmp_path, pattern="nan")
    assert worker.ask({"do": "load", "source": "candidate.py"})[0]["ok"]
    answer, _ = worker.ask({"do": "call", "entry": "forward", "args": [], "sizes": []})
    assert answer["text"] == "[]"
    worker.end()


def test_what_is_stopped_is_gone(tmp_path: Path, nursery: Nursery):
    (tmp_path / "candidate.py").write_text("def forward():\n    while True: pass")
    worker = nursery.start(tmp_path, pattern="nan")
    worker.ask({"do": "load", "source": "candidate.py"})
    with pytest.raises(StoppedError, match="time"):
        worker.ask({"do": "call", "entry": "forward", "args": [], "sizes": []}, seconds=0.2)
    worker.end()
    assert not Path(f"/proc/{worker.pid}").exists()


def test_what_cannot_be_verified_is_said(tmp_path: Path, honest: Path):
    with pytest.raises(UsageError, match="no contract"):
        verify_kernel(honest, "rotary.unknown")
    with pytest.raises(UsageError, match="is a gradient"):
        verify_kernel(honest, "rmsnorm_grad.lanes16.float32.cpu.v1")
    with pytest.raises(UsageError, match="not a file"):
        verify_kernel(tmp_path / "none.py", ROTARY_ID)
    link = tmp_path / "link.py"
    link.symlink_to(honest)
    with pytest.raises(UsageError, match="not a file"):
        verify_kernel(link, ROTARY_ID)


def test_a_gpu_contract_needs_a_gpu(honest: Path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    found = [each.id for each in contracts(op="rotary", dtype="float32") if each.device != "cpu"]
    with pytest.raises(CapabilityError, match="no GPU"):
        verify_kernel(honest, found[0])


@pytest.mark.parametrize("contract_id", JUDGED)
def test_a_reference_is_accurate_and_has_the_gradients_of_its_formula(contract_id: str):
    """Formulas, tolerances and bounds fit what candidates are held to; a bad gradient does not."""
    contract, _ = contract_for(contract_id)
    entries = entries_of(contract)
    accuracy = Accuracy(formula=FORMULAS[contract.op])
    good, bad = (Gradients(names=tuple(n for n in entries if n != "forward")) for _ in range(2))
    for entry in entries.values():
        case = next(held_out(entry.contract, PlainDraw(entry.contract, 7), quick=True, rows=(9,)))
        got = outputs(reference(entry.contract.id).run(*case.arguments))
        if entry.name == "forward":
            accuracy.add(case.arguments, got)
        else:
            good.add(entry, case.arguments, got)
            bad.add(entry, case.arguments, [each * 1.05 for each in got])
    assert accuracy.answer().status == "pass", accuracy.answer().detail
    if good.names and not good.without:
        assert good.answer().status == "pass", good.answer().detail
        assert bad.answer().status == "fail"


def test_every_contract_has_a_formula_or_says_why_not():
    for entry in contracts():
        if entry.op.endswith("_grad") or "_grad_" in entry.op or entry.op == "gemm":
            continue
        subject = registered(entry.id)
        assert subject.formula or "no fp64 formula" not in subject.why_no_formula, entry.id


def test_the_command_prints_rules_and_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["verify", "--rules", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rules"]) == len(RULES)
    file = tmp_path / "cheat.py"
    file.write_text(rotary("import socket"))
    assert run(["verify", str(file), "--contract", ROTARY_ID, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["violations"][0]["rule"] == "network"
    assert run(["verify", str(file)]) == 2
    assert run(["verify", str(file), "--contract", ROTARY_ID, "--allow-missing", "all"]) == 2
