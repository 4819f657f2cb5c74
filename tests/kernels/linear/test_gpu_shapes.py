"""Shapes proved on a GPU are kept in files that hold for one environment and one code only."""

from pathlib import Path

import pytest

from zeromismatch.kernels import dispatch
from zeromismatch.kernels.certificates import Environment
from zeromismatch.kernels.linear import gpu_shapes
from zeromismatch.kernels.linear.gpu_shapes import Served, ShapeFile

HERE = Environment(
    processor="NVIDIA H200", features="sm90", driver="580", torch="2.11", triton="3.6", cuda="13.0"
)
CONTRACT = "gemm.L.bfloat16.sm90.v1"


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShapeFile:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = Served(
        form="nt", m=16, n=4096, k=1024, out="bfloat16", bias=False,
        algorithm="lt-id66", raw="00" * 64, refused=("lt-id11",),
    )  # fmt: skip
    found = ShapeFile(
        contract=CONTRACT, environment=HERE, sources={"operator": "a"}, shapes=[shape]
    )
    path = gpu_shapes.path_of(CONTRACT)
    path.parent.mkdir(parents=True)
    path.write_text(found.model_dump_json())
    return found


def test_any_change_voids_the_whole_file(stored: ShapeFile) -> None:
    read = gpu_shapes.read(gpu_shapes.path_of(CONTRACT))
    assert read == stored
    assert stored.void(HERE, {"operator": "a"}) is None
    newer = HERE.model_copy(update={"driver": "590"})
    assert stored.void(newer, {"operator": "a"}) == "driver: 580 is now 590"
    assert stored.void(HERE, {"operator": "b"}) == "the code changed"


def test_recheck_lists_the_files_and_says_why_one_cannot_be_used(stored: ShapeFile) -> None:
    gpu_shapes.path_of("gemm.L.float16.sm90.v1").write_text("{")
    gpu_shapes.path_of("gemm.L.float32.sm90.v1").write_text(stored.model_dump_json())
    found = {each.contract: each for each in dispatch.recheck() if each.file.startswith("shapes/")}
    assert found["gemm.L.float16.sm90.v1"].status == "unreadable"
    assert found["gemm.L.float32.sm90.v1"].status == "unreadable"  # another contract's file
    assert "gemm.L.bfloat16" in (found["gemm.L.float32.sm90.v1"].reason or "")
    assert found[CONTRACT].status in ("foreign", "void")
    assert found[CONTRACT].implementation == "cublaslt"
