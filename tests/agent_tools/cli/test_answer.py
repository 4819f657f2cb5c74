"""How answers are printed."""

import io
import json
from typing import Any

import pytest
from pydantic import BaseModel

from zeromismatch.agent_tools.commands.answer import (
    Answer,
    command,
    json_text,
    table,
    text_console,
    write,
)


class Found(BaseModel):
    worst: float


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_every_document_says_its_schema_version_once():
    assert json.loads(json_text({"a": 1})) == {"schema_version": 1, "a": 1}
    assert json.loads(json_text({"schema_version": 3})) == {"schema_version": 3}


def test_values_that_json_cannot_hold_become_null():
    assert json.loads(json_text(Found(worst=float("nan"))))["worst"] is None
    assert json.loads(json_text({"x": [float("-inf")]}))["x"] == [None]


def test_markup_in_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]):
    hostile = "[bold]model.layers[3][/bold] :smile:"
    write(Answer(document={}, text=[hostile, table(["x"], [[hostile]])]), as_json=False)
    assert capsys.readouterr().out.count(hostile) == 2


def test_long_sites_are_folded_never_cut(capsys: pytest.CaptureFixture[str]):
    site = "model.layers.0." + "x" * 300
    write(Answer(document={}, text=[table(["site"], [[site]])]), as_json=False)
    assert "".join(capsys.readouterr().out.split()).endswith(site)


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert text_console(Terminal()).color_system is not None
    monkeypatch.setenv("NO_COLOR", "1")
    assert text_console(Terminal()).no_color


def test_what_a_command_prints_goes_to_stderr(capsys: pytest.CaptureFixture[str]):
    @command
    def noisy(value: Any) -> Answer:
        print("noise")
        return Answer(document={"value": value})

    assert noisy(3).document == {"value": 3}
    assert capsys.readouterr() == ("", "noise\n")
