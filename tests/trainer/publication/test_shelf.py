"""Versions on the shelf: whole, compared, and withdrawn before their memory is used again."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import CapabilityError, CheckpointError, NonFiniteError
from zeromismatch.model_recipes.state import digests_of, weights_root
from zeromismatch.trainer.loop.versions import Versions
from zeromismatch.trainer.publication.in_place import LiveWeights
from zeromismatch.trainer.publication.shelf import Shelf, shelved

READ = """
import sys; from pathlib import Path
from zeromismatch.trainer.loop.versions import Versions
from zeromismatch.trainer.publication.shelf import shelved
folder, version, device = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
there = shelved(folder, version)
print(there is not None, Versions(folder).read(version, device)["b.weight"].sum().item())
"""


def weights(value: float, device: str = "cpu") -> dict[str, Tensor]:
    return {
        "a.weight": torch.full((3,), value, dtype=torch.bfloat16, device=device),
        "b.weight": torch.full((5, 7), value, device=device),
    }


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path)
    yield shelf
    shelf.close()


def test_what_is_put_is_what_a_reader_installs(shelf: Shelf, tmp_path: Path) -> None:
    given = weights(2.0)
    put = shelf.put(given, 3)
    given["b.weight"] += 1  # the shelf has a copy
    found = shelved(tmp_path, 3)
    assert found is not None
    assert put.card.root == weights_root(digests_of(weights(2.0)))
    tensors = weights(1.0)
    live = LiveWeights(tensors, cleared=lambda: True)
    live.install(found.offer())
    assert (live.version, live.root) == (3, put.card.root)
    assert all(bits.equal(tensors[name], new) for name, new in weights(2.0).items())


def test_as_many_versions_stay_as_are_wanted_and_as_there_is_room_for(tmp_path: Path) -> None:
    for wanted in (9, 10**15):
        shelf = Shelf(tmp_path, wanted=wanted)
        for version in range(12):
            shelf.put(weights(1.0), version)
        present = [version for version in range(12) if shelved(tmp_path, version) is not None]
        assert present == ([*range(3, 12)] if wanted == 9 else [*range(12)])
        assert 9 <= shelf.slots < 10**15
        shelf.close()


def test_a_slot_is_withdrawn_before_it_is_used_again(shelf: Shelf, tmp_path: Path) -> None:
    first = shelf.put(weights(1.0), 1)
    later = range(2, shelf.slots + 2)
    for version in later:
        assert not first.is_gone()
        shelf.put(weights(float(version)), version)
    assert first.is_gone()
    assert shelved(tmp_path, 1) is None
    assert all(shelved(tmp_path, version) is not None for version in later)
    last = shelved(tmp_path, later[-1])
    assert last is not None
    assert first.flat.data_ptr() == last.flat.data_ptr()


def test_what_is_placed_is_not_there_before_it_is_announced(shelf: Shelf, tmp_path: Path) -> None:
    given = weights(1.0)
    placed = shelf.begin(given, 1)
    given["b.weight"].zero_()
    assert shelved(tmp_path, 1) is None
    shelf.announce(placed)
    found = shelved(tmp_path, 1)
    assert found is not None
    assert bits.equal(found.tensors["b.weight"], weights(1.0)["b.weight"])


def test_a_reader_that_comes_too_late_takes_the_file(shelf: Shelf, tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.publish(weights(1.0), 1)
    put = shelf.put(weights(1.0), 1)
    put.tensors["b.weight"][0, 0] = 9.0  # used again while it was being read
    with pytest.raises(CheckpointError, match="other bits"):  # but its card is still there
        versions.read(1)
    put.file.unlink()
    assert versions.read(1)["b.weight"].sum().item() == 35.0


def test_a_reader_without_a_file_has_the_shelf(shelf: Shelf, tmp_path: Path) -> None:
    shelf.put(weights(4.0), 1)
    read = Versions(tmp_path).read(1)
    assert read["b.weight"].sum().item() == 140.0
    for version in range(2, shelf.slots + 2):
        shelf.put(weights(5.0), version)
    assert read["b.weight"].sum().item() == 140.0  # a copy of its own


def test_numbers_that_are_none_are_not_announced(shelf: Shelf, tmp_path: Path) -> None:
    given = weights(1.0)
    given["b.weight"][1, 2] = float("inf")
    with pytest.raises(NonFiniteError, match=r"b\.weight"):
        shelf.put(given, 1)
    assert shelved(tmp_path, 1) is None
    shelf.put(weights(1.0), 1)


def test_a_file_of_the_shelf_is_a_file_as_any(shelf: Shelf, tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    put = shelf.put(weights(7.0), 1)
    versions.publish_flat(put, put.flat)
    shelf.close()
    read = versions.read(1)
    assert all(bits.equal(read[name], each) for name, each in weights(7.0).items())
    assert versions.root(1) == put.card.root


def test_an_earlier_runs_cards_are_gone(shelf: Shelf, tmp_path: Path) -> None:
    put = shelf.put(weights(1.0), 1)
    Shelf(tmp_path)
    assert put.is_gone()
    put.file.write_text("{")
    with pytest.raises(CapabilityError, match="no announcement"):
        shelved(tmp_path, 1)


def _read_elsewhere(folder: Path, version: int, device: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", READ, str(folder), str(version), device],
        capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_another_process_on_a_cpu_takes_the_file(shelf: Shelf, tmp_path: Path) -> None:
    Versions(tmp_path).publish(weights(2.0), 1)
    shelf.put(weights(2.0), 1)
    assert _read_elsewhere(tmp_path, 1, "cpu") == "False 70.0"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_another_process_on_the_gpu_reads_the_slot(shelf: Shelf, tmp_path: Path) -> None:
    shelf.put(weights(2.0, "cuda"), 1)  # no file is there
    assert _read_elsewhere(tmp_path, 1, "cuda") == "True 70.0"
    for version in range(2, shelf.slots + 2):
        shelf.put(weights(4.0, "cuda"), version)  # the last one over version 1
    assert _read_elsewhere(tmp_path, version, "cuda") == "True 140.0"
