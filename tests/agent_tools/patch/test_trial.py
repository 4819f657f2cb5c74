"""What a patch's own processes start from."""

from pathlib import Path

import pytest

from zeromismatch.agent_tools.patch.trial import Trial


def test_a_certificate_that_another_process_is_writing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    held = tmp_path / "home" / "zero-mismatch" / "certificates"
    held.mkdir(parents=True)
    (held / "whole.json").write_text("{}")
    (held / ".half.json.abc.part").symlink_to(held / "renamed a moment ago")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    run = tmp_path / "run"
    run.mkdir()
    Trial(run=run, tree=tmp_path / "tree", progress=lambda stage: None).prepare()
    copied = run / "cache" / "zero-mismatch" / "certificates"
    assert [each.name for each in copied.iterdir()] == ["whole.json"]
