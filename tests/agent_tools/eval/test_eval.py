"""The bench: every task is solvable, no answer lies within reach, the table says what happened."""

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.drivers.agents import Agent, Name
from zeromismatch.agent_tools.drivers.budgets import Budgets, Price
from zeromismatch.agent_tools.drivers.loop import Judgement
from zeromismatch.agent_tools.drivers.workbench import Workbench
from zeromismatch.agent_tools.eval.bench import SOLUTIONS, BenchReport, evaluate
from zeromismatch.agent_tools.eval.tasks import task, tasks
from zeromismatch.agent_tools.gates.bench import Size
from zeromismatch.agent_tools.verify import verify_kernel
from zeromismatch.kernels.certify import load_operators
from zeromismatch.kernels.contract import contracts
from zeromismatch.kernels.errors import (
    CapabilityError,
    UncoveredSiteError,
    UsageError,
    ZeroMismatchError,
)
from zeromismatch.model_recipes import extension
from zeromismatch.model_recipes.plan import draft_kernels

from ..drivers.conftest import KEY, FakeApi, Say, api
from ..drivers.stories import install

__all__ = ["api"]  # a fixture
ROOT = Path(__file__).resolve().parents[3]
SMALL = Size(
    requests=6, reply=14, fuzzed=1, fuzz_requests=2, backward=2, gradient_requests=1, long=64,
    rounds=1, training_steps=1,
)  # fmt: skip
OF_THE_REGISTRY = ("nightjar", "osprey")
"""Tasks that need no kernel: what the registry has is their answer."""


@pytest.fixture(autouse=True)
def no_extensions() -> Iterator[None]:
    yield
    extension.forget()


def bench_of(name: str, folder: Path, gates: tuple[str, ...]) -> Workbench:
    spec = f"code:{task(name).write(folder / 'model')}"
    return Workbench(spec, folder, gates=gates, size=SMALL)


def test_there_are_at_least_twelve_tasks_of_both_kinds():
    kinds = [each.kind for each in tasks()]
    assert len(kinds) >= 12
    assert {"operator", "fault"} == set(kinds)
    assert {path.stem for path in SOLUTIONS.glob("*.py")} == (
        {each.name for each in tasks()} - set(OF_THE_REGISTRY)
    )


def is_green(bench: Workbench) -> str | None:
    """Why the gates are not green, or None."""
    try:
        report = bench.run_gates()
    except ZeroMismatchError as error:
        return str(error)
    return None if report.status == "pass" else report.reason


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_reference_solution_is_verified_and_green_and_nothing_is_without_it(tmp_path: Path):
    red: list[str] = []
    for each in tasks():
        bench = bench_of(each.name, tmp_path / each.name, ("C3", "C5"))
        extension.forget()
        if each.name not in OF_THE_REGISTRY:
            if is_green(bench) is None:
                red.append(f"{each.name}: green without a solution")
            (bench.draft / "kernels").mkdir(parents=True)
            shutil.copy(SOLUTIONS / f"{each.name}.py", bench.draft / "kernels")
            (own,) = draft_kernels(bench.draft)
            verdict = verify_kernel(
                bench.draft / own.path, own.contract, model=bench.spec, quick=True
            )
            if verdict.status != "needs-review":
                red.append(f"{each.name}: {verdict.reason}")
        why = is_green(bench)
        if why is not None:
            red.append(f"{each.name}: {why}")
    assert red == []


def test_no_answer_is_within_reach(tmp_path: Path):
    load_operators()
    package = "zeromismatch.kernels."  # other tests of this process may have loaded extensions
    known = {entry.op for entry in contracts() if entry.reference.startswith(package)}
    assert "linear" in known
    shipped = [*(ROOT / "skill").rglob("*.md"), *(ROOT / "playbooks").glob("*.md"),
               *(ROOT / "agent_tools" / "eval").rglob("*.*"), *tmp_path.rglob("*.*")]  # fmt: skip
    texts = {path: path.read_text() for path in shipped if path.suffix in (".md", ".py", ".yaml")}
    for solution in SOLUTIONS.glob("*.py"):
        values = ast.literal_eval(
            re.search(r"CONTRACT = (\{.*?\n\})", solution.read_text(), re.S)[1]
        )
        assert values["op"] not in known
        for path, text in texts.items():
            assert values["op"] not in text, f"{path} names {values['op']}"
            assert values["id"] not in text
            assert "fixed_sum" not in text
    assert not SOLUTIONS.is_relative_to(ROOT / "agent_tools")


