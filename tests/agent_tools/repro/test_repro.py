"""Repros: the smallest call that still differs, alone in a file, with the right exit code."""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from zeromismatch.agent_tools.faults import FAULTS, plant
from zeromismatch.agent_tools.faults.alone import MAX_BYTES, run_alone, write_repro_of
from zeromismatch.agent_tools.faults.checking import fault_requests
from zeromismatch.agent_tools.localize import Options, localize
from zeromismatch.agent_tools.records import Divergence
from zeromismatch.agent_tools.reduction.capture import capture
from zeromismatch.agent_tools.reduction.case import Flags
from zeromismatch.agent_tools.reduction.shrink import minimise, shrink
from zeromismatch.agent_tools.repro import Repro, repro_of, write_repro
from zeromismatch.agent_tools.sides import Runner, Side
from zeromismatch.kernels.errors import InconclusiveError, UsageError
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.trainer.engines.base import Request

SOURCE = Path(__file__).resolve().parents[3] / "src"
ALONE = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
MOST_IMPORTS = 2.0
Stock = tuple[Runner, Runner, Divergence]


def alone(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a generated file in a process of its own."""
    return subprocess.run(
        [sys.executable, str(folder / "repro.py"), *arguments],
        capture_output=True, text=True, check=False, cwd=folder, env=ALONE,
    )  # fmt: skip


def find(
    model: LoadedModel, requests: tuple[Request, ...], fault: str
) -> tuple[Runner, Runner, Divergence]:
    """Localize a planted fault; the caller keeps it planted."""
    sides = tuple(map(Side.parse, FAULTS[fault].sides))
    left, right = (Runner(side=s, model=model, requests=requests, plan="aligned") for s in sides)
    options = Options(self_test=False)
    return left, right, localize(*sides, model, requests, plan="aligned", options=options)


@pytest.mark.parametrize("part", ["q_proj", "attention"])
def test_a_stock_operator_becomes_a_file_of_pure_torch(
    stock: Stock, tmp_path: Path, part: str
) -> None:
    left, right, found = stock
    site = next(each.site for each in found.culprits if each.site.endswith(part))
    record = write_repro(tmp_path, left, right, found, site=site, seconds=20)
    text = (tmp_path / "repro.py").read_text()
    assert record.pure_torch
    assert "zeromismatch." not in text
    assert record.status == "minimal"
    assert record.cause == "reduction order"
    assert record.bytes < 5_000
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 100_000
    done = alone(tmp_path)
    assert done.returncode == 1, done.stderr
    assert "as recorded" in done.stdout
    assert record.left.digest in done.stdout


@pytest.mark.parametrize("fault", ["B02", "B03", "P01"])
def test_a_bug_planted_inside_a_model_shrinks_to_its_operator(
    model: LoadedModel, requests: tuple[Request, ...], tmp_path: Path, fault: str
) -> None:
    with plant(fault, model):
        left, right, found = find(model, requests[1:2], fault)
        record = write_repro(tmp_path, left, right, found, fault=fault, seconds=20)
    assert record.op_class == FAULTS[fault].op_class
    assert record.site == (FAULTS[fault].site or record.site)
    assert record.bytes <= 10_000
    tensors = load_file(tmp_path / "inputs.safetensors")
    if fault != "P01":
        assert tensors["shared.weight"].shape[0] == 1
        assert tensors["shared.weight"].shape[1] <= 2
    if fault == "B02":
        assert alone(tmp_path).returncode == 1


IN_SUITE = ("B01", "Q01")
"""One call of an operator; a cache, which needs the engines."""
ANY = [
    pytest.param(fault, marks=[] if fault in IN_SUITE else [pytest.mark.long]) for fault in FAULTS
]
IMPORTS = {"operator": "torch", "engines": "torch, transformers.models.llama.modeling_llama"}


def cpu_seconds(code: str) -> float:
    """What a process costs; elapsed time on a busy machine says nothing."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, env=ALONE)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize("fault", ANY)
def test_a_repro_of_any_planted_fault_is_small_and_runs_alone_in_seconds(
    tmp_path: Path, fault: str
) -> None:
    kind = write_repro_of(fault, load_model(FAULTS[fault].model), tmp_path)
    ran = run_alone(tmp_path)
    assert ran.exit_code == 1, ran.said
    assert ran.bytes < MAX_BYTES
    # Neighbours on the machine slow every instruction, imports as well: they are the measure.
    assert ran.cpu_seconds < MOST_IMPORTS * cpu_seconds(f"import {IMPORTS[kind]}")


def test_without_the_fault_the_same_case_is_equal(
    model: LoadedModel, requests: tuple[Request, ...]
) -> None:
    with plant("B02", model):
        left, right, found = find(model, requests[1:2], "B02")
        case = capture(left, right, found.culprits[0], fault="B02")
    smaller, status, tried = shrink(case, 10)
    assert (status, case.differs(), smaller.differs()) == ("minimal", True, True)
    assert tried > 5
    assert smaller.nbytes < case.nbytes / 1000
    assert not replace(smaller, left=replace(smaller.left, fault=None)).differs()


def test_switches_that_do_not_matter_are_set_plainly(stock: Stock) -> None:
    before, case = Flags.now(), capture(*stock[:2], stock[2].culprits[0])
    case = replace(case, flags=Flags(threads=3, onednn=True))
    smaller, _, _ = shrink(case, 20)
    assert smaller.flags.threads == 1
    assert "threads: 3 -> 1" in smaller.reduced
    assert smaller.differs()
    assert Flags.now() == before


def test_a_spent_budget_hands_back_what_there_is(stock: Stock) -> None:
    left, right, found = stock
    case = capture(left, right, found.culprits[0])
    smaller, status, _ = shrink(case, 0.0)
    assert status == "budget"
    assert smaller.differs()


@pytest.fixture(scope="module")
def written(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Repro]:
    folder = tmp_path_factory.mktemp("repro")
    return folder, write_repro(folder, *stock, seconds=20)


def test_the_file_exits_0_when_both_sides_agree(
    written: tuple[Path, Repro], tmp_path: Path
) -> None:
    folder, record = written
    for name in ("repro.py", "inputs.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    same = record.model_copy(update={"right": record.left})
    (tmp_path / "repro.json").write_text(same.model_dump_json())
    done = alone(tmp_path, "--expect-equal")
    assert (done.returncode, done.stdout[:6]) == (0, "equal:")


def test_expect_equal_drops_the_recorded_digests(written: tuple[Path, Repro]) -> None:
    done = alone(written[0], "--expect-equal")
    assert done.returncode == 1
    assert "recorded" not in done.stdout


@pytest.mark.parametrize("broken", ["repro.json", "inputs.safetensors"])
def test_the_file_exits_125_where_it_cannot_run(
    written: tuple[Path, Repro], tmp_path: Path, broken: str
) -> None:
    for name in ("repro.py", "inputs.safetensors", "repro.json"):
        if name != broken:
            (tmp_path / name).write_bytes((written[0] / name).read_bytes())
    done = alone(tmp_path)
    assert (done.returncode, "unsuitable" in done.stdout) == (125, True), done.stderr


@pytest.mark.parametrize("spoiled", ["record", "inputs", "kernel"])
def test_what_fails_in_another_way_is_no_mismatch(
    written: tuple[Path, Repro], tmp_path: Path, spoiled: str
) -> None:
    """A revision under `git bisect` may lack what the file calls: skipped, not called bad."""
    for name in ("repro.py", "inputs.safetensors", "repro.json"):
        (tmp_path / name).write_bytes((written[0] / name).read_bytes())
    if spoiled == "record":
        (tmp_path / "repro.json").write_text("{}")
    elif spoiled == "inputs":
        save_file({"shared.other": torch.zeros(1)}, tmp_path / "inputs.safetensors")
    else:
        text = (tmp_path / "repro.py").read_text()
        (tmp_path / "repro.py").write_text(text.replace("F.linear(", "F.linear_of_old("))
    done = alone(tmp_path, "--expect-equal")
    assert (done.returncode, "unsuitable: " in done.stdout) == (125, True), done.stderr


def test_the_record_says_where_it_comes_from(written: tuple[Path, Repro]) -> None:
    stored = json.loads((written[0] / "repro.json").read_text())
    assert {"claim", "first", "versions", "device", "environment", "revision", "command",
            "status", "left", "right"} <= stored.keys()  # fmt: skip
    assert stored["left"]["digest"] != stored["right"]["digest"]
    assert stored["first"]["left_bits"] != stored["first"]["right_bits"]


def test_nondeterminism_is_another_diagnosis(
    model: LoadedModel, requests: tuple[Request, ...], tmp_path: Path
) -> None:
    with plant("B10", model):
        left, right, found = find(model, requests[1:2], "B10")
        with pytest.raises(InconclusiveError, match="nondeterminism"):
            write_repro(tmp_path, left, right, found, fault="B10")


def test_wrong_state_is_no_operator_and_says_what_to_do(
    model: LoadedModel, requests: tuple[Request, ...], tmp_path: Path
) -> None:
    with plant("W01t", model):
        left, right, found = find(model, requests[1:2], "W01t")
        with pytest.raises(InconclusiveError, match="zm repro --whole"):
            write_repro(tmp_path, left, right, found, fault="W01t")


def test_attention_with_a_window_or_a_softcap_is_not_written_out_as_plain(tmp_path: Path) -> None:
    other = load_model("tiny:gemma2")
    chosen = fault_requests(other)[1:2]
    sides = Side.parse("paged:decode"), Side.parse("packed:packed")
    left, right = (Runner(side=s, model=other, requests=chosen, plan="stock") for s in sides)
    found = localize(*sides, other, chosen, plan="stock", options=Options(self_test=False))
    site = next(each.site for each in found.culprits if each.op_class == "attention")
    with pytest.raises(InconclusiveError, match="which the generated file does not write"):
        write_repro(tmp_path, left, right, found, site=site)


def test_equal_sides_have_no_repro(stock: Stock, tmp_path: Path) -> None:
    left, right, found = stock
    equal = found.model_copy(update={"status": "EQUAL", "culprits": ()})
    with pytest.raises(InconclusiveError, match="nothing to reproduce"):
        write_repro(tmp_path, left, right, equal)
    with pytest.raises(UsageError, match="is no culprit"):
        write_repro(tmp_path, left, right, found, site="model.norm.nothing")


def test_a_divergence_on_disk_is_run_again_only_on_its_own_requests(
    stock: Stock, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    file.write_text(stock[2].model_dump_json())
    with pytest.raises(UsageError, match="cannot be made again"):
        repro_of(file, tmp_path / "out")
    file.write_text('{"kind": "divergence"}')
    with pytest.raises(UsageError, match="holds no divergence"):
        repro_of(file, tmp_path / "out")
    with pytest.raises(UsageError, match="cannot read"):
        repro_of(tmp_path / "absent.json", tmp_path / "out")


def test_delta_debugging_finds_the_pair_that_matters() -> None:
    tried: list[list[int]] = []

    def fails(items: list[int]) -> bool:
        tried.append(list(items))
        return {3, 17} <= set(items)

    assert sorted(minimise(list(range(40)), fails, lambda: False)) == [3, 17]
    assert len(tried) < 200
