"""Repros that run both engines: few requests, few tokens, and the same thing named first."""

from pathlib import Path

import pytest

from zeromismatch.agent_tools.faults import FAULTS
from zeromismatch.agent_tools.reduction.whole import WholeRepro, rerun, write_whole_repro
from zeromismatch.agent_tools.sides import Side
from zeromismatch.kernels.errors import InconclusiveError
from zeromismatch.model_recipes.models import LoadedModel
from zeromismatch.trainer.engines.base import Request

WHOLE = ("W01t", "W01", "K07", "M04", "P05", "L01", "K03", "C01", "S02", "W05", "G03", "K05")


def write(
    folder: Path, model: LoadedModel, requests: tuple[Request, ...], fault: str | None
) -> WholeRepro:
    sides = FAULTS[fault].sides if fault else ("paged:chunk:7", "packed:packed")
    return write_whole_repro(
        folder, *map(Side.parse, sides), model, requests, fault=fault, seconds=120
    )


@pytest.mark.parametrize("fault", WHOLE)
def test_a_fault_between_operators_is_repeated_by_few_tokens(
    model: LoadedModel, requests: tuple[Request, ...], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], fault: str,
) -> None:  # fmt: skip
    record = write(tmp_path, model, requests, fault)
    assert rerun(tmp_path / "repro.json") == 1
    said = capsys.readouterr().out
    assert "as recorded" in said
    assert "other bits" not in said
    assert record.repeats
    assert record.device == "cpu"
    assert record.revision is None or len(record.revision) == 40
    assert {"cpu", "threads", "onednn"} <= record.environment.keys()
    if FAULTS[fault].by == "operator":
        assert record.first is not None
        assert record.left_digest != record.right_digest
    if FAULTS[fault].by in ("operator", "anchor"):
        assert sum(len(request.tokens) for request in record.requests) <= 34
        healthy = record.model_copy(update={"fault": None})
        (tmp_path / "repro.json").write_text(healthy.model_dump_json())
        assert rerun(tmp_path / "repro.json") == 0


def test_flags_and_layers_that_do_not_matter_are_dropped(
    model: LoadedModel, requests: tuple[Request, ...], tmp_path: Path
) -> None:
    sides = map(Side.parse, ("paged+num_pages=64:chunk:1", "packed:packed"))
    record = write_whole_repro(tmp_path, *sides, model, requests, fault="W01t", seconds=120)
    assert record.sides == ("paged:chunk:1", "packed:packed")
    assert (record.named, record.depth) == ("model.layers.0.self_attn#attention", 1)
    assert record.reduced[:2] == (
        "flags: paged+num_pages=64:chunk:1 -> paged:chunk:1", "depth: 2 -> 1 layers"
    )  # fmt: skip
    assert rerun(tmp_path / "repro.json") == 1


def test_equal_sides_have_nothing_to_repeat(
    model: LoadedModel, requests: tuple[Request, ...], tmp_path: Path
) -> None:
    with pytest.raises(InconclusiveError, match="nothing to reproduce"):
        write(tmp_path, model, requests, None)


def test_nondeterminism_is_said_as_such(
    model: LoadedModel, requests: tuple[Request, ...], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    record = write(tmp_path, model, requests, "B10")
    assert not record.repeats
    assert "nondeterminism" in record.claim
    assert rerun(tmp_path / "repro.json") == 1
    assert "nondeterminism" in capsys.readouterr().out


def test_a_record_that_cannot_be_read_is_unsuitable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "repro.json").write_text("{}")
    assert rerun(tmp_path / "repro.json") == 125
    assert "unsuitable" in capsys.readouterr().out