def test_a_task_is_a_folder_as_a_hub_gives_it(tmp_path: Path):
    folder = task("heron").write(tmp_path / "model")
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "modeling_heron.py"]  # fmt: skip
    with pytest.raises(UsageError, match="use one of"):
        task("phoenix")


def test_each_task_of_an_operator_names_what_is_missing(tmp_path: Path):
    bench = bench_of("curlew", tmp_path, ("C3",))
    with pytest.raises(UncoveredSiteError, match="layer_norm"):
        bench.localize("paged:decode", "paged:alone", "aligned")
    assert "NONE" in bench.inspect()


def test_the_autopilot_says_where_it_is_stuck(tmp_path: Path):
    report = evaluate(tmp_path, None, None, only=["heron"], judge=Workbench.judge)
    (score,) = report.scores
    assert (score.solved, score.reason, score.green) == (False, "stuck", 0)
    assert "torch.square" in score.detail
    assert report.exit_code == 1
    assert "| heron | operator | stuck | 0 of 5 |" in report.markdown()


def test_scores_come_from_the_gates_alone(tmp_path: Path):
    def green(bench: Workbench) -> Judgement:
        return Judgement(passed=True, reason="green", green=5, of=5)

    report = evaluate(tmp_path, None, None, only=["osprey"], judge=green)
    assert (report.solved, report.exit_code, report.scores[0].green) == (1, 0, 5)
    assert BenchReport.model_validate_json(report.model_dump_json()) == report


@pytest.mark.parametrize("name", ["anthropic", "openai", "claude", "codex"])
def test_every_driver_is_scored_by_gates_time_turns_and_money(
    name: Name, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def red(bench: Workbench) -> Judgement:
        return Judgement(passed=False, reason="C3 is red", green=2, of=5)

    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("zeromismatch.agent_tools.eval.bench.SOLUTIONS", tmp_path / "elsewhere")
    if name in ("claude", "codex"):
        install(tmp_path / "bin", name)
        budgets = Budgets(waive_money=True, turns=None, tokens=None,
                          price=Price(input=1000, output=1000))  # fmt: skip
    else:
        api.steps = iter([Say(calls=(("about", {}),)), Say(text="I stop.")])
        budgets = Budgets(money=9, price=Price(input=1000, output=1000), nudges=0)
    agent = Agent(name=name, model="m", key=KEY, base_url=api.url + "/v1" * (name == "openai"))
    report = evaluate(tmp_path / "out", agent, budgets, only=["heron"], judge=red)
    (score,) = report.scores
    assert (score.solved, score.reason, score.green, score.of) == (False, "stopped-early", 2, 5)
    wanted = {"claude": (3, 330, 0.5), "codex": (1, 330, 0.33)}.get(name, (2, 240, 0.24))
    assert (score.turns, score.tokens, score.money) == wanted
    assert 0 < score.seconds < 60
    assert f"Driver: {name} m. 0 of 1 solved." in report.markdown()


def test_a_driver_that_reads_files_is_refused_beside_the_solutions(tmp_path: Path):
    budgets = Budgets(waive_money=True)
    with pytest.raises(CapabilityError, match="reference solutions"):
        evaluate(tmp_path, Agent(name="claude"), budgets)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--only", "phoenix"], 2, "there is no task"),
        (["--agent", "anthropic"], 2, "--waive-money"),
        (["--agent", "openai", "--max-money", "1"], 2, "--price"),
        (["--agent", "openai", "--waive-money", "--only", "heron"], 2, "--agent-model"),
        (["--agent", "openai", "--agent-model", "m", "--waive-money", "--only", "heron"], 4,
         "no API key"),
        (["--agent", "anthropic", "--agent-model", "m", "--waive-money", "--only", "heron"], 4,
         "ANTHROPIC_API_KEY"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_first(
    words: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    for variable in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    assert run(["eval", "agent", "--out", str(tmp_path / "out"), *words]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--agent", "openai", "--max-turns", "-1"], "max-turns"),
        (["--agent", "openai", "--waive-money", "--resume"], "--resume needs --out"),
        (["--agent", "openai", "--waive-money", "--rollout", "vllm"], "drop these"),
        (["--agent", "openai", "--max-money", "1", "--price", "cheap"], "INPUT:OUTPUT"),
        (["--agent", "somebody"], "somebody"),
    ],
)
def test_unusable_arguments_of_align_are_said(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert run(["align", "tiny:llama", *words]) == 2
    assert said in capsys.readouterr().err
