"""Interrupted runs: resumed wherever they broke off, never with an effect repeated."""

import asyncio
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from zeromismatch.agent_tools.drivers.budgets import Budgets
from zeromismatch.agent_tools.drivers.loop import Job, Outcome
from zeromismatch.agent_tools.drivers.resume import UNKNOWN, replay, resume
from zeromismatch.agent_tools.drivers.toolbox import connected
from zeromismatch.agent_tools.drivers.transcript import FILE, HEAD, Transcript, read_transcript
from zeromismatch.kernels.errors import MisalignedError, UsageError

from .conftest import SDKS, Bench, FakeApi, MakeProvider
from .test_loop import DONE, FIX, FREE, LOOK, run


def go_on(provider: Any, bench: Bench, folder: Path, budgets: Budgets = FREE) -> Outcome:
    async def go() -> Outcome:
        async with connected(bench.server) as toolbox:
            job = Job(task="make it green", system="use the tools", budgets=budgets)
            try:
                return await resume(folder, job, provider, toolbox, bench.judge)
            finally:
                await provider.close()

    return asyncio.run(go())


def cut(source: Path, target: Path, lines: int, *, torn: bool = False) -> list[str]:
    """The run as it was after so many entries; torn: the next line is half written."""
    shutil.copytree(source, target)
    kept = (source / FILE).read_text().splitlines(keepends=True)
    text = "".join(kept[:lines]) + (kept[lines][: len(kept[lines]) // 2] if torn else "")
    (target / FILE).write_text(text)
    (target / HEAD).write_text(f"{lines} {json.loads(kept[lines - 1])['digest']}\n")
    return [json.loads(line)["kind"] for line in kept[:lines]]


@pytest.mark.parametrize("sdk", SDKS)
def test_a_run_can_be_cut_anywhere_and_no_effect_is_repeated(
    sdk: str, make_provider: MakeProvider, bench: Bench, tmp_path: Path, api: FakeApi
):
    run(make_provider(sdk, [LOOK, FIX, DONE]), bench, tmp_path / "whole")
    entries = read_transcript(tmp_path / "whole")
    written = next(e.n for e in entries if e.kind == "attempted" and e.data["name"] == "write")
    for lines in range(1, len(entries)):
        for torn in (False, True):
            folder = tmp_path / f"cut-{lines}-{torn}"
            cut(tmp_path / "whole", folder, lines, torn=torn)
            happened = lines > written  # the worst case: it had its effect before the crash
            bench.file.write_text("fixed" if happened else "broken")
            bench.writes.clear()
            steps = [LOOK, *([] if happened else [FIX]), DONE]
            replies = sum(e.kind == "reply" for e in entries[:lines])
            remaining = steps if happened else [LOOK, FIX, DONE][replies:]
            api.requests.clear()
            found = go_on(make_provider(sdk, remaining), bench, folder)
            assert found.reason == "passed", (lines, torn)
            assert bench.writes == ([] if happened else ["fixed"]), (lines, torn)
            assert torn or replay(folder) == found, lines
            pending = lines == written + 1
            assert (UNKNOWN[:40] in str(api.requests)) == pending, (lines, torn)


def test_budgets_go_on_counting(make_provider: MakeProvider, bench: Bench, tmp_path: Path):
    run(make_provider("openai", [LOOK, FIX, DONE]), bench, tmp_path / "whole")
    cut(tmp_path / "whole", tmp_path / "cut", 4)  # begin, reply, attempted, returned
    bench.file.write_text("broken")
    few = Budgets(turns=1, waive_money=True)
    found = go_on(make_provider("openai", [FIX]), bench, tmp_path / "cut", few)
    assert (found.reason, found.turns, found.tokens) == ("budget-turns", 1, 120)


def test_a_finished_run_is_not_resumed(make_provider: MakeProvider, bench: Bench, tmp_path: Path):
    run(make_provider("openai", [FIX, DONE]), bench, tmp_path / "run")
    before = (tmp_path / "run" / FILE).read_bytes()
    with pytest.raises(UsageError, match=r"is over \(passed\)"):
        go_on(make_provider("openai"), bench, tmp_path / "run")
    assert (tmp_path / "run" / FILE).read_bytes() == before
    assert bench.writes == ["fixed"]


def test_a_run_that_a_person_stops_goes_on(
    make_provider: MakeProvider, bench: Bench, tmp_path: Path, api: FakeApi
):
    folder = tmp_path / "run"
    bench.on_write = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(make_provider("openai", [LOOK, FIX, DONE]), bench, folder)
    assert replay(folder).exit_code == 130
    api.requests.clear()
    found = go_on(make_provider("openai", [LOOK, DONE]), bench, folder)
    assert (found.reason, bench.writes) == ("passed", ["fixed"])
    assert UNKNOWN[:40] in str(api.requests)
    assert replay(folder) == found


def test_a_transcript_cut_in_half_is_refused(
    make_provider: MakeProvider, bench: Bench, tmp_path: Path, api: FakeApi
):
    run(make_provider("openai", [LOOK, FIX, DONE]), bench, tmp_path / "run")
    file = tmp_path / "run" / FILE
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    api.requests.clear()
    with pytest.raises(UsageError, match="was cut"):
        go_on(make_provider("openai"), bench, tmp_path / "run")
    assert file.read_bytes() == content[: len(content) // 2]
    assert api.requests == []


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0].replace("make it green", "make it grey"), *lines[1:]],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [lines[0], "{}\n", *lines[2:]],
        lambda lines: [lines[0], "no json\n", *lines[2:]],
    ],
    ids=["edited", "removed", "moved", "emptied", "garbled"],
)
def test_an_edited_transcript_is_refused(
    change: Any, make_provider: MakeProvider, bench: Bench, tmp_path: Path
):
    run(make_provider("openai", [LOOK, FIX, DONE]), bench, tmp_path / "run")
    file = tmp_path / "run" / FILE
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))
    with pytest.raises(UsageError, match=r"edited or moved|cannot be read"):
        read_transcript(tmp_path / "run")


