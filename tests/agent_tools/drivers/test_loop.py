"""Scripted models through both real SDKs: each way to end, and what is left behind."""

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from zeromismatch.agent_tools.drivers.budgets import Budgets, Price
from zeromismatch.agent_tools.drivers.loop import EXITS, Job, Judgement, Outcome, drive
from zeromismatch.agent_tools.drivers.resume import replay
from zeromismatch.agent_tools.drivers.toolbox import connected
from zeromismatch.agent_tools.drivers.transcript import FILE, read_transcript
from zeromismatch.kernels.errors import CapabilityError, UsageError

from .conftest import KEY, SDKS, Bench, FakeApi, MakeProvider, Say

FREE = Budgets(waive_money=True, seconds=60)
both = pytest.mark.parametrize("sdk", SDKS)


def run(provider: Any, bench: Bench, folder: Path, budgets: Budgets = FREE, **job: Any) -> Outcome:
    async def go() -> Outcome:
        async with connected(bench.server) as toolbox:
            given = Job(task="make it green", system="use the tools", budgets=budgets, **job)
            try:
                return await drive(given, provider, toolbox, bench.judge, folder, secrets=[KEY])
            finally:
                await provider.close()

    return asyncio.run(go())


LOOK = Say(calls=(("look", {}),))
FIX = Say(text="I fix it.", calls=(("write", {"text": "fixed"}),))
DONE = Say(text="Done.")


@both
def test_a_competent_model_passes_by_the_word_of_the_gates(
    sdk: str, make_provider: MakeProvider, bench: Bench, tmp_path: Path, api: FakeApi
):
    found = run(make_provider(sdk, [LOOK, FIX, DONE]), bench, tmp_path / "run")
    assert (found.reason, found.exit_code, found.turns, found.calls) == ("passed", 0, 3, 2)
    assert found.tokens == 3 * 120
    assert bench.writes == ["fixed"]
    assert len(api.requests) == 3
    assert replay(tmp_path / "run") == found


@both
def test_a_lazy_model_ends_as_stopped_early(
    sdk: str, make_provider: MakeProvider, bench: Bench, tmp_path: Path, api: FakeApi
):
    found = run(make_provider(sdk, itertools.repeat(DONE)), bench, tmp_path / "run")
    assert (found.reason, found.exit_code, found.turns) == ("stopped-early", 1, 3)
    assert bench.file.read_text() == "broken"
    assert "C3 is red" in str(api.requests[-1])
    assert replay(tmp_path / "run") == found


@both
@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (LOOK, "repeated-call"),
        (Say(calls=(("fly", {}),)), "malformed-calls"),
        (Say(calls=(("write", {"words": 3}),)), "malformed-calls"),
        (Say(calls=(("look", {"where": "there"}),)), "repeated-call"),
        (Say(text="I cannot.", refuse=True), "refused"),
        (Say(text="and so on and", cut=True), "no-progress"),
        (Say(calls=(("write", {"text": "cheat"}),)), "repeated-call"),
    ],
    ids=["looping", "unknown tool", "wrong arguments", "tool error", "refusal", "cut", "cheating"],
)
def test_a_model_that_gets_nowhere_ends_by_its_own_reason(
    sdk: str, step: Say, reason: str, make_provider: MakeProvider, bench: Bench, tmp_path: Path
):
    found = run(make_provider(sdk, itertools.repeat(step)), bench, tmp_path / "run")
    assert (found.reason, found.exit_code) == (reason, 1)
    assert bench.file.read_text() == "broken"
    assert bench.writes == []
    cheats = ("tests may not be touched",)
    assert found.rules == (cheats if "cheat" in str(step) else ())
    assert replay(tmp_path / "run") == found


def test_arguments_that_are_no_json_are_told_to_the_model(
    make_provider: MakeProvider, bench: Bench, tmp_path: Path, api: FakeApi
):
    broken = Say(calls=(("write", '{"text": "fi'),))
    found = run(make_provider("openai", [broken, FIX, DONE]), bench, tmp_path / "run")
    assert found.reason == "passed"
    assert "are no JSON object" in str(api.requests[1])


