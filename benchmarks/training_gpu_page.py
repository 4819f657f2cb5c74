"""The curves of several training runs on one page: an aligned run and its twin on stock kernels.

    python benchmarks/training_gpu_page.py OUT.html "aligned=DIR" "stock kernels=DIR"

DIR holds a run's ``metrics.jsonl`` and ``evaluations.jsonl``. The first run is the line on top.
"""

import statistics
import sys
from pathlib import Path

from zeromismatch.agent_tools.curves import CurveDrawing, Line, draw
from zeromismatch.agent_tools.report import write_whole
from zeromismatch.agent_tools.training_report import (
    CURVES,
    CurvePage,
    Fact,
    Section,
    render_curves,
)
from zeromismatch.trainer.diagnostics.journal import read_journal
from zeromismatch.trainer.loop.evaluation import read_evaluations

SMOOTH = 20
COLUMNS = (
    "run", "updates", "audited tokens that differ", "largest difference",
    f"reward, first and last {SMOOTH}", "lag", "median and peak D3", "pass@1 by version",
)  # fmt: skip


def main() -> None:
    """Read, draw, write."""
    to, *named = sys.argv[1:]
    runs = {name: Path(folder) for name, _, folder in (each.rpartition("=") for each in named)}
    journals = {name: read_journal(folder) for name, folder in runs.items()}
    rows: list[tuple[str, ...]] = []
    for name, records in journals.items():
        first, last = (
            statistics.fmean(record.reward for record in some)
            for some in (records[:SMOOTH], records[-SMOOTH:])
        )
        held_out = read_evaluations(runs[name])
        unequal = sum(record.kernel.unequal for record in records)
        compared = sum(record.kernel.compared for record in records)
        late = [record.d3 for record in records if record.lag_median == record.lag_cap]
        rows.append((
            name, str(len(records)), f"{unequal:,} of {compared:,}",
            f"{max(record.kernel.largest for record in records):.3g}",
            f"{first:.3f} → {last:.3f}", f"{records[-1].lag_median:g}",
            f"{statistics.median(late):.2g}, {max(late):.2g}" if late else "–",
            ", ".join(f"{each.pass_at_1:.2f} ({each.version})" for each in held_out) or "–",
        ))  # fmt: skip
    sections: dict[str, list[CurveDrawing]] = {}
    for section, title, pick, logarithmic in CURVES:
        lines = tuple(
            Line(name=name, values=tuple(pick(record) for record in records))
            for name, records in journals.items()
        )
        drawn = draw(lines, title=title, logarithmic=logarithmic)
        if drawn is not None:
            sections.setdefault(section, []).append(drawn)
    ours = next(iter(journals.values()))
    unequal = sum(record.kernel.unequal for record in ours)
    compared = sum(record.kernel.compared for record in ours)
    page = CurvePage(
        title=f"{ours[-1].lag_cap} versions behind, {len(ours)} updates",
        kicker="zero-mismatch training",
        word="DIFF 0" if compared and not unequal else "MISMATCH",
        tone="good" if compared and not unequal else "bad",
        headline=f"{unequal:,} of {compared:,} audited tokens of the first run differ.",
        facts=tuple(
            Fact(name=name, value=f"{len(each):,} updates") for name, each in journals.items()
        ),
        sections=(
            Section(title="Side by side", columns=COLUMNS, rows=tuple(rows)),
            *(Section(title=name, curves=tuple(drawn)) for name, drawn in sections.items()),
        ),
    )
    write_whole(Path(to), render_curves(page))


if __name__ == "__main__":
    main()
