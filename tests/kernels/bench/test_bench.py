"""The speed table: both sides compute the same thing, and the numbers are what they say."""

import json

import pytest
import torch

from zeromismatch.kernels import bench as benchmark
from zeromismatch.kernels import bench_works
from zeromismatch.kernels.bench import BenchRow, bench, markdown
from zeromismatch.kernels.bench_works import Work, works
from zeromismatch.kernels.contract import Implementation
from zeromismatch.kernels.errors import NotCertifiedError, UsageError

LIGHT = [work for work in works() if work.contract and "49152" not in work.shape]


@pytest.mark.parametrize("work", LIGHT, ids=lambda work: f"{work.op} {work.dtype} {work.shape}")
def test_both_sides_compute_the_same_thing(work: Work) -> None:
    ours, stock = (call() for call in work.prepare())
    assert isinstance(ours, torch.Tensor)
    assert isinstance(stock, torch.Tensor)
    if work.op.startswith("attention"):
        stock = stock.transpose(1, 2).flatten(0, 1)
    assert ours.dtype == stock.dtype == work.dtype
    difference = (ours.double() - stock.double()).abs().max() / stock.double().abs().max()
    assert float(difference) < (1e-5 if work.dtype == torch.float32 else 2e-2)


def test_the_table_covers_what_is_demanded() -> None:
    demanded = {(work.op, work.shape): work.floor for work in works() if work.floor is not None}
    for rows, floor in ((1, 0.6), (8, 0.8), (64, 0.8), (512, 0.8)):
        shapes = [
            shape for op, shape in demanded if op == "linear" and shape.startswith(f"{rows} row")
        ]
        assert len(shapes) == 4
        assert all(demanded[("linear", shape)] == floor for shape in shapes)
    assert [floor for (op, _), floor in demanded.items() if "prefill" in op] == [0.6]
    assert [floor for (op, _), floor in demanded.items() if "decode" in op] == [0.8]
    assert len({(work.op, work.dtype, work.shape) for work in works()}) == len(list(works()))


def test_ratio_is_stock_over_ours_from_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {list: iter([100, 100, 100, 400, 100]), dict: iter([250, 250, 250, 250, 900])}
    monkeypatch.setattr(benchmark, "time_of", lambda call: next(times[call]))
    monkeypatch.setattr(benchmark, "QUICK_SECONDS", 0.0)
    fake = Work(op="-", shape="-", prepare=lambda: (list, dict), stock="-", contract=None)
    monkeypatch.setattr(benchmark, "works", lambda: iter([fake]))
    (row,) = bench(quick=True)
    assert (row.ours_us, row.stock_us, row.ratio, row.pairs) == (0.1, 0.25, 2.5, 5)
    assert row.spread[0] <= 2.5 <= row.spread[1]


def test_a_short_run_gives_rows_json_and_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [work for work in LIGHT if work.shape in ("1 row, 576 to 576", "64 rows of 576")]
    monkeypatch.setattr(benchmark, "QUICK_SECONDS", 0.005)
    monkeypatch.setattr(benchmark, "works", lambda: iter(chosen))
    seen: list[tuple[str, int, int]] = []
    rows = bench(quick=True, progress=lambda *each: seen.append(each))
    assert len(rows) == len(chosen) == len(seen) >= 2
    assert all(row.ours_us > 0 and row.stock_us > 0 and row.pairs >= 5 for row in rows)
    assert all(row.implementation.startswith("core-") for row in rows)
    assert json.loads(json.dumps([row.to_dict() for row in rows]))[0]["op"] == "linear"
    table = markdown(rows).splitlines()
    assert "threads, torch" in table[0]
    assert len(table) == 4 + len(rows)
    assert len({line.count("|") for line in table[2:]}) == 1


def test_missed_floors_are_said() -> None:
    row = BenchRow(
        op="linear", dtype="float32", shape="1 row", ours_us=2.0, stock_us=1.0, ratio=0.5,
        spread=(0.4, 0.6), pairs=5, floor=0.6, stock="F.linear", implementation="core-avx2",
    )  # fmt: skip
    assert row.reached is False
    assert "0.6 (missed)" in markdown([row])


def test_other_devices_and_references_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no benchmark for 'mars'"):
        bench("mars")
    slow = Implementation(contract="-", name="reference", run=lambda: None)
    monkeypatch.setattr(benchmark, "choose", lambda contract: slow)
    with pytest.raises(NotCertifiedError, match="not worth timing"):
        bench(quick=True)


def test_stock_attention_takes_the_faster_form(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {list: 5, dict: 3}
    monkeypatch.setattr(bench_works, "time_of", lambda call: speeds[call])
    assert bench_works._faster([list, dict]) is dict
