"""``zm align`` with an agent, and ``zm eval agent``: drive one, and score one."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import measure, options
from .answer import Answer, command, table
from .progress import stages

if TYPE_CHECKING:
    from ..drivers.agents import AgentResult
    from ..drivers.budgets import Budgets
    from ..eval.bench import BenchReport

Driver = Annotated[
    Literal["autopilot", "anthropic", "openai", "claude", "codex"],
    typer.Option("--agent", help="Who decides what to try; the autopilot needs no key."),
]
AgentModel = Annotated[str, typer.Option(help="The provider's name of its model.")]
BaseUrl = Annotated[str | None, typer.Option(help="Another endpoint of the same API.")]
MaxTurns = Annotated[
    int | None,
    typer.Option(help="Most answers of the model; by default 60 (40 a task); codex: none.", min=0),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Most tokens, in and out; by default 2 (1) million; codex: none.", min=0),
]
MaxCalls = Annotated[int | None, typer.Option(help="Most calls of any one tool.", min=0)]
MaxMinutes = Annotated[float, typer.Option(help="Most minutes.", min=0)]
MaxMoney = Annotated[float | None, typer.Option(help="Most US dollars; needs --price.", min=0)]
PriceOption = Annotated[
    str | None, typer.Option("--price", help="INPUT:OUTPUT, dollars per million tokens.")
]
Waive = Annotated[bool, typer.Option("--waive-money", help="Go without a limit in money.")]
evaluations = typer.Typer(help="Benches for agents.")


def register(app: typer.Typer) -> None:
    """Add these commands to ``zm``; ``align`` takes the place of the one without an agent."""
    app.command("align")(align)
    evaluations.command("agent")(evaluate)
    evaluations.callback()(_group)
    app.add_typer(evaluations, name="eval")


def _group() -> None:
    """Benches for agents."""


def budgets_of(
    agent: str, turns: int | None, tokens: int | None, calls: int | None, minutes: float,
    money: float | None, price: str | None, waive: bool, *, usual: tuple[int, int],
) -> "Budgets":  # fmt: skip
    """The options as budgets, checked. usual: turns and tokens where none are given.

    ``codex`` has no usual ones: its log, which a limit needs, may be elsewhere.
    """
    from ..drivers.budgets import Budgets, Price

    if agent != "codex":
        turns, tokens = (
            given if given is not None else default
            for given, default in zip((turns, tokens), usual, strict=True)
        )
    found = Budgets(
        turns=turns, tokens=tokens, calls=calls, seconds=60 * minutes, money=money,
        price=None if price is None else Price.parse(price), waive_money=waive,
    )  # fmt: skip
    found.check()
    return found


@command
def align(
    model: options.Model,
    rollout: measure.Rollout = "paged",
    agent: Driver = "autopilot",
    agent_model: AgentModel = "",
    base_url: BaseUrl = None,
    max_turns: MaxTurns = None,
    max_tokens: MaxTokens = None,
    max_calls: MaxCalls = None,
    max_minutes: MaxMinutes = 60.0,
    max_money: MaxMoney = None,
    price: PriceOption = None,
    waive_money: Waive = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    prompts: options.Prompts = None,
    out: options.Out = None,
    seed: options.Seed = 0,
    quick: options.Quick = False,
    json: options.Json = False,
) -> Answer:
    """Do the whole job: find what differs, fix it, prove it, write recipe and report.

    Exit 0 aligned, 1 stuck or disproved, 3 inconclusive, or green but for a person's tick, 5 a
    budget is spent. Everything goes into one new folder, by default under runs/. With --agent a
    language model writes what the registry lacks, admitted as a patch or not at all.
    """
    if agent == "autopilot":
        return measure.align(
            model, rollout=rollout, dtype=dtype, device=device, prompts=prompts, out=out, seed=seed,
            quick=quick, json=json,
        )  # fmt: skip
    from ...kernels.errors import UsageError
    from ..drivers.agents import Agent, run_agent
    from ..drivers.workbench import Workbench

    if device != "cpu" or rollout != "paged" or prompts is not None:
        raise UsageError(
            "--agent works on --device cpu, --rollout paged and our prompts; drop these"
        )
    if resume and out is None:
        raise UsageError("--resume needs --out, the folder of the run")
    budgets = budgets_of(
        agent, max_turns, max_tokens, max_calls, max_minutes, max_money, price, waive_money,
        usual=(60, 2_000_000),
    )  # fmt: skip
    folder = out or measure.new_folder(f"align-{agent}-{model}")
    driver = Agent(name=agent, model=agent_model, base_url=base_url, resumed=resume)
    with stages() as progress:
        bench = Workbench(model, folder, dtype=dtype, seed=seed)
        found = run_agent(bench, driver, budgets, progress=progress)
    return Answer(document=found, text=agent_text(found), exit_code=found.exit_code)


def agent_text(found: "AgentResult") -> list[object]:
    """How the run ended, for a person."""
    outcome = found.outcome
    money = "" if outcome.money is None else f", {outcome.money:.2f} dollars"
    return [
        f"{found.status.upper()} ({outcome.reason}): {found.reason}",
        f"{outcome.turns} turns, {outcome.calls} calls, {outcome.tokens:,} tokens{money}, "
        f"{outcome.seconds:.0f} s",
        *[f"Rule broken: {rule}" for rule in outcome.rules],
        f"Transcript: {outcome.transcript}",
        f"Recipe: {found.recipe}" if found.recipe else "No recipe was written.",
        *(
            [f"Admitted on branch {found.branch}; next: `zm recipe pr {found.patch}`"]
            if found.branch
            else []
        ),
    ]


@command
def evaluate(
    agent: Driver = "autopilot",
    agent_model: AgentModel = "",
    base_url: BaseUrl = None,
    only: Annotated[
        str | None, typer.Option(metavar="TASKS", help="Only these, by name; default: all.")
    ] = None,
    max_turns: MaxTurns = None,
    max_tokens: MaxTokens = None,
    max_calls: MaxCalls = None,
    max_minutes: MaxMinutes = 30.0,
    max_money: MaxMoney = None,
    price: PriceOption = None,
    waive_money: Waive = False,
    out: options.Out = None,
    json: options.Json = False,
) -> Answer:
    """Score a driver on the day-0 tasks: gates, time, turns, money. Budgets hold for each task.

    Exit 0 every task is solved, 1 one is not. With --out: each task's folder, and the table.
    """
    from ..drivers.agents import Agent
    from ..eval.bench import evaluate as score_all
    from ..report import write_whole

    driver = None
    budgets = None
    if agent != "autopilot":
        budgets = budgets_of(
            agent, max_turns, max_tokens, max_calls, max_minutes, max_money, price, waive_money,
            usual=(40, 1_000_000),
        )  # fmt: skip
        driver = Agent(name=agent, model=agent_model, base_url=base_url)
    folder = out or measure.new_folder(f"eval-{agent}")
    names = None if only is None else [name.strip() for name in only.split(",")]
    with stages() as progress:
        report = score_all(folder, driver, budgets, only=names, progress=progress)
    write_whole(folder / "scores.json", report.model_dump_json(indent=2) + "\n")
    write_whole(folder / "scores.md", report.markdown())
    return Answer(document=report, text=_scores(report), exit_code=report.exit_code)


def _scores(report: "BenchReport") -> list[object]:
    rows = [
        [score.task, score.kind, "solved" if score.solved else score.reason,
         f"{score.green} of {score.of}", f"{score.seconds:.0f}", str(score.turns),
         "-" if score.money is None else f"{score.money:.2f}"]
        for score in report.scores
    ]  # fmt: skip
    columns = ["task", "kind", "end", "gates", "s", "turns", "dollars"]
    return [table(columns, rows), f"{report.solved} of {len(report.scores)} solved."]
