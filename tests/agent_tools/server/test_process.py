"""The server as a process: quick, light, and no loss when it, its client or a call goes away."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zeromismatch.agent_tools.jobs.runs import trace_page
from zeromismatch.agent_tools.jobs.store import Store
from zeromismatch.agent_tools.trace import Column, ColumnKey, RowTable, Samples, Trace
from zeromismatch.agent_tools.trace_store import save_trace
from zeromismatch.kernels import bits
from zeromismatch.trainer.engines.base import Request, Schedule

from .conftest import PATIENCE, Wire, add_run

START_SECONDS = 3.0
LIST_SECONDS = 0.3
ROWS = 1_250_000


def test_it_answers_at_once_and_loads_no_torch(wire: Wire):
    """Processor time, so that other work on the machine doesn't count."""
    wire.initialize()
    begun = wire.cpu_seconds()
    assert begun < START_SECONDS
    listed = wire.answer(wire.ask("tools/list"))["result"]["tools"]
    assert wire.cpu_seconds() - begun < LIST_SECONDS
    assert len(listed) > 15
    wire.answer(wire.call("list_runs"))
    assert "torch" not in Path("/proc", str(wire.process.pid), "maps").read_text()


def test_a_job_survives_a_killed_server(wire: Wire, workspace: Path):
    add_run(workspace)
    wire.initialize()
    asked = {"tool": "report", "arguments": {"run": "runs/older"}, "key": "survive"}
    started = wire.answer(wire.call("job_start", **asked))["result"]["structuredContent"]
    wire.process.send_signal(signal.SIGKILL)
    wire.process.wait(PATIENCE)
    ended = Store(workspace).wait(started["id"], seconds=PATIENCE)
    assert ended.state == "done"
    assert (workspace / "runs" / "older" / "report.html").read_text().endswith("</html>")
    following = Wire(workspace)
    try:
        following.initialize()
        again = following.answer(following.call("job_start", **asked))["result"]
        assert again["structuredContent"]["id"] == started["id"]
        assert again["structuredContent"]["attempt"] == 1
    finally:
        following.close()


def test_a_client_that_stops_reading_loses_nothing(wire: Wire, workspace: Path):
    add_run(workspace)
    wire.initialize()
    arguments = {"run": "runs/older"}
    wire.call("job_start", tool="report", arguments=arguments, key="unread")
    asked = [wire.call("playbook", name="day-0") for _ in range(120)]  # megabytes of answers
    store = Store(workspace)
    until = time.monotonic() + PATIENCE
    while not store.list():
        assert time.monotonic() < until
    assert store.wait(store.list()[0].id, seconds=PATIENCE).state == "done"
    seen: set[int] = set()
    assert wire.process.stdout
    while not seen.issuperset(asked):
        seen.add(json.loads(wire.process.stdout.readline())["id"])
    wire.call("playbook", name="day-0")
    wire.close()  # without reading that one: the server ends by itself
    assert wire.process.returncode is not None


def test_thirty_two_calls_at_once_over_stdio_are_all_answered(wire: Wire, workspace: Path):
    """All are on the wire before the first answer is read; one of them is a job."""
    add_run(workspace)
    wire.initialize()
    drafted = {f"runs/drafts/{n}.py": f"# {n}\n" for n in range(6)}
    asked = [wire.call("report", run="runs/older")]
    asked += [wire.call("draft_write", file=name, text=text) for name, text in drafted.items()]
    asked += [wire.call("playbook", name="day-0") for _ in range(8)]
    asked += [wire.call("list_runs", limit=1 + n) for n in range(9)]
    wrong = [wire.call("inspect", model="../x") for _ in range(4)]
    wrong += [wire.call("draft_write", file="a.py", text="x") for _ in range(4)]
    assert len({*asked, *wrong}) == 32
    answers: dict[int, dict[str, Any]] = {}
    assert wire.process.stdout
    while len(answers) < 32:
        found = json.loads(wire.process.stdout.readline())
        if "id" in found:
            assert found["id"] not in answers
            answers[found["id"]] = found["result"]
    assert {number for number, each in answers.items() if each.get("isError")} == {*wrong}
    assert [answers[n]["structuredContent"]["kind"] for n in asked[1:7]] == ["draft"] * 6
    assert {name: (workspace / name).read_text() for name in drafted} == drafted
    assert [job.state for job in Store(workspace).list()] == ["done"]
    assert (workspace / "runs" / "older" / "report.html").read_text().endswith("</html>")


def test_it_ends_with_its_client(wire: Wire):
    wire.initialize()
    assert wire.process.stdin
    wire.process.stdin.close()
    assert wire.process.wait(PATIENCE) == 0


@pytest.fixture(scope="module")
def long_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored trace of more than 20 MB."""
    generator = np.random.default_rng(0)
    rows = np.arange(ROWS, dtype=np.int32)
    zero = np.zeros(ROWS, dtype=np.int32)
    column = Column(
        op_class="linear", contract=None, dtype="float32", shape=(8,), rows=rows,
        digests=generator.integers(-(2**62), 2**62, (ROWS, 2), dtype=np.int64),
    )  # fmt: skip
    none = np.zeros(0, dtype=np.int32)
    trace = Trace(
        run="long", engine="paged", model="m", plan="stock", environment={},
        requests=(Request(id="a", tokens=(1,), sampled_mask=(False,)),),
        executed=Schedule(events=()),
        columns={
            ColumnKey("first", 0, "out"): column,
            ColumnKey("first", 1, "out"): dataclasses.replace(column, digests=column.digests + 1),
        },
        table=RowTable(step=zero, request=zero, position=rows, row=zero, rows=zero + 1),
        samples=Samples(
            request=none, position=none, token=none.astype(np.int64), logprob_bits=none
        ),
        sites=("first",), weights={},
    )  # fmt: skip
    return save_trace(trace, tmp_path_factory.mktemp("long") / "left")


def test_a_long_trace_is_read_by_pages(long_trace: Path):
    assert sum(path.stat().st_size for path in long_trace.iterdir()) > 20_000_000
    across = trace_page(long_trace, site="first", offset=ROWS - 2, limit=5)
    assert across.total == 2 * ROWS
    assert [(row.call, row.position) for row in across.rows] == [
        (0, ROWS - 2), (0, ROWS - 1), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    with np.load(long_trace / "digests.npz") as stored:
        digest = torch.from_numpy(stored["column/1"][0])
    assert across.rows[2].digest == bits.digest_hex(digest)
    assert trace_page(long_trace, site="first", offset=2 * ROWS, limit=5).rows == ()


@pytest.mark.slow
def test_a_long_trace_does_not_hold_up_the_server(wire: Wire, workspace: Path, long_trace: Path):
    folder = workspace / "runs" / "long"
    folder.mkdir(parents=True)
    os.rename(long_trace, folder / "left")
    wire.initialize()
    asked = wire.call("trace", folder="runs/long/left", site="first", offset=ROWS, limit=500)
    other = wire.call("list_runs")
    assert wire.answer(other)["result"]["structuredContent"]["total"] == 1
    page = wire.answer(asked)["result"]["structuredContent"]
    assert len(page["rows"]) == 500 or page["call"]["cut"]
    about = wire.answer(wire.ask("resources/read", {"uri": "trace://long/left"}))
    assert json.loads(about["result"]["contents"][0]["text"])["run"] == "long"