@both
def test_a_model_that_follows_injected_text_cannot_destroy(
    sdk: str, make_provider: MakeProvider, bench: Bench, tmp_path: Path
):
    steps = [Say(calls=(("poisoned", {}),)), Say(calls=(("wipe", {}),)), *[DONE] * 3]
    found = run(make_provider(sdk, steps), bench, tmp_path / "run")
    assert found.reason == "stopped-early"
    assert bench.file.read_text() == "broken"
    refused = [e.data for e in read_transcript(tmp_path / "run") if e.kind == "returned"][-1]
    assert not refused["made"]
    assert "approval" in refused["text"]


def test_a_destructive_call_runs_once_somebody_approves(
    make_provider: MakeProvider, bench: Bench, tmp_path: Path
):
    seen: list[str] = []
    provider = make_provider("anthropic", [Say(calls=(("wipe", {}),)), Say(status=401)])
    found = run(provider, bench, tmp_path / "run", approve=lambda call: not seen.append(call.name))
    assert found.reason == "key-refused"
    assert seen == ["wipe"]
    assert not bench.file.exists()


@both
@pytest.mark.parametrize(
    ("budgets", "reason", "requests"),
    [
        (Budgets(turns=0, waive_money=True), "budget-turns", 0),
        (Budgets(tokens=0, waive_money=True), "budget-tokens", 0),
        (Budgets(seconds=0, waive_money=True), "budget-time", 0),
        (Budgets(money=0, price=Price(input=1, output=1)), "budget-money", 0),
        (Budgets(turns=2, waive_money=True), "budget-turns", 2),
        (Budgets(tokens=240, waive_money=True), "budget-tokens", 2),
        (Budgets(money=0.0003, price=Price(input=1, output=5)), "budget-money", 2),
        (Budgets(calls=1, waive_money=True), "budget-calls", 2),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_budgets_end_a_run(
    sdk: str, budgets: Budgets, reason: str, requests: int, make_provider: MakeProvider,
    bench: Bench, tmp_path: Path, api: FakeApi,
):  # fmt: skip
    looks = (Say(calls=(("look", {}),)) for _ in range(9))
    found = run(make_provider(sdk, looks), bench, tmp_path / "run", budgets)
    assert (found.reason, found.exit_code) == (reason, 5)
    assert len(api.requests) == requests


def test_work_that_is_green_when_the_turns_end_has_passed(
    make_provider: MakeProvider, bench: Bench, tmp_path: Path
):
    budgets = Budgets(turns=1, waive_money=True)
    found = run(make_provider("openai", [FIX]), bench, tmp_path / "run", budgets)
    assert (found.reason, found.exit_code) == ("passed", 0)


def test_time_ends_a_request_that_hangs(make_provider: MakeProvider, bench: Bench, tmp_path: Path):
    never = threading.Event()
    budgets = Budgets(seconds=0.3, waive_money=True)
    try:
        found = run(make_provider("openai", [Say(wait=never)]), bench, tmp_path / "run", budgets)
    finally:
        never.set()
    assert found.reason == "budget-time"


@pytest.mark.parametrize(
    ("budgets", "words"),
    [
        (Budgets(), "--waive-money"),
        (Budgets(money=3.0), "--price"),
        (Budgets(turns=-1, waive_money=True), "zero or more"),
        (Budgets(tokens=-5, waive_money=True), "zero or more"),
        (Budgets(seconds=float("nan"), waive_money=True), "zero or more"),
    ],
)
def test_unusable_budgets_are_refused_before_anything_happens(
    budgets: Budgets, words: str, make_provider: MakeProvider, bench: Bench, tmp_path: Path,
    api: FakeApi,
):  # fmt: skip
    with pytest.raises(UsageError, match=words):
        run(make_provider("anthropic"), bench, tmp_path / "run", budgets)
    assert api.requests == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["3", "3:x", "-1:2", "inf:1", "1:2:3"])
def test_a_price_that_is_none_is_refused(text: str):
    with pytest.raises(UsageError, match="price"):
        Price.parse(text)


@both
@pytest.mark.parametrize("key", [None, "", "  "])
def test_a_missing_key_is_said_before_anything_happens(
    sdk: str, key: str | None, make_provider: MakeProvider
):
    with pytest.raises(CapabilityError, match=f"{sdk.upper()}_API_KEY"):
        make_provider(sdk, key=key)


@both
@pytest.mark.parametrize(
    ("step", "reason", "requests"),
    [
        (Say(status=401), "key-refused", 1),
        (Say(status=403), "key-refused", 1),
        (Say(status=429), "rate-limited", 3),
        (Say(status=503), "unreachable", 3),
        (Say(drop=True), "unreachable", 3),
        (Say(status=400), "request-refused", 1),
        (Say(body="<html>welcome</html>"), "nonsense", 1),
        (Say(body="{}"), "nonsense", 1),
        (Say(body='{"content": "hi", "output": 7}'), "nonsense", 1),
        (Say(body="[1, 2"), "nonsense", 1),
    ],
    ids=["401", "403", "429", "503", "dropped", "400", "html", "empty", "foreign", "torn"],
)
def test_a_provider_that_fails_ends_the_run_with_nothing_changed(
    sdk: str, step: Say, reason: str, requests: int, make_provider: MakeProvider, bench: Bench,
    tmp_path: Path, api: FakeApi,
):  # fmt: skip
    found = run(make_provider(sdk, itertools.repeat(step)), bench, tmp_path / "run")
    assert (found.reason, found.exit_code) == (reason, 4)
    assert len(api.requests) == requests
    assert bench.file.read_text() == "broken"
    assert replay(tmp_path / "run") == found


@both
@pytest.mark.parametrize("step", [Say(status=429), Say(status=500), Say(drop=True)])
def test_a_passing_failure_is_retried(
    sdk: str, step: Say, make_provider: MakeProvider, bench: Bench, tmp_path: Path
):
    provider = make_provider(sdk, [step, LOOK, step, FIX, DONE])
    assert run(provider, bench, tmp_path / "run").reason == "passed"


def test_old_results_are_shortened_when_the_context_fills(
    make_provider: MakeProvider, bench: Bench, tmp_path: Path, api: FakeApi
):
    bench.file.write_text("broken" * 200)
    steps = [Say(calls=(("look", {}), ("write", {"text": f"{n}" * 900}))) for n in range(6)]
    budgets = Budgets(waive_money=True, context_tokens=50)
    run(make_provider("openai", [*steps, FIX, DONE]), bench, tmp_path / "run", budgets)
    outputs = [i["output"] for i in api.requests[-1]["input"] if "output" in i]
    assert outputs[0].startswith("[left out here")
    assert len(outputs[0]) < 300
    assert len(outputs) == 13


def test_secrets_never_reach_the_transcript(
    make_provider: MakeProvider, bench: Bench, tmp_path: Path
):
    leak = Say(text=f"the key is {KEY} and sk-ant-another0123456789")
    run(make_provider("anthropic", [leak, DONE, DONE]), bench, tmp_path / "run")
    text = (tmp_path / "run" / FILE).read_text()
    assert "[redacted]" in text
    assert "0123456789" not in text


def test_every_end_is_documented():
    reasons = {"passed", "needs-tick", "stopped-early", "no-progress", "cancelled", "tools-lost"}
    assert reasons <= set(EXITS)
    assert {code for code, _ in EXITS.values()} == {0, 1, 3, 4, 5, 130}


@both
def test_what_waits_for_a_tick_alone_ends_the_run_at_once(
    sdk: str, make_provider: MakeProvider, bench: Bench, tmp_path: Path
):
    waiting = Judgement(passed=False, reason="r", waits="x.y.float32.cpu.v1 is not ticked")
    bench.judge = lambda: waiting  # type: ignore[method-assign]
    found = run(make_provider(sdk, [FIX, DONE]), bench, tmp_path / "run")
    assert (found.reason, found.exit_code, found.turns) == ("needs-tick", 3, 2)
    assert "is not ticked" in found.detail
    assert replay(tmp_path / "run") == found
