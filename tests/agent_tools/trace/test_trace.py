"""Traces: what is recorded and kept, and how little a damaged or unaffordable one is trusted."""

import dataclasses
import json
import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from zeromismatch.agent_tools.trace import Keep, Trace, Tracer, weight_digests
from zeromismatch.agent_tools.trace_store import load_trace, save_trace
from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import DiskError, InconclusiveError, UsageError
from zeromismatch.trainer.engines.base import (
    Hit,
    Request,
    Run,
    Sample,
    Scenario,
    Schedule,
    Site,
    SiteCall,
    Slice,
    Step,
)

NORM = Site(path="model.norm", op_class="rmsnorm", contract="rmsnorm.v0")
REQUESTS = (
    Request(id="a", tokens=(5, 6, 7), sampled_mask=(False, True, True)),
    Request(id="b", tokens=(5, 9)),
)
EXECUTED = Schedule(
    events=(
        Step(slices=(Slice(request="a", start=0, stop=3),)),
        Hit(request="b", source="a", upto=1),
        Step(slices=(Slice(request="b", start=1, stop=2),), padded_rows=1),
    )
)


def call(x: torch.Tensor, y: torch.Tensor) -> SiteCall:
    return SiteCall(site=NORM, call=0, inputs={"x": x}, output=y)


def observe(tracer: Tracer) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(5, 7), torch.randn(5, 2, 3)
    tracer.begin_rows(0, [("a", 0), ("a", 1), ("a", 2)])
    tracer.on_site(call(x[:3], y[:3]))
    tracer.begin_rows(1, [("b", 1), ("", -1)])
    tracer.on_site(call(x[3:], y[3:]))
    return x, y


def finish(tracer: Tracer) -> Trace:
    samples = (
        Sample(request="a", position=1, token=6, logprob_bits=-7, version=0, temperature=1.0),
        Sample(request="a", position=2, token=7, logprob_bits=9, version=0, temperature=1.0),
    )
    scenario = Scenario(model="m", plan="stock", requests=REQUESTS, schedule=EXECUTED)
    run = Run(
        scenario=scenario, executed=EXECUTED, requests=REQUESTS, samples=samples, engine="paged"
    )
    return tracer.finish(run, {"threads": 2}, {"w": np.arange(4, dtype=np.int64).reshape(2, 2)})


@pytest.fixture
def trace() -> Trace:
    tracer = Tracer(keep=Keep())
    observe(tracer)
    return finish(tracer)


def test_digests_are_those_of_the_rows_and_padding_is_left_out() -> None:
    tracer = Tracer()
    x, y = observe(tracer)
    trace = finish(tracer)
    out = trace.columns["model.norm", 0, "out"]
    assert torch.equal(torch.from_numpy(out.digests), bits.digest_rows(y[:4]))
    assert torch.equal(
        torch.from_numpy(trace.columns["model.norm", 0, "in:x"].digests), bits.digest_rows(x[:4])
    )
    assert trace.table.position[out.rows].tolist() == [0, 1, 2, 1]
    assert trace.table.request[out.rows].tolist() == [0, 0, 0, 1]
    assert trace.table.rows[out.rows].tolist() == [3, 3, 3, 2]
    assert trace.table.step[out.rows].tolist() == [0, 0, 0, 1]


def test_a_row_computed_twice_appears_twice() -> None:
    tracer = Tracer()
    y = torch.randn(1, 4)
    for step in range(2):
        tracer.begin_rows(step, [("a", 0)])
        tracer.on_site(call(y, y + step))
    out = finish(tracer).columns["model.norm", 0, "out"]
    assert len(out.digests) == 2
    assert (out.digests[0] != out.digests[1]).any()


def test_a_tensor_with_other_rows_than_announced_is_refused() -> None:
    tracer = Tracer()
    tracer.begin_rows(0, [("a", 0), ("a", 1)])
    with pytest.raises(InconclusiveError, match="announced 2 rows"):
        tracer.on_site(call(torch.zeros(3, 4), torch.zeros(3, 4)))


def test_only_the_tensors_asked_for_are_kept() -> None:
    tracer = Tracer(keep=Keep(requests=frozenset({"a"}), positions=range(1, 9)))
    _, y = observe(tracer)
    trace = finish(tracer)
    assert list(trace.blobs) == [("model.norm", 0, "out")]
    blob = trace.blobs["model.norm", 0, "out"]
    assert bits.equal(blob.tensor, y[1:3])
    assert trace.table.position[blob.rows].tolist() == [1, 2]


