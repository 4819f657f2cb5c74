"""A run while it runs: one panel in a terminal, one line now and then elsewhere. On stderr only.

    with live(total=300) as show:
        show(record)                       # as Journal(on_record=show) does

The reward is the mean of the last 20 updates beside that of the first 20.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Generator

from .record import UpdateRecord

WINDOW = 20
LINE_SECONDS = 10.0

Show = Callable[[UpdateRecord], None]


def summary(records: list[UpdateRecord], total: int) -> list[tuple[str, str]]:
    """What a person wants to see of the run so far: (name, value)."""
    last = records[-1]
    first, recent = records[:WINDOW], records[-WINDOW:]
    kernel = last.kernel
    worst = max(record.kernel.unequal for record in records)
    ratio = last.d3_peak_to_median
    spread = "–" if ratio is None else f"{ratio:.2f}×"
    return [
        ("update", f"{last.version + 1} of {total}"),
        ("reward", f"{_reward(recent):.4f} now, {_reward(first):.4f} at first"),
        ("kernel term", f"{kernel.unequal} of {kernel.compared} differ; worst {worst}"),
        ("D3", f"{last.d3:.3e}, peak to median {spread}"),
        ("lag", f"{last.lag_median:g} median, {last.lag_most} most, cap {last.lag_cap}"),
        ("gradient norm", f"{last.gradient_norm:.3e}"),
        ("rejected", f"{last.rejected:.1%}"),
        ("speed", f"{last.tokens_per_second:,.0f} tokens/s"),
    ]


@contextlib.contextmanager
def live(total: int) -> Generator[Show]:
    """A function that shows each record; ``total``: updates in all."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    records: list[UpdateRecord] = []
    if not sys.stderr.isatty():
        yield _lines(records, total)
        return

    def table() -> Table:
        grid = Table.grid(padding=(0, 2))
        for name, value in summary(records, total):
            grid.add_row(Text(name, style="dim"), Text(value))
        return grid

    with Live(console=Console(stderr=True), refresh_per_second=4) as panel:

        def show(record: UpdateRecord) -> None:
            records.append(record)
            panel.update(table())

        yield show


def _lines(records: list[UpdateRecord], total: int) -> Show:
    """A line for the first and the last update, and at most one in LINE_SECONDS between."""
    shown = [-LINE_SECONDS]

    def show(record: UpdateRecord) -> None:
        records.append(record)
        now = time.monotonic()
        if now - shown[0] >= LINE_SECONDS or record.version + 1 >= total:
            shown[0] = now
            parts = [f"{name} {value}" for name, value in summary(records, total)]
            print(f"zm: {' · '.join(parts)}", file=sys.stderr, flush=True)

    return show


def _reward(records: list[UpdateRecord]) -> float:
    return sum(record.reward for record in records) / len(records)
