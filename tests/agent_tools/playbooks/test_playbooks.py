"""The pages: their five headings, every cause served, every command run as it is shown."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.playbooks import OVERVIEW, names, page, render
from zeromismatch.agent_tools.playbooks.pages import FOLDER, HEADINGS, PAGE_OF_CAUSE
from zeromismatch.agent_tools.records import CauseName
from zeromismatch.kernels.errors import UsageError

PAGES = [name for name in names() if name != OVERVIEW]
COMMAND = re.compile(r"^ *(zm .*?)  # exit (\d)$", re.MULTILINE)


def commands() -> Iterator[tuple[str, int]]:
    """Every command shown with the exit code it is said to have, each once, in order."""
    seen: dict[str, int] = {}
    for name in PAGES:
        for line, code in COMMAND.findall(render(name)):
            assert seen.setdefault(line, int(code)) == int(code)
    yield from seen.items()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_five_headings_and_says_when_to_ask(name: str):
    text = render(name)
    assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == HEADINGS
    assert text.count("**Ask a person**") == 1
    assert "{{" not in text
    assert "{%" not in text


@pytest.mark.parametrize("name", PAGES)
def test_every_fenced_command_says_how_it_ends(name: str):
    blocks = re.findall(r"```sh\n(.*?)```", render(name), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    assert lines
    assert [line for line in lines if not COMMAND.fullmatch(line)] == []


def test_every_cause_has_a_page():
    assert set(PAGE_OF_CAUSE) == set(get_args(CauseName))
    assert set(PAGE_OF_CAUSE.values()) <= set(PAGES)
    overview = render(OVERVIEW)
    assert [cause for cause in PAGE_OF_CAUSE if f"| {cause} |" not in overview] == []
    assert [name for name in PAGES if f"({name}.md)" not in overview] == []


def test_pages_link_to_pages_that_exist():
    for name in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", render(name)):
            assert (FOLDER / target).is_file(), f"{name} links to {target}"


def test_an_unknown_page_is_said_with_those_there_are():
    with pytest.raises(UsageError, match="use one of overview, day-0"):
        page("../README")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_command_ends_as_the_page_says(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
):
    """Run all of them here, where OUT is a scratch folder; `zm repro` needs the one before it."""
    out = tmp_path_factory.mktemp("playbooks")
    wrong: list[str] = []
    for line, code in commands():
        words = [word.replace("OUT", str(out)) for word in shlex.split(line)[1:]]
        if words[0] == "doctor":
            assert run(words) in (0, 4), "a machine may lack something, and doctor says so"
        elif run(words) != code:
            wrong.append(f"{line}: {capsys.readouterr().err[-300:]}")
        capsys.readouterr()
    assert wrong == []


def test_the_command_prints_a_page_and_lists_them(capsys: pytest.CaptureFixture[str]):
    assert run(["playbook", "rocm"]) == 0
    assert capsys.readouterr().out.startswith("# AMD GPUs")
    assert run(["playbook"]) == 0
    listed = capsys.readouterr().out
    assert [name for name in names() if name not in listed] == []
    assert run(["playbook", "nothing"]) == 2


def test_pages_hold_no_machine_of_ours():
    for name in names():
        assert not re.search(r"/(work|tmp|root|home)/", render(name)), name
    assert Path(FOLDER, "README.md").is_file()
