"""Records on disk: whole lines, TensorBoard's curves, and a resumed run's journal."""

import contextlib
import json
import os
from pathlib import Path

import pytest

from zeromismatch.kernels.errors import UsageError
from zeromismatch.trainer.diagnostics.journal import EVENTS, FILE, Journal, read_journal, scalars
from zeromismatch.trainer.diagnostics.live import live
from zeromismatch.trainer.diagnostics.record import UpdateRecord, record_of

from .conftest import make_facts


def written(folder: Path, versions: range, *, tensorboard: bool = False) -> list[UpdateRecord]:
    with Journal(folder, tensorboard=tensorboard) as journal:
        return [journal.write(make_facts(version)) for version in versions]


def test_records_come_back_as_they_were(tmp_path: Path):
    records = written(tmp_path, range(3))
    assert read_journal(tmp_path) == records
    lines = (tmp_path / FILE).read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == [0, 1, 2]


def test_a_resumed_run_has_each_update_once(tmp_path: Path):
    written(tmp_path, range(5))
    resumed = written(tmp_path, range(3, 6))
    assert [record.version for record in read_journal(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert read_journal(tmp_path)[3:] == resumed


def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path: Path):
    written(tmp_path, range(3))
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-9])
    assert [record.version for record in read_journal(tmp_path)] == [0, 1]
    written(tmp_path, range(2, 4))
    assert [record.version for record in read_journal(tmp_path)] == [0, 1, 2, 3]


def test_a_broken_line_in_between_is_refused_with_its_number(tmp_path: Path):
    written(tmp_path, range(3))
    lines = (tmp_path / FILE).read_text().splitlines()
    (tmp_path / FILE).write_text("\n".join([lines[0], lines[1][:50], lines[2]]) + "\n")
    with pytest.raises(UsageError, match="line 2 of"):
        read_journal(tmp_path)


def test_a_folder_without_a_journal_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="does not exist"):
        read_journal(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own protobuf imports
def test_tensorboard_shows_every_number(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written(tmp_path, range(3), tensorboard=True)
    records = written(tmp_path, range(2, 4), tensorboard=True)  # resumed: update 2 again
    events = EventAccumulator(str(tmp_path / EVENTS)).Reload()
    assert set(events.Tags()["scalars"]) == set(scalars(records[0]))
    points = events.Scalars("update/d3")
    assert [point.step for point in points] == [0, 1, 2, 3]
    assert {"kernel/unequal", "total/k3", "seconds/wait_seconds"} <= set(scalars(records[0]))


def test_a_run_without_a_terminal_is_told_in_lines(capfd: pytest.CaptureFixture[str]):
    with live(total=2) as show:
        show(record_of(make_facts(0)))
        show(record_of(make_facts(1)))
    out, err = capfd.readouterr()
    assert out == ""
    assert "update 2 of 2" in err
    assert "kernel term 0 of 3 differ; worst 0" in err


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_in_a_terminal_it_is_a_panel(monkeypatch: pytest.MonkeyPatch):
    main, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        with live(total=1) as show:
            show(record_of(make_facts(0)))
    shown = ""
    with os.fdopen(main, "rb", buffering=0) as output, contextlib.suppress(OSError):
        while piece := output.read(65536):  # the last read fails: nobody holds the other end
            shown += piece.decode()
    assert "update" in shown
    assert "1 of 1" in shown
