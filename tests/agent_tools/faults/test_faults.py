"""Every catalogued fault is named as the catalogue says, and nothing is named without it."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from zeromismatch.agent_tools.faults import FAULTS, check, plant
from zeromismatch.agent_tools.faults.alone import MAX_BYTES
from zeromismatch.agent_tools.faults.checking import fault_requests
from zeromismatch.agent_tools.faults.table import ELSEWHERE, TEST, fixed_cells, held_lines
from zeromismatch.agent_tools.localize import Options, localize
from zeromismatch.agent_tools.sides import Side
from zeromismatch.agent_tools.trace import Trace, Tracer, weight_digests
from zeromismatch.agent_tools.verdict import compare_traces
from zeromismatch.kernels import dispatch
from zeromismatch.kernels.certify import load_operators
from zeromismatch.kernels.errors import UsageError
from zeromismatch.model_recipes.models import LoadedModel
from zeromismatch.model_recipes.plan import aligned_plan
from zeromismatch.model_recipes.state import state_digest
from zeromismatch.trainer.engines.base import Scenario
from zeromismatch.trainer.engines.packed import PackedEngine
from zeromismatch.trainer.engines.paged import PagedEngine

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "benchmarks/faults.md"
LOCALIZED = defaultdict(list)
for fault in FAULTS.values():
    if fault.by in ("operator", "anchor"):
        LOCALIZED[fault.model, fault.sides].append(fault.id)
OTHERS = [fault.id for fault in FAULTS.values() if fault.by not in ("operator", "anchor")]
SIZE = re.compile(r"(?:operator|engines), ([\d,]+) B")
QUICK = Options(self_test=False, causes=False)


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_planted_fault_is_named_at_its_operator_with_its_cause(
    models: Callable[[str], LoadedModel], name: str
) -> None:
    model = models(FAULTS[name].model)
    before = state_digest(model.module)
    caught = check(name, model)
    assert caught.right, (caught.expected, caught.named, caught.detail)
    assert state_digest(model.module) == before


@pytest.mark.parametrize(("name", "sides"), list(LOCALIZED))
def test_without_a_fault_the_same_sides_are_equal(
    models: Callable[[str], LoadedModel], name: str, sides: tuple[str, str]
) -> None:
    model = models(name)
    left, right = map(Side.parse, sides)
    found = localize(left, right, model, fault_requests(model), plan="aligned", options=QUICK)
    assert found.status == "EQUAL", (LOCALIZED[name, sides], found.reason)
    assert found.logprobs is not None
    assert found.logprobs.compared > 50


@pytest.mark.parametrize("name", OTHERS)
def test_without_the_fault_nothing_is_named(model: LoadedModel, name: str) -> None:
    caught = check(name, model, planted=False)
    assert caught.named == (), caught.detail
    assert not caught.right


def test_a_fault_ends_with_its_block(model: LoadedModel) -> None:
    load_operators()
    contract = "rmsnorm.lanes16.float32.cpu.v1"
    served = dispatch.choose(contract)
    with plant("B01", model):
        assert dispatch.choose(contract).name == "substituted"
    assert dispatch.choose(contract) is served


def test_an_unknown_fault_is_refused(model: LoadedModel) -> None:
    with pytest.raises(UsageError, match="no fault is called 'Z99'; use one of B01"):
        plant("Z99", model)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_shows_every_fault_red_with_it_and_green_without() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = {cells(line)[0]: cells(line) for line in lines if line.startswith("| ")}
    for fault in FAULTS.values():
        row = rows[fault.id]
        assert tuple(row[:5]) == fixed_cells(fault)
        assert row[5:7] == [f"red: {fault.expected}", "green"]
        size = SIZE.fullmatch(row[7])
        assert size, row[7]
        assert int(size[1].replace(",", "")) < MAX_BYTES
        assert row[8] == f"`{TEST}[{fault.id}]`"
    assert [line for line in held_lines() if line not in lines] == []
    assert len(rows) == len(FAULTS) + len(ELSEWHERE) + 2  # both tables share header and rule


def test_every_field_report_is_planted_or_held_by_a_test_that_exists() -> None:
    assert not FAULTS.keys() & ELSEWHERE.keys()
    assert len(FAULTS) + len(ELSEWHERE) == 52
    for held in ELSEWHERE.values():
        assert held.test is None or (ROOT / held.test).is_file(), held.test


def clean_runs(model: LoadedModel, seeds: range) -> None:
    """Fuzzed schedules against one packed forward, every operator row compared."""
    requests = fault_requests(model)[1:]
    weights = weight_digests(model.module)
    plan = aligned_plan(model.dtype, model.device)

    def traced(name: str, engine: PackedEngine | PagedEngine) -> Trace:
        tracer = Tracer()
        schedule = engine.schedule(name, requests)
        scenario = Scenario(model="m", plan="aligned", requests=requests, schedule=schedule)
        return tracer.finish(engine.run(scenario, tracer), {"dtype": "float32"}, weights)

    with contextlib.closing(PackedEngine(model, plan)) as engine:
        packed = traced("packed", engine)
    with contextlib.closing(PagedEngine(model, plan)) as engine:
        for seed in seeds:
            found = compare_traces(traced(f"fuzz:{seed}", engine), packed)
            assert found.status == "EQUAL", (seed, found.reason)
            assert found.coverage is not None
            assert found.coverage.rows >= packed.table.step.size


def test_clean_fuzzed_runs_give_no_verdict(model: LoadedModel) -> None:
    clean_runs(model, range(40))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_thousand_clean_fuzzed_runs_give_no_verdict(model: LoadedModel) -> None:
    clean_runs(model, range(1000))


@pytest.mark.slow
def test_clean_fuzzed_runs_of_other_seeds_give_no_verdict(model: LoadedModel) -> None:
    clean_runs(model, range(900, 1000))
