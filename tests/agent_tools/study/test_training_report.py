"""The page of a run: self-contained, escaped, its verdict from the kernel term alone."""

import re
from pathlib import Path

import pytest

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.training_report import (
    render_curves,
    training_page,
    write_training_page,
)
from zeromismatch.kernels.errors import UsageError
from zeromismatch.trainer.diagnostics.journal import FILE
from zeromismatch.trainer.diagnostics.record import UpdateRecord

from .conftest import gap, record

HOSTILE = "<script>alert('x')</script>"


def test_a_run_at_diff_zero_says_so(records: list[UpdateRecord]):
    page = training_page(records, title="run")
    assert (page.word, page.tone) == ("DIFF 0", "good")
    assert {fact.name: fact.value for fact in page.facts}["audited tokens"] == "48"


def test_one_differing_token_turns_it_red(records: list[UpdateRecord]):
    page = training_page([*records, record(6, kernel=gap(unequal=1, largest=1e-7))], title="run")
    assert (page.word, page.tone) == ("MISMATCH", "bad")
    assert "1 of 56 audited tokens differ" in page.headline


def test_nothing_compared_is_never_diff_zero():
    assert training_page([], title="run").word == "NO UPDATE"
    assert training_page([record(0, kernel=gap(compared=0))], title="run").word == "MISMATCH"


def test_every_curve_is_there_and_says_its_numbers(records: list[UpdateRecord]):
    text = render_curves(training_page(records, title="run", command="zm train"))
    assert text.count("<figure>") == 14
    assert 'aria-label="Reward. Reward: 0.5 at first, 0.55 at last' in text
    assert "Tokens that moved against" in text
    unasked = [each.model_copy(update={"moves": None}) for each in records]
    assert "Tokens that moved against" not in render_curves(training_page(unasked, title="run"))


def test_the_page_needs_nothing_else_and_escapes(records: list[UpdateRecord]):
    text = render_curves(training_page(records, title=HOSTILE, command=HOSTILE))
    assert "<script" not in text
    assert not re.search(r"(?:src|href)=|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text


def test_it_is_drawn_from_the_records_in_the_folder(tmp_path: Path, records: list[UpdateRecord]):
    (tmp_path / FILE).write_text("".join(each.model_dump_json() + "\n" for each in records))
    page, path = write_training_page(tmp_path)
    assert path == tmp_path / "report.html"
    assert path.read_text() == render_curves(page)
    assert run(["report", str(tmp_path), "--out", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == render_curves(page)
    with pytest.raises(UsageError, match="does not exist"):
        write_training_page(tmp_path / "elsewhere")
