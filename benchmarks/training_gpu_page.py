"""Several training runs on one page: by lag, an aligned run beside each that it is compared with.

    python benchmarks/training_gpu_page.py OUT.html "aligned=DIR" "stock kernels=DIR" ...

DIR holds a run's ``metrics.jsonl`` and ``evaluations.jsonl``. Runs are grouped by the cap of their
lag; in each group the first run is the solid line of every drawing, and each other run of the group
has a section of its own, on the same scales.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zeromismatch.agent_tools.curves import CurveDrawing, Line, draw, scale_of
from zeromismatch.agent_tools.report import write_whole
from zeromismatch.agent_tools.training_report import (
    CURVES,
    CurvePage,
    Fact,
    Section,
    render_curves,
)
from zeromismatch.trainer.diagnostics.journal import read_journal
from zeromismatch.trainer.diagnostics.record import UpdateRecord
from zeromismatch.trainer.loop.evaluation import Evaluation, read_evaluations

SMOOTH = 20
DRAWN = (
    "Reward", "Gradient norm before any limit", "D3, mean of expm1(d) − d",
    "Effective share of tokens", "Rejected tokens", "Largest |d| of a token",
)  # fmt: skip
COLUMNS = (
    "run", "updates", "pass@1, mean@k by version", "tokens that differ", "by at most",
    f"reward, first and last {SMOOTH}", "D3, median, peak", "rejected, last 50",
)  # fmt: skip

Values = tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one folder holds."""

    name: str
    records: list[UpdateRecord]
    held_out: list[Evaluation]

    @property
    def lag(self) -> int:
        """The cap."""
        return self.records[-1].lag_cap

    def row(self) -> tuple[str, ...]:
        """Of the table."""
        records = self.records
        first, last = (
            statistics.fmean(record.reward for record in some)
            for some in (records[:SMOOTH], records[-SMOOTH:])
        )
        late = [record.d3 for record in records if record.lag_median == self.lag]
        return (
            self.name, str(len(records)),
            ", ".join(f"{each.pass_at_1:.2f} {each.mean_at_k:.2f} ({each.version})"
                      for each in self.held_out) or "–",
            f"{self.unequal:,} of {self.compared:,}",
            f"{max(record.kernel.largest for record in records):.3g}",
            f"{first:.3f} → {last:.3f}",
            f"{statistics.median(late):.2g}, {max(late):.2g}" if late else "–",
            f"{statistics.fmean(record.rejected for record in records[-50:]):.1%}",
        )  # fmt: skip

    @property
    def unequal(self) -> int:
        """Audited tokens that differ."""
        return sum(record.kernel.unequal for record in self.records)

    @property
    def compared(self) -> int:
        """Audited tokens."""
        return sum(record.kernel.compared for record in self.records)


def main() -> None:
    """Read, draw, write."""
    to, *named = sys.argv[1:]
    runs = [
        Run(name=name, records=read_journal(Path(folder)), held_out=read_evaluations(Path(folder)))
        for name, _, folder in (each.rpartition("=") for each in named)
    ]
    by_lag: defaultdict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_lag[run.lag].append(run)
    ours = [group[0] for group in by_lag.values()]
    unequal, compared = (
        sum(getattr(run, name) for run in ours) for name in ("unequal", "compared")
    )
    page = CurvePage(
        title=" · ".join(f"lag {lag}" for lag in by_lag),
        kicker="zero-mismatch training",
        word="DIFF 0" if compared and not unequal else "MISMATCH",
        tone="good" if compared and not unequal else "bad",
        headline=f"{unequal:,} of {compared:,} audited tokens of the aligned runs differ.",
        facts=(
            Fact(name="runs", value=str(len(runs))),
            Fact(name="updates", value=f"{sum(len(run.records) for run in runs):,}"),
        ),
        sections=(
            Section(title="Side by side", columns=COLUMNS, rows=tuple(run.row() for run in runs)),
            *(section for group in by_lag.values() for section in sections_of(group)),
        ),
    )  # fmt: skip
    write_whole(Path(to), render_curves(page))


def sections_of(group: list[Run]) -> list[Section]:
    """The first run of a lag beside each of the others; by itself where there is no other."""
    first, *others = group
    return [
        Section(
            title=f"{first.name}, solid; {other.name}, dashed" if other else first.name,
            curves=tuple(drawings([first, other] if other else [first], group)),
        )
        for other in others or [None]
    ]


def drawings(shown: list[Run], group: list[Run]) -> list[CurveDrawing]:
    """Every quantity of the shown runs, on scales that hold the whole group."""

    def of_records(pick: Callable[[UpdateRecord], float | None]) -> Callable[[Run], Values]:
        return lambda run: tuple(pick(record) for record in run.records)

    def of_evaluations(name: str) -> Callable[[Run], Values]:
        return lambda run: tuple(getattr(each, name) for each in run.held_out)

    quantities = [
        ("Held-out problems, pass@1, one point an evaluation", of_evaluations("pass_at_1"), False),
        ("Held-out problems, mean@k, one point an evaluation", of_evaluations("mean_at_k"), False),
        *((title, of_records(pick), log) for _, title, pick, log in CURVES if title in DRAWN),
    ]
    found: list[CurveDrawing] = []
    for title, values_of, logarithmic in quantities:
        known = [value for run in group for value in values_of(run) if value is not None]
        lines = [Line(name=run.name, values=values_of(run)) for run in shown]
        if not any(known) or not any(line.values for line in lines):
            continue  # nothing of it, or 0 throughout
        bounds = scale_of(known, logarithmic=logarithmic)
        drawn = draw(lines, title=title, logarithmic=logarithmic, bounds=bounds)
        if drawn is not None:
            found.append(drawn)
    return found


if __name__ == "__main__":
    main()
