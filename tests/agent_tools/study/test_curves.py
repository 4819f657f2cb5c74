"""Geometry of curves: what is drawn where, what is binned, what a logarithm cannot show."""

import pytest

from zeromismatch.agent_tools.curves import (
    MAX_POINTS,
    CurveDrawing,
    Line,
    binned,
    draw,
    scale_of,
    short,
    ticks_of,
)


def points(drawing: CurveDrawing | None, tone: int = 0) -> list[tuple[float, float]]:
    assert drawing is not None
    (line,) = [line for line in drawing.polylines if line.tone == tone]
    pairs = [pair.split(",") for pair in line.points.split()]
    return [(float(x), float(y)) for x, y in pairs]


def test_higher_values_lie_higher_and_later_updates_further_right():
    drawing = draw([Line(name="reward", values=(0.0, 0.5, 1.0))], title="Reward")
    (x0, y0), (x1, y1), (x2, y2) = points(drawing)
    assert x0 < x1 < x2
    assert y0 > y1 > y2
    assert drawing is not None
    assert "0 at first, 1 at last, between 0 and 1" in drawing.summary


def test_nothing_measured_is_no_drawing():
    assert draw([Line(name="moves", values=(None, None))], title="Moves") is None


def test_a_gap_is_left_out():
    assert len(points(draw([Line(name="a", values=(1.0, None, 2.0))], title="A"))) == 2


@pytest.mark.parametrize(("logarithmic", "expected"), [(False, 1.0), (True, 9.0)])
def test_long_runs_are_binned_by_mean_or_by_peak(logarithmic: bool, expected: float):
    values = ([0.2] * 10 + [9.0]) * (3 * MAX_POINTS // 3)
    found = binned(values, logarithmic)
    assert len(found) <= MAX_POINTS
    assert found[0][1] == expected


def test_zero_lies_on_the_floor_of_a_logarithmic_scale_and_is_counted():
    drawing = draw([Line(name="d3", values=(0.0, 1e-3, 1e-1))], title="D3", logarithmic=True)
    assert drawing is not None
    assert drawing.note == "1 values of 0 or below 0.001 lie on the floor"
    heights = [y for _, y in points(drawing)]
    assert heights[0] == heights[1] == max(heights)


def test_scales_hold_their_values_and_span_at_most_seven_decades():
    assert scale_of([3e-3, 0.4], logarithmic=True) == (1e-3, 1.0)
    assert scale_of([1e-12, 1.0], logarithmic=True) == (1e-7, 1.0)
    low, high = scale_of([2.0, 2.0], logarithmic=False)
    assert low < 2.0 < high


def test_ticks_are_round_and_inside():
    assert ticks_of(0.1, 0.95, logarithmic=False) == [0.5]
    assert [short(tick) for tick in ticks_of(0.0, 1.0, logarithmic=False)] == [
        "0", "0.5", "1",
    ]  # fmt: skip
    assert ticks_of(1e-4, 1.0, logarithmic=True) == [1e-4, 1e-3, 1e-2, 1e-1, 1.0]


def test_lines_of_one_scale_share_it():
    drawing = draw(
        [Line(name="a", values=(5.0,)), Line(name="b", values=(0.0,))], title="T", bounds=(0, 10)
    )
    (_, a), (_, b) = points(drawing)[0], points(drawing, tone=1)[0]
    assert a < b
