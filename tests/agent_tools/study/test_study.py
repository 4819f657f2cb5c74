"""A study that really runs, on a tiny model; its table, its page, and what it refuses."""

import json
from pathlib import Path

import pytest

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.study import (
    ENTRIES,
    OURS,
    Settings,
    Study,
    alone,
    chosen_entries,
    result_of,
    run_study,
)
from zeromismatch.agent_tools.study_page import COLUMNS, command_of, markdown, page_of, write_study
from zeromismatch.kernels.errors import UsageError
from zeromismatch.trainer.diagnostics.record import UpdateRecord

from .conftest import record

SMALL = Settings(updates=4, lag=1, groups=2, group_size=2, max_new_tokens=4)
RAN = ("synchronous", "stock_kernels")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("study")
    study, curves = run_study("tiny:qwen3", entries=chosen_entries(RAN), settings=SMALL, out=out)
    return study, curves, out


@pytest.mark.slow
def test_aligned_entries_are_at_diff_zero_and_stock_ones_are_not(found):
    study, _, _ = found
    by_name = {result.name: result for result in study.results}
    assert [*by_name] == [OURS, *RAN]
    for name, result in by_name.items():
        aligned = study.entries[name].plan == "aligned"
        assert (result.kernel_unequal == 0) == aligned, name
        assert result.kernel_compared > 0
        assert result.updates == 4
        assert 0 <= result.moves <= 1


@pytest.mark.slow
def test_all_entries_get_the_same_prompts_and_first_weights(found):
    _, curves, _ = found
    firsts = {name: records[0] for name, records in curves.items()}
    assert firsts[OURS].reward == firsts["synchronous"].reward
    assert firsts[OURS].weights_root == firsts["synchronous"].weights_root  # w is exactly 1 there
    last = {records[-1].weights_root for records in curves.values()}
    assert len(last) == len(curves)


@pytest.mark.slow
def test_it_leaves_records_and_no_weights(found):
    _, _, out = found
    names = sorted(path.name for path in out.rglob("*") if path.is_file())
    assert names == ["lock"] * 3 + ["metrics.jsonl"] * 3 + ["result.json"] * 3 + ["settings.json"]


@pytest.mark.slow
def test_an_interrupted_study_goes_on(found):
    """Results that are there are not computed again; other settings are refused."""
    study, _, out = found
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}
    again, _ = run_study("tiny:qwen3", entries=chosen_entries(RAN), settings=SMALL, out=out)
    assert again.results == study.results
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}
    other = SMALL.model_copy(update={"lag": 2})
    with pytest.raises(UsageError, match="other settings"):
        run_study("tiny:qwen3", entries=chosen_entries(RAN), settings=other, out=out)


@pytest.mark.slow
def test_page_table_and_json_hold_the_same_rows(found, tmp_path: Path):
    study, curves, _ = found
    page = write_study(tmp_path, study, curves, command=command_of(study)).read_text()
    table = (tmp_path / "study.md").read_text()
    for name in (OURS, *RAN):
        assert f"| {name} |" in table
        assert name in page
    assert "<script" not in page
    assert Study.model_validate_json((tmp_path / "study.json").read_text()) == study
    assert page_of(study, curves, "zm study").word == "DIFF 0"


def test_two_studies_in_one_folder_are_refused(tmp_path: Path):
    folder = tmp_path / "run"
    with (
        alone(folder),
        pytest.raises(UsageError, match="another study is at work"),
        alone(folder),
    ):
        pass
    with alone(folder):
        assert (folder / "lock").exists()


def study_of(**changes: object) -> Study:
    results = [
        result_of(name, 0, [record(v, **changes) for v in range(4)], seconds=1.0)
        for name in (OURS, "masked")
    ]
    return Study(
        model="tiny:qwen3",
        settings=SMALL,
        entries=chosen_entries(["masked"]),
        results=tuple(results),
        environment={},
        seconds=60.0,
    )


def test_the_table_is_markdown_and_its_command_repeats_it():
    text = markdown(study_of(), command="zm study tiny:qwen3")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count(" | ") + 1 for row in rows if "---" not in row} == {len(COLUMNS)}
    assert "does not tell which recipe is better" in text
    assert command_of(study_of()).startswith("zm study tiny:qwen3 --only reinforce_zero,masked ")


def test_a_stopped_run_is_a_result(records: list[UpdateRecord]):
    result = result_of("bypass", 0, records, seconds=1.0, stopped="update 6: the ratio is inf")
    assert result.updates == 6
    with pytest.raises(UsageError, match="made 1 updates"):
        result_of("bypass", 0, records[:1], seconds=1.0)


def test_peaks_are_taken_at_full_lag():
    early = record(0, d3=0.0, lag_most=0)
    late = [record(version, d3=value) for version, value in ((1, 2e-3), (2, 1e-3), (3, 4e-3))]
    result = result_of(OURS, 0, [early, *late], seconds=1.0)
    assert result.d3_median == 2e-3
    assert result.d3_peak_to_median == 2.0


def test_every_loss_is_an_entry_once_and_ours_runs_aligned():
    assert {name for name, entry in ENTRIES.items() if entry.plan == "aligned"} == {
        OURS,
        "synchronous",
    }
    assert [*chosen_entries(["masked"])] == [OURS, "masked"]
    with pytest.raises(UsageError, match="choose among reinforce_zero"):
        chosen_entries(["ppo"])


def test_unusable_arguments_are_said_before_any_work(capsys: pytest.CaptureFixture[str]):
    assert run(["study", "tiny:qwen3", "--only", "ppo", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 2
    assert run(["study", "tiny:qwen3", "--seeds", "one"]) == 2
