"""The page of a training run: what it did, and its curves. One HTML file, no network, no scripts.

    write_training_page(Path("runs/train-1"))        # metrics.jsonl -> report.html

It follows the reader's light or dark theme like every page of ``report.py``, whose style it shares.
Everything comes from the run's own records; each curve carries its numbers in words for those who
cannot see it. Left out: comparing runs (``study_page.py``).
"""

import shlex
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from ..trainer.diagnostics.journal import FILE, read_journal
from ..trainer.diagnostics.record import UpdateRecord
from ..trainer.loop.evaluation import Evaluation, read_evaluations
from .curves import CurveDrawing, Line, draw
from .records import Record
from .report import Command, templates, write_whole

PAGE = "report.html"
SMOOTH = 20


class Fact(Record):
    """One figure of the banner."""

    name: str
    value: str


class CurvePage(Record):
    """What the template prints. tone: good, bad or warn."""

    title: str
    kicker: str
    word: str
    tone: Literal["good", "bad", "warn"]
    headline: str
    facts: tuple[Fact, ...]
    sections: tuple["Section", ...]
    commands: tuple[Command, ...] = ()
    notes: tuple[str, ...] = ()


class Section(Record):
    """Curves under one heading; ``columns`` and ``rows`` are a table before them, if any."""

    title: str
    text: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    curves: tuple[CurveDrawing, ...] = ()


Pick = Callable[[UpdateRecord], float | None]

CURVES: tuple[tuple[str, str, Pick, bool], ...] = (
    ("Learning", "Reward", lambda r: r.reward, False),
    ("Learning", "Entropy of the rollout, nats", lambda r: r.entropy, False),
    ("Learning", "Gradient norm before any limit", lambda r: r.gradient_norm, True),
    ("Learning", "Prompts whose responses all got one reward", lambda r: r.zero_advantage_groups,
     False),
    ("Rollout against learner", "Kernel term: tokens that differ under equal weights",
     lambda r: float(r.kernel.unequal), False),
    ("Rollout against learner", "D3, mean of expm1(d) − d", lambda r: r.d3, True),
    ("Rollout against learner", "Largest |d| of a token", lambda r: r.total.largest, True),
    ("Rollout against learner", "Effective share of tokens", lambda r: r.ess_tokens, False),
    ("Rollout against learner", "Rejected tokens", lambda r: r.rejected, False),
    ("Rollout against learner", "Tokens that moved against their advantage", lambda r: r.moves,
     False),
    ("Time", "Lag, median over tokens", lambda r: r.lag_median, False),
    ("Time", "Learner, tokens per second", lambda r: r.tokens_per_second, False),
    ("Time", "Learner waits for samples, seconds", lambda r: r.wait_seconds, False),
    ("Time", "Producers wait for room, seconds", lambda r: r.blocked_seconds, False),
)  # fmt: skip


def is_training_run(folder: Path) -> bool:
    """Whether ``folder`` is one of `zm train`."""
    return (folder / FILE).is_file()


def write_training_page(folder: Path, to: Path | None = None) -> tuple[CurvePage, Path]:
    """Draw a run's page from its records, by default as ``report.html`` in its folder.

    Raises UsageError where there are no records.
    """
    resume = shlex.join(["zm", "train", "--resume", str(folder)])
    page = training_page(
        read_journal(folder),
        title=f"Training run {folder.name}",
        command=resume,
        evaluations=read_evaluations(folder),
    )
    return page, write_whole(to or folder / PAGE, render_curves(page))


def training_page(
    records: Sequence[UpdateRecord],
    *,
    title: str,
    command: str = "",
    evaluations: Sequence[Evaluation] = (),
) -> CurvePage:
    """The page of these records."""
    compared = sum(record.kernel.compared for record in records)
    unequal = sum(record.kernel.unequal for record in records)
    zero = bool(compared) and unequal == 0
    first, last = records[:SMOOTH], records[-SMOOTH:]
    if not records:
        word, tone, headline = "NO UPDATE", "warn", "The run has no update yet."
    elif zero:
        word, tone = "DIFF 0", "good"
        headline = "Rollout and trainer agreed on every audited token, bit for bit."
    else:
        word, tone = "MISMATCH", "bad"
        headline = f"{unequal:,} of {compared:,} audited tokens differ under the same weights."
    facts = [
        Fact(name="updates", value=f"{len(records):,}"),
        Fact(name="audited tokens", value=f"{compared:,}"),
        Fact(name="of them differ", value=f"{unequal:,}"),
    ]
    if records:
        facts += [
            Fact(name=f"reward, first {len(first)}", value=f"{_mean(first):.3f}"),
            Fact(name=f"reward, last {len(last)}", value=f"{_mean(last):.3f}"),
            Fact(name="lag, median", value=f"{records[-1].lag_median:g}"),
        ]
    sections: dict[str, list[CurveDrawing]] = {}
    for section, name, pick, logarithmic in CURVES:
        values = tuple(pick(record) for record in records)
        drawn = draw((Line(name=name, values=values),), title=name, logarithmic=logarithmic)
        if drawn is not None:
            sections.setdefault(section, []).append(drawn)
    return CurvePage(
        title=title,
        kicker="zero-mismatch training",
        word=word,
        tone=tone,
        headline=headline,
        facts=tuple(facts),
        sections=(
            *_held_out(evaluations),
            *(Section(title=name, curves=tuple(curves)) for name, curves in sections.items()),
        ),
        commands=(Command(label="Go on with it", command=command),) if command else (),
        notes=(
            "The kernel term is measured on audited tokens under the weights that sampled them; "
            "D3 and the rest of the second section hold weight lag as well.",
        ),
    )


def _held_out(evaluations: Sequence[Evaluation]) -> tuple[Section, ...]:
    """The section on held-out problems, if there were any."""
    if not evaluations:
        return ()
    last = evaluations[-1]
    k = last.samples
    lines = (
        Line(name=f"mean@{k}", values=tuple(each.mean_at_k for each in evaluations)),
        Line(name="pass@1", values=tuple(each.pass_at_1 for each in evaluations)),
    )
    drawn = draw(lines, title=f"mean@{k} and pass@1, one point an evaluation", logarithmic=False)
    return (
        Section(
            title="Held-out problems",
            text=f"{last.problems} problems that training does not see, {k} responses each, the "
            "same seeds every time. pass@1: first responses that are solved; "
            f"mean@{k}: all responses that are.",
            columns=("version", "pass@1", f"mean@{k}", "standard error", "reward"),
            rows=tuple(
                (
                    str(each.version),
                    *(
                        f"{value:.3f}"
                        for value in (
                            each.pass_at_1,
                            each.mean_at_k,
                            each.standard_error,
                            each.reward,
                        )
                    ),
                )
                for each in evaluations
            ),
            curves=(drawn,) if drawn is not None else (),
        ),
    )


def render_curves(page: CurvePage) -> str:
    """The page as text."""
    return templates().get_template("curves.html.j2").render(page=page)


def _mean(records: Sequence[UpdateRecord]) -> float:
    return statistics.fmean(record.reward for record in records)