def test_a_run_is_resumed_with_the_model_it_began_with(
    make_provider: MakeProvider, bench: Bench, tmp_path: Path
):
    run(make_provider("openai", [LOOK, FIX, DONE]), bench, tmp_path / "whole")
    cut(tmp_path / "whole", tmp_path / "cut", 4)
    with pytest.raises(UsageError, match="another provider"):
        go_on(make_provider("anthropic"), bench, tmp_path / "cut")


def test_a_folder_without_a_run_is_said(tmp_path: Path):
    with pytest.raises(UsageError, match="does not exist"):
        replay(tmp_path)


def test_a_folder_holds_one_run(make_provider: MakeProvider, bench: Bench, tmp_path: Path):
    run(make_provider("openai", [FIX, DONE]), bench, tmp_path / "run")
    with pytest.raises(UsageError, match="exists"):
        run(make_provider("openai"), bench, tmp_path / "run")


def test_replay_notices_when_the_record_is_another_story(
    make_provider: MakeProvider, bench: Bench, tmp_path: Path
):
    """The red control of replay: a record that our loop would never have written."""
    run(make_provider("openai", [LOOK, FIX, DONE]), bench, tmp_path / "run")
    entries = read_transcript(tmp_path / "run")
    forged = Transcript.begin(tmp_path / "forged")
    for entry in entries:
        data = dict(entry.data)
        if entry.kind == "attempted" and data["name"] == "write":
            data["arguments"] = {"text": "something else"}
        forged.append(entry.kind, entry.elapsed, data)
    with pytest.raises(MisalignedError, match="replay calls write"):
        replay(tmp_path / "forged")


@pytest.mark.parametrize("sitting", [0, 1])
def test_replay_notices_another_story_in_either_sitting(
    sitting: int, make_provider: MakeProvider, bench: Bench, tmp_path: Path
):
    run(make_provider("openai", [LOOK, FIX, DONE]), bench, tmp_path / "whole")
    cut(tmp_path / "whole", tmp_path / "cut", 3)  # begin, reply, attempted
    go_on(make_provider("openai", [LOOK, FIX, DONE]), bench, tmp_path / "cut")
    forged, resumed = Transcript.begin(tmp_path / "forged"), 0
    for entry in read_transcript(tmp_path / "cut"):
        resumed += entry.kind == "resumed"
        data = dict(entry.data)
        if entry.kind == "attempted" and resumed == sitting:
            data["effect"] = not data["effect"]
        forged.append(entry.kind, entry.elapsed, data)
    with pytest.raises(MisalignedError, match="another attempted"):
        replay(tmp_path / "forged")
