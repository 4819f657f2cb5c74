"""``zm gate`` and ``zm regress``: run the gates, and run those of an earlier report again."""

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..second_process import second_process, without_gc, worth_it
from . import options
from .answer import Answer, command, table
from .progress import stages

if TYPE_CHECKING:
    from ..gates import GateReport, Regression

Rollout = Annotated[
    str, typer.Option(metavar="ENGINE", help="The engine that samples: paged or vllm.")
]
Only = Annotated[
    str | None,
    typer.Option(metavar="GATES", help="Only these, for instance C3,C4; default: all."),
]
Junit = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write the results as JUnit XML."),
]
REPORT = "gates.json"


def register(app: typer.Typer) -> None:
    """Add these commands to ``zm``."""
    app.command()(gate)
    app.command()(regress)


@command
def gate(
    model: options.Model,
    plan: options.Plan = "aligned",
    rollout: Rollout = "paged",
    only: Only = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    prompts: options.Prompts = None,
    out: options.Out = None,
    junit: Junit = None,
    seed: options.Seed = 0,
    quick: options.Quick = False,
    json: options.Json = False,
) -> Answer:
    """Run the gates C0-C10: does every schedule on every engine give the same bits?

    Exit 0 all passed, 1 a gate is red, 3 inconclusive. With --out: gates.json and the HTML page.
    """
    chosen = None if only is None else [name.strip().upper() for name in only.split(",")]
    words = ["zm", "gate", model, "--plan", plan, "--rollout", rollout, "--dtype", dtype]
    words += ["--device", device, "--seed", str(seed), *(["--quick"] if quick else [])]
    words += ["--only", only] if only else []
    words += ["--prompts", str(prompts)] if prompts else []
    two = worth_it(model, device=device, rollout=rollout)
    beside = second_process(model, dtype=dtype, device=device, seed=seed)
    with stages() as progress, beside if two else contextlib.nullcontext() as pool:
        progress(f"loading {model}")
        with without_gc():
            from ...model_recipes.models import load_model
            from ..gates import run_gates

        loaded = load_model(model, dtype=dtype, device=device, seed=seed)
        report = run_gates(
            loaded, plan, rollout=rollout, only=chosen, quick=quick, seed=seed, prompts=prompts,
            progress=progress, pool=pool,
        )  # fmt: skip
    text = gate_text(report)
    text += _written(report, shlex.join(words), out, junit)
    return Answer(document=report, text=text, exit_code=report.exit_code)


@command
def regress(
    report: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder, or its gates.json.")
    ],
    out: options.Out = None,
    junit: Junit = None,
    json: options.Json = False,
) -> Answer:
    """Run an earlier report's gates again: what was green must stay green.

    Exit 0 it did, 1 a gate turned red, 2 the report was edited, 3 it is about other weights.
    """
    from ..gates import read_gates, rerun

    stored = read_gates(report)
    with stages() as progress:
        found = rerun(stored, progress=progress)
    again = shlex.join(["zm", "regress", str(report)])
    text = [*regress_text(found), *_written(found.report, again, out, junit)]
    return Answer(document=found, text=text, exit_code=found.exit_code)


def _written(
    report: "GateReport", command: str, out: Path | None, junit: Path | None
) -> list[object]:
    from ..gates.page import page_of
    from ..junit import junit as as_junit
    from ..report import write_report, write_whole

    text: list[object] = []
    if out is not None:
        write_whole(out / REPORT, report.model_dump_json(indent=2) + "\n")
        page = page_of(report, command, str(out))
        text.append(f"Report: {write_report(out / 'report.html', page)}")
    if junit is not None:
        text.append(f"JUnit: {write_whole(junit, as_junit(report))}")
    return text


def gate_text(report: "GateReport") -> list[object]:
    """One line a gate, then what is behind those that are not green."""
    rows = [
        [
            f"{entry.id} {entry.title}",
            entry.status if entry.status == entry.result else f"{entry.status} ({entry.result})",
            f"{entry.compared:,}",
            f"{entry.differing:,}",
            entry.control_text,
            f"{entry.seconds:.1f}",
        ]
        for entry in report.gates
    ]
    columns = ["gate", "result", "compared", "differ", "red controls", "s"]
    text: list[object] = [table(columns, rows)]
    for entry in report.gates:
        if entry.result in ("fail", "inconclusive"):
            text.append(f"{entry.id}: {entry.reason}")
            text += [f"    {line}" for line in entry.culprits]
    text += [f"{entry.id}: {note}" for entry in report.gates for note in entry.notes]
    return [*text, f"{report.status.upper()}: {report.reason}", f"{report.seconds:.1f} s"]


def regress_text(found: "Regression") -> list[object]:
    """Before and after, and what else has changed."""
    rows = [[name, verdict, found.after[name]] for name, verdict in found.before.items()]
    changed = [f"changed since: {entry}" for entry in found.changes]
    return [
        table(["gate", "then", "now"], rows),
        *changed,
        f"{found.status.upper()}: {found.reason}",
    ]
