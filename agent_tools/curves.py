"""Geometry of curves over updates, so that a template only prints polylines and labels.

    draw((Line(name="reward", values=(0.4, 0.5, 0.7)),), title="Reward")

More updates than fit are binned: by the mean on a linear scale, by the worst value on a logarithmic
one, where the peak matters. A logarithmic scale spans seven decades at most; 0 and what is smaller
lie on its floor, and the drawing says how many there are. Colours are classes, named by the themes.
"""

import math
from collections.abc import Sequence

from .plots import Label
from .records import Record

MAX_POINTS = 220
NUM_TICKS = 4
DECADES = 7
LEFT, RIGHT, TOP, BOTTOM = 58.0, 8.0, 8.0, 20.0


class Line(Record):
    """Values of one quantity, one per update; None where it was not measured."""

    name: str
    values: tuple[float | None, ...]


class Polyline(Record):
    """tone: 0 the line that the picture is about, 1 what it is compared with, 2 and up others."""

    tone: int
    points: str
    name: str


class CurveDrawing(Record):
    """A drawing ready to print; ``summary`` says in words what the picture shows."""

    title: str
    width: float
    height: float
    polylines: tuple[Polyline, ...]
    rules: tuple[float, ...]
    y_labels: tuple[Label, ...]
    x_labels: tuple[Label, ...]
    summary: str
    note: str = ""

    @property
    def right(self) -> float:
        """Where the plot area ends."""
        return self.width - RIGHT

    @property
    def left(self) -> float:
        """Where it begins."""
        return LEFT


def draw(
    lines: Sequence[Line],
    *,
    title: str,
    logarithmic: bool = False,
    width: float = 430.0,
    height: float = 170.0,
    bounds: tuple[float, float] | None = None,
) -> CurveDrawing | None:
    """Lay the lines out, the first on top; None where no value is there.

    bounds: the values at bottom and top, where several drawings share one scale.
    """
    values = [value for line in lines for value in line.values if value is not None]
    if not values:
        return None
    low, high = bounds or scale_of(values, logarithmic=logarithmic)
    updates = max(len(line.values) for line in lines)
    plot_width, plot_height = width - LEFT - RIGHT, height - TOP - BOTTOM

    def x_of(update: float) -> float:
        return round(LEFT + plot_width * update / max(1, updates - 1), 1)

    def y_of(value: float) -> float:
        bottom, top, here = low, high, value
        if logarithmic:
            bottom, top, here = math.log10(low), math.log10(high), math.log10(max(value, low))
        share = (here - bottom) / (top - bottom) if top > bottom else 0.5
        return round(TOP + plot_height * (1 - min(1.0, max(0.0, share))), 1)

    polylines = [
        Polyline(
            tone=tone,
            name=line.name,
            points=" ".join(
                f"{x_of(at)},{y_of(value)}" for at, value in binned(line.values, logarithmic)
            ),
        )
        for tone, line in enumerate(lines)
    ]
    ticks = ticks_of(low, high, logarithmic=logarithmic)
    below = sum(value < low for value in values) if logarithmic else 0
    return CurveDrawing(
        title=title,
        width=width,
        height=height,
        polylines=tuple(reversed(polylines)),  # the first is drawn last, on top
        rules=tuple(y_of(tick) for tick in ticks),
        y_labels=tuple(Label(x=LEFT - 6, y=y_of(tick) + 3.5, text=short(tick)) for tick in ticks),
        x_labels=tuple(
            Label(x=x_of(update), y=height - 5, text=str(update))
            for update in sorted({0, (updates - 1) // 2, updates - 1})
        ),
        summary=_summary(lines, title),
        note=f"{below:,} values of 0 or below {short(low)} lie on the floor" if below else "",
    )


def scale_of(values: Sequence[float], *, logarithmic: bool) -> tuple[float, float]:
    """The values at the bottom and the top."""
    if not logarithmic:
        low, high = min(values), max(values)
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return low - room, high + room
    positive = [value for value in values if value > 0] or [1.0]
    high = math.ceil(math.log10(max(positive)))
    low = max(math.floor(math.log10(min(positive))), high - DECADES)
    return 10.0**low, 10.0 ** max(high, low + 1)


def ticks_of(low: float, high: float, *, logarithmic: bool) -> list[float]:
    """Round values between the two ends, about NUM_TICKS of them."""
    if logarithmic:
        first, last = round(math.log10(low)), round(math.log10(high))
        step = max(1, math.ceil((last - first) / NUM_TICKS))
        return [10.0**power for power in range(first, last + 1, step)]
    rough = (high - low) / NUM_TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [step * index for index in range(first, last + 1)]


def binned(values: Sequence[float | None], logarithmic: bool) -> list[tuple[float, float]]:
    """(update, value) points, at most MAX_POINTS."""
    per_bin = max(1, math.ceil(len(values) / MAX_POINTS))
    points: list[tuple[float, float]] = []
    for start in range(0, len(values), per_bin):
        held = [value for value in values[start : start + per_bin] if value is not None]
        if held:
            middle = start + (min(per_bin, len(values) - start) - 1) / 2
            points.append((middle, max(held) if logarithmic else sum(held) / len(held)))
    return points


def short(value: float) -> str:
    """A number in a few characters."""
    if value == 0:
        return "0"
    return f"{value:.0e}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4g}"


def _summary(lines: Sequence[Line], title: str) -> str:
    parts: list[str] = []
    for line in lines:
        held = [value for value in line.values if value is not None]
        if held:
            parts.append(
                f"{line.name}: {short(held[0])} at first, {short(held[-1])} at last, between "
                f"{short(min(held))} and {short(max(held))}"
            )
    return f"{title}. {'; '.join(parts)}."
