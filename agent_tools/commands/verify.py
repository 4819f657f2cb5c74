"""``zm verify``: a candidate kernel against a contract, and the rules it is held to."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .answer import Answer, command, table
from .progress import stages

if TYPE_CHECKING:
    from ..verify import Verification

ALLOWED = ("seccomp", "landlock", "capabilities")


def register(app: typer.Typer) -> None:
    """Add this command to ``zm``."""
    app.command()(verify)


@command
def verify(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The candidate: one Python file.")
    ] = None,
    contract: Annotated[
        str | None, typer.Option(metavar="ID", help="The contract it serves (zm kernels list).")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The model that brings an operator of its own."),
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="Print the rules and stop.")] = False,
    allow_missing: Annotated[
        str,
        typer.Option(
            metavar="PARTS",
            help="Isolation that this machine lacks and you accept: " + ", ".join(ALLOWED) + ".",
        ),
    ] = "",
    quick: options.Quick = False,
    json: options.Json = False,
) -> Answer:
    """Verify a kernel: bits, accuracy against fp64, gradients, speed, in a confined process.

    The file defines forward with the arguments of the contract's reference, and backward with those
    of its gradient contract's. C++ may stand in a string CPP, called as native("name", ...). A file
    with a CONTRACT and MODULES of its own is judged against --model's code in fp64.
    Exit 0 all green, 1 a rule is broken, 3 void, or a new contract that a person must accept.
    """
    from ...kernels.errors import UsageError

    if rules:
        return rules_answer()
    if file is None or contract is None:
        raise UsageError("say which: zm verify FILE --contract ID; `zm kernels list` shows the ids")
    waived = [part.strip() for part in allow_missing.split(",") if part.strip()]
    unknown = sorted(set(waived) - set(ALLOWED))
    if unknown:
        raise UsageError(
            f"--allow-missing takes {', '.join(ALLOWED)}, not {', '.join(unknown)}; correct it"
        )
    from ..verify import verify_kernel

    with stages() as progress:
        report = verify_kernel(
            file, contract, model=model, quick=quick, allow_missing=waived, progress=progress
        )
    return Answer(document=report, text=verification_text(report), exit_code=report.exit_code)


def rules_answer() -> Answer:
    """Every rule, who watches it, in words."""
    from ..verify.rules import RULES

    rows = [[rule.id, rule.watched, f"A kernel {rule.text}."] for rule in RULES.values()]
    document = [{"id": r.id, "watched": r.watched, "text": r.text} for r in RULES.values()]
    return Answer(document={"rules": document}, text=[table(["rule", "watched", "says"], rows)])


def verification_text(report: "Verification") -> list[object]:
    """The four answers, what was broken, and the verdict."""
    bits, speed = report.bits, report.speed
    accuracy, gradient = report.accuracy, report.gradient
    rows = [
        ["bits", bits.status, f"{bits.differing} of {bits.elements:,} elements differ"],
        ["accuracy", accuracy.status, _beside(accuracy.error, accuracy.stock_error, "plain torch")],
        ["gradient", gradient.status, _beside(gradient.error, gradient.tolerance, "allowed")],
        ["speed", speed.status, f"{speed.ratio} of {speed.baseline}" if speed.ratio else ""],
    ]
    text: list[object] = [table(["question", "answer", "measured"], rows)]
    text += [f"  {line}" for line in speed.shapes]
    text += [
        f"broken: {entry.rule}{f' ({entry.where})' if entry.where else ''}: {entry.detail}"
        for entry in report.violations
    ]
    text += [f"for a person: {entry}" for entry in report.needs_review]
    red = sum(entry.red for entry in report.controls)
    held = "nothing was run" if report.isolation is None else ", ".join(report.isolation.active)
    text.append(f"controls: {red} of {len(report.controls)} red; held by: {held}")
    return [*text, f"{report.status.upper()}: {report.reason}", f"{report.seconds:.1f} s"]


def _beside(error: float | None, other: float | None, name: str) -> str:
    if error is None:
        return ""
    return f"{error:.3g}, {name} {other:.3g}" if other is not None else f"{error:.3g}"
