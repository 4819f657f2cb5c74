"""Scoring a driver on the tasks: gates, time, turns and money.

    report = evaluate(Path("runs/eval"), None, None)      # the autopilot
    report.solved, report.markdown()

Each task gets a folder of its own with the model's code and nothing about its solution; it is
solved when the draft is admitted as a patch, or waits for a person's tick alone. A driver that can
read this machine's files (``claude``, ``codex``) is refused where the reference solutions lie on
it, since it could simply read them.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from ...kernels.errors import CapabilityError, UncoveredSiteError
from ..drivers.agents import Agent, outcome_of
from ..drivers.budgets import Budgets
from ..drivers.loop import Judgement
from ..drivers.workbench import Workbench
from ..records import Record
from .tasks import Task, task, tasks

SOLUTIONS = Path(__file__).resolve().parents[2] / "tests" / "agent_tools" / "eval" / "solutions"
READS_FILES = ("claude", "codex")
SOLVED = ("passed", "needs-tick")
"""Everything is green; where a contract is new, a person would read and tick it now."""
PROBES = (("paged:decode", "paged:alone"), ("paged:mixed", "packed:packed"))
Progress = Callable[[str], None]


class Score(Record):
    """One task. reason: how the driver ended. green, of: gates."""

    task: str
    title: str
    kind: Literal["operator", "fault"]
    solved: bool
    reason: str
    detail: str
    green: int
    of: int
    seconds: float
    turns: int = 0
    calls: int = 0
    tokens: int = 0
    money: float | None = None


class BenchReport(Record):
    """All scores of one driver."""

    schema_version: Literal[1] = 1
    kind: Literal["bench"] = "bench"
    agent: str
    model: str
    scores: tuple[Score, ...]

    @property
    def solved(self) -> int:
        """How many tasks are solved."""
        return sum(score.solved for score in self.scores)

    @property
    def exit_code(self) -> int:
        """0 all are solved, 1 not all."""
        return 0 if self.solved == len(self.scores) else 1

    def markdown(self) -> str:
        """The table of benchmarks/."""
        who = f"{self.agent} {self.model}".strip()
        lines = [
            f"Driver: {who}. {self.solved} of {len(self.scores)} solved.",
            "",
            "| task | kind | end | gates green | s | turns | tokens | dollars |",
            "|---|---|---|--:|--:|--:|--:|--:|",
        ]
        lines += [
            f"| {s.task} | {s.kind} | {'solved' if s.solved else s.reason} | {s.green} of {s.of} | "
            f"{s.seconds:.0f} | {s.turns} | {s.tokens:,} | "
            f"{'-' if s.money is None else f'{s.money:.2f}'} |"
            for s in self.scores
        ]
        return "\n".join(lines) + "\n"


def evaluate(
    folder: Path, agent: Agent | None, budgets: Budgets | None, *,
    only: Sequence[str] | None = None, progress: Progress = lambda stage: None,
    judge: Callable[[Workbench], Judgement] = Workbench.judge,
) -> BenchReport:  # fmt: skip
    """Score ``agent`` (None: the autopilot) on the tasks. judge: whether a draft is admitted."""
    chosen = tasks() if only is None else tuple(task(name) for name in only)
    if agent is not None and agent.name in READS_FILES and SOLUTIONS.exists():
        raise CapabilityError(
            f"{agent.name} can read files, and this check-out holds the reference solutions; run "
            "the bench from an installed package on a machine without them"
        )
    scores: list[Score] = []
    for each in chosen:
        progress(f"{each.name}: {each.title}")
        bench = Workbench(f"code:{each.write(folder / each.name / 'model')}", folder / each.name)
        scores.append(_score(each, bench, agent, budgets, judge, progress))
    name, model = ("autopilot", "") if agent is None else (agent.name, agent.model)
    return BenchReport(agent=name, model=model, scores=tuple(scores))


def _score(
    each: Task, bench: Workbench, agent: Agent | None, budgets: Budgets | None,
    judge: Callable[[Workbench], Judgement], progress: Progress,
) -> Score:  # fmt: skip
    began = time.monotonic()
    if agent is None:
        ended = _autopilot(bench, judge, progress)
        seconds = time.monotonic() - began
        reason = "passed" if ended.passed else "needs-tick" if ended.waits else "stuck"
        return Score(
            task=each.name, title=each.title, kind=each.kind, solved=reason in SOLVED,
            reason=reason, detail=ended.reason, green=ended.green,
            of=ended.of or len(bench.gates), seconds=seconds,
        )  # fmt: skip
    assert budgets is not None
    heard: list[Judgement] = []

    def word() -> Judgement:
        heard.append(judge(bench))
        return heard[-1]

    outcome = outcome_of(bench, agent, budgets, judge=word, progress=progress)
    last = heard[-1] if heard else Judgement(passed=False, reason="the gates were never asked")
    return Score(
        task=each.name, title=each.title, kind=each.kind,
        solved=outcome.reason in SOLVED, reason=outcome.reason, detail=outcome.detail,
        green=last.green, of=last.of or len(bench.gates), seconds=outcome.seconds,
        turns=outcome.turns, calls=outcome.calls, tokens=outcome.tokens, money=outcome.money,
    )  # fmt: skip


def _autopilot(
    bench: Workbench, judge: Callable[[Workbench], Judgement], progress: Progress
) -> Judgement:
    """The rules: registered contracts for what differs; a missing operator is beyond them."""
    from ..align import shorten
    from ..drivers.autopilot import fly
    from ..scenarios import default_requests

    requests = shorten(default_requests(bench.model, count=4, max_reply=12, seed=bench.seed), 3, 8)
    try:
        outcome = fly(bench.model, requests, probes=PROBES, progress=progress)
    except UncoveredSiteError as error:
        return Judgement(passed=False, reason=str(error))
    if outcome.stuck is not None:
        return Judgement(passed=False, reason=outcome.stuck)
    return judge(bench)
