"""Geometry of the heat map and the histogram."""

from zeromismatch.agent_tools.plots import MAX_COLUMNS, PLOT_WIDTH, HeatMap, bars, draw_heat, level


def test_neighbouring_cells_of_one_level_become_one_rectangle():
    drawing = draw_heat(HeatMap(rows=("layer 0",), spans=(("a", 4),), cells=((0, 0, 3, 3),)))
    assert [(cell.x, cell.width, cell.level) for cell in drawing.rectangles] == [
        (0.0, PLOT_WIDTH / 2, 0),
        (PLOT_WIDTH / 2, PLOT_WIDTH / 2, 5),
    ]
    assert drawing.differs


def test_a_bin_shows_its_worst_token():
    row = [0] * (3 * MAX_COLUMNS)
    row[MAX_COLUMNS] = 2
    drawing = draw_heat(HeatMap(rows=("layer 0",), spans=(("a", len(row)),), cells=(tuple(row),)))
    worst = [cell for cell in drawing.rectangles if cell.level > 0]
    assert len(worst) == 1
    assert worst[0].title == f"layer 0, tokens {MAX_COLUMNS}-{MAX_COLUMNS + 2}: 2 sites differ"


def test_summary_names_the_first_place_in_words():
    cells = ((0,) * 5, (0, -1, 0, 0, 1))
    drawing = draw_heat(HeatMap(rows=("embed", "layer 0"), spans=(("a", 2), ("b", 3)), cells=cells))
    assert drawing.summary.startswith("2 requests, 2 rows: 1 of 9 cells differ")
    assert "layer 0, first at token 2 of b" in drawing.summary
    assert drawing.borders == (round(PLOT_WIDTH / 5 * 2, 2),)


def test_an_equal_map_does_not_differ():
    drawing = draw_heat(HeatMap(rows=("layer 0",), spans=(("a", 2),), cells=((0, -1),)))
    assert not drawing.differs
    assert [cell.level for cell in drawing.rectangles] == [0, -1]
    assert [entry for entry, _ in drawing.legend] == [-1, 0]


def test_levels_are_in_proportion_and_never_hide_a_difference():
    assert [level(value, 100) for value in (-1, 0, 1, 20, 21, 100)] == [-1, 0, 1, 1, 2, 5]


def test_an_empty_map_can_be_drawn():
    assert draw_heat(HeatMap(rows=(), spans=(), cells=())).rectangles == ()


def test_the_far_end_of_the_histogram_is_one_bar():
    drawn = bars({"8192-16383": 5, "16384-32767": 2, "1048576-2097151": 1, "nonfinite": 1})
    assert [(bar.bucket, bar.count) for bar in drawn] == [
        ("8192-16383", 5),
        ("16384+", 3),
        ("nonfinite", 1),
    ]


def test_bars_are_sorted_by_distance_and_leave_equal_elements_out():
    drawn = bars({"nonfinite": 1, "4-7": 10, "0": 999, "1": 1000, "2-3": 0})
    assert [bar.bucket for bar in drawn] == ["1", "4-7", "nonfinite"]
    assert drawn[0].share == 1.0
    assert drawn[1].share == 0.5
    assert drawn[2].share > 0