def test_kept_tensors_stop_at_the_budget() -> None:
    with pytest.raises(DiskError, match=r"disk budget"):
        observe(Tracer(keep=Keep(), disk_bytes=60))


def test_a_trace_comes_back_from_disk_as_it_was(trace: Trace, tmp_path: Path) -> None:
    again = load_trace(save_trace(trace, tmp_path / "left"))
    assert again.requests == trace.requests
    assert again.executed == trace.executed
    assert again.environment == trace.environment
    assert again.sites == trace.sites
    for name in ("step", "request", "position", "row", "rows"):
        assert np.array_equal(getattr(again.table, name), getattr(trace.table, name))
    assert again.samples.logprob_bits.tolist() == [-7, 9]
    assert list(again.columns) == list(trace.columns)
    for key, column in trace.columns.items():
        stored = again.columns[key]
        assert np.array_equal(stored.digests, column.digests)
        assert (stored.op_class, stored.contract, stored.dtype, stored.shape) == (
            column.op_class, column.contract, column.dtype, column.shape,
        )  # fmt: skip
    assert np.array_equal(again.weights["w"], trace.weights["w"])
    key = ("model.norm", 0, "out")
    assert bits.equal(again.blobs[key].tensor, trace.blobs[key].tensor)
    assert os.listdir(tmp_path) == ["left"]


def test_observations_carry_the_digest_of_their_row(trace: Trace) -> None:
    first = next(trace.observations("model.norm"))
    column = trace.columns["model.norm", 0, first.shard]
    assert first.request == "a"
    assert first.position == 0
    assert first.digest == bits.digest_hex(torch.from_numpy(column.digests[0]))


def test_an_existing_folder_is_never_overwritten(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "left").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        save_trace(trace, tmp_path / "left")


def test_too_little_disk_names_budget_and_need_and_leaves_nothing(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 0, 1_000_500_000))
    with pytest.raises(DiskError, match=r"needs 1 MB, 1000 MB are free .* 1000 MB must stay free"):
        save_trace(trace, tmp_path / "left")
    with pytest.raises(DiskError, match=r"needs 1 MB and the disk budget is 0 MB"):
        save_trace(trace, tmp_path / "left", disk_bytes=1000)
    assert os.listdir(tmp_path) == []


def test_a_write_that_fails_half_way_leaves_nothing(trace: Trace, tmp_path: Path) -> None:
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
    try:
        with pytest.raises(DiskError, match="nothing was left there") as caught:
            save_trace(trace, tmp_path / "left")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value.__cause__, OSError)
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_way_of_the_folder_is_a_disk_error(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="could not write"):
        save_trace(trace, tmp_path / "file" / "left")


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "meta", "version", "keys"])
def test_a_damaged_trace_is_refused(trace: Trace, tmp_path: Path, damage: str) -> None:
    folder = save_trace(trace, tmp_path / "left")
    digests, meta = folder / "digests.npz", folder / "meta.json"
    content = digests.read_bytes()
    if damage == "truncate":
        digests.write_bytes(content[:-100])
    elif damage == "flip":
        digests.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    elif damage == "remove":
        digests.unlink()
    elif damage == "meta":
        meta.write_text(meta.read_text()[:-5])
    elif damage == "version":
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"schema_version": 99}))
    else:
        meta.write_text(json.dumps({"schema_version": 1, "files": {}}))
    with pytest.raises(UsageError, match="run it again"):
        load_trace(folder)


def test_a_folder_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no meta\.json"):
        load_trace(tmp_path / "nowhere")


def test_weight_digests_place_a_flipped_bit_by_row() -> None:
    module = torch.nn.Linear(6, 5)
    module.register_buffer("scale", torch.tensor(2.0), persistent=False)
    before = weight_digests(module)
    bits.int_view(module.weight)[3, 2] ^= 1
    after = weight_digests(module)
    assert set(before) == {"weight", "bias", "scale"}
    assert (before["weight"] != after["weight"]).any(axis=1).tolist() == [False] * 3 + [True, False]
    assert np.array_equal(before["bias"], after["bias"])


def test_a_trace_is_immutable(trace: Trace) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        trace.run = "other"
