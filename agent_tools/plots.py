"""Geometry of the report's two plots, so that the template only prints rectangles.

Heat map: a row per layer, a column per token; neighbouring cells of one level become one
rectangle, and more columns than fit are binned by their worst value. Histogram: bars on a
logarithmic scale, since one ULP is usually thousands of times as frequent as a thousand. Colours
are classes; the themes name them.

    draw_heat(HeatMap(rows=("layer 0",), spans=(("a", 3),), cells=((0, 2, 2),))).rectangles
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from .records import Record

MAX_COLUMNS = 240
PLOT_WIDTH = 880.0
ROW_HEIGHT = 13.0
NUM_LEVELS = 5
LAST_BUCKET = 16384


class HeatMap(Record):
    """Where two runs differ: one row per layer, one column per token.

    cells: -1 not compared, 0 all bits equal, n sites of that layer differ at that token.
    spans: (request, number of its columns), in column order.

        HeatMap(rows=("embed_tokens", "layer 0"), spans=(("a", 3),), cells=((0, 0, 0), (0, 2, 2)))
    """

    rows: tuple[str, ...]
    spans: tuple[tuple[str, int], ...]
    cells: tuple[tuple[int, ...], ...]


class Rectangle(Record):
    """Cells of one row and one level: ``level`` is -1 not compared, 0 equal, 1 to 5 differing."""

    x: float
    y: float
    width: float
    level: int
    title: str


class Label(Record):
    """A text at a place."""

    x: float
    y: float
    text: str


class HeatDrawing(Record):
    """A heat map ready to print; ``legend`` holds (level, what it means)."""

    width: float
    height: float
    row_height: float
    rectangles: tuple[Rectangle, ...]
    row_labels: tuple[Label, ...]
    borders: tuple[float, ...]
    legend: tuple[tuple[int, str], ...]
    differs: bool
    summary: str


class Bar(Record):
    """One bucket of a histogram; ``share`` is the bar's length between 0 and 1."""

    bucket: str
    count: int
    share: float


def draw_heat(heat: HeatMap) -> HeatDrawing:
    """Lay a heat map out."""
    rows, spans, cells = heat.rows, heat.spans, heat.cells
    num_columns = sum(count for _, count in spans)
    per_bin = max(1, math.ceil(num_columns / MAX_COLUMNS))
    binned = [[max(row[i : i + per_bin]) for i in range(0, num_columns, per_bin)] for row in cells]
    width = PLOT_WIDTH / max(1, len(binned[0]) if binned else 1)
    worst = max((value for row in binned for value in row), default=0)
    rectangles: list[Rectangle] = []
    for index, row in enumerate(binned):
        y = index * ROW_HEIGHT
        rectangles += _row_rectangles(rows[index], row, y, width, worst, per_bin)
    step = max(1, len(rows) // 16)
    labels = tuple(
        Label(x=-8, y=(index + 0.5) * ROW_HEIGHT, text=name)
        for index, name in enumerate(rows)
        if index % step == 0 or index == len(rows) - 1
    )
    return HeatDrawing(
        width=PLOT_WIDTH,
        height=len(rows) * ROW_HEIGHT,
        row_height=ROW_HEIGHT,
        rectangles=tuple(rectangles),
        row_labels=labels,
        borders=tuple(_borders(spans, width / per_bin)),
        legend=tuple(_legend(worst)),
        differs=worst > 0,
        summary=_summary(heat),
    )


def _row_rectangles(
    name: str, row: Sequence[int], y: float, width: float, worst: int, per_bin: int
) -> Iterator[Rectangle]:
    start = 0
    for value, group in groupby(row):
        length = len(list(group))
        first, last = start * per_bin, (start + length) * per_bin - 1
        meaning = {-1: "not compared", 0: "equal"}.get(value, f"{value} sites differ")
        yield Rectangle(
            x=round(start * width, 2),
            y=y,
            width=round(length * width, 2),
            level=level(value, worst),
            title=f"{name}, tokens {first}-{last}: {meaning}",
        )
        start += length


def level(value: int, worst: int) -> int:
    """-1 and 0 as they are; otherwise 1 to NUM_LEVELS in proportion to the worst value."""
    return value if value <= 0 else max(1, math.ceil(NUM_LEVELS * value / worst))


def _borders(spans: Sequence[tuple[str, int]], width: float) -> Iterator[float]:
    column = 0
    for _, count in spans[:-1]:
        column += count
        yield round(column * width, 2)


def _legend(worst: int) -> Iterator[tuple[int, str]]:
    yield -1, "not compared"
    yield 0, "all bits equal"
    lowest = 1
    for index in range(1, NUM_LEVELS + 1):
        highest = worst * index // NUM_LEVELS
        if highest >= lowest:
            sites = f"{lowest}" if lowest == highest else f"{lowest}-{highest}"
            yield index, f"{sites} site{'s' if highest > 1 else ''} differ"
            lowest = highest + 1


def _summary(heat: HeatMap) -> str:
    """What the picture shows, in words, for readers who cannot see it."""
    compared = sum(value >= 0 for row in heat.cells for value in row)
    differing = sum(value > 0 for row in heat.cells for value in row)
    size = f"{len(heat.spans)} requests, {len(heat.rows)} rows"
    text = f"{size}: {differing:,} of {compared:,} cells differ"
    for name, row in zip(heat.rows, heat.cells, strict=True):
        column = next((index for index, value in enumerate(row) if value > 0), None)
        if column is None:
            continue
        for request, count in heat.spans:
            if column < count:
                return f"{text}; topmost in {name}, first at token {column} of {request}."
            column -= count
    return f"{text}."


def bars(histogram: Mapping[str, int]) -> tuple[Bar, ...]:
    """Buckets of differing elements in order of distance, without ``0`` (equal ones); the far end
    is one bucket."""
    kept: dict[str, int] = {}
    for bucket, count in histogram.items():
        if bucket != "0" and count:
            far = LAST_BUCKET <= _distance(bucket) < math.inf
            name = f"{LAST_BUCKET}+" if far else bucket
            kept[name] = kept.get(name, 0) + count
    top = math.log10(max(kept.values(), default=1)) + 1
    return tuple(
        Bar(bucket=bucket, count=kept[bucket], share=round((math.log10(kept[bucket]) + 1) / top, 4))
        for bucket in sorted(kept, key=_distance)
    )


def _distance(bucket: str) -> float:
    lowest = re.split(r"[-+]", bucket)[0]
    return float(lowest) if lowest.isdecimal() else math.inf
