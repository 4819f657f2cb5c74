"""What lies on disk: versions, checkpoints, arrived groups, the folder itself."""

import resource
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import CheckpointError, DiskError, UsageError
from zeromismatch.trainer.loop.audit import Group
from zeromismatch.trainer.loop.checkpoint import Checkpoints
from zeromismatch.trainer.loop.config import TrainConfig
from zeromismatch.trainer.loop.folder import RunFolder
from zeromismatch.trainer.loop.journal import Journal
from zeromismatch.trainer.loop.versions import Versions

from .test_trajectories import trajectory


def write(folder: Path) -> None:
    save_file({"w": torch.arange(6000.0)}, folder / "state.safetensors")


@contextmanager
def disk_full(after: int) -> Generator[None]:
    """No file may grow beyond ``after`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_version_comes_back_in_every_bit_and_old_ones_go(tmp_path: Path) -> None:
    store = Versions(tmp_path)
    roots = [store.publish({"w": torch.full((3,), float(v))}, v) for v in range(3)]
    assert store.newest() == 2
    assert bits.equal(store.read(1)["w"], torch.full((3,), 1.0))
    assert store.root(1) == roots[1] != roots[2]
    store.keep_from(1)
    store.drop_after(1)
    assert store.present() == [1]


def test_a_publication_that_was_cut_off_is_not_seen_and_a_damaged_one_refused(
    tmp_path: Path,
) -> None:
    store = Versions(tmp_path)
    store.publish({"w": torch.arange(3000.0)}, 0)
    with disk_full(5000), pytest.raises(DiskError, match=r"version 1.*free some space"):
        store.publish({"w": torch.arange(3000.0)}, 1)
    assert store.present() == [0]
    file = tmp_path / "00000000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not what was published as version 0"):
        store.read(0)
    file.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        store.read(0)


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    kept.save(write, 4)
    with disk_full(9000), pytest.raises(DiskError, match=r"version 6.*the last good one is 4"):
        kept.save(write, 6)
    found = Checkpoints(tmp_path).newest_good()
    assert found is not None
    assert (found.version, found.damaged) == (4, ())
    assert [*tmp_path.iterdir()] == [tmp_path / "00000004"]


def test_the_last_two_are_kept_and_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    assert kept.newest_good() is None
    for version in (2, 4, 6):
        kept.save(write, version)
    assert (kept.present(), kept.oldest()) == ([4, 6], 4)
    state = tmp_path / "00000006" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-4])
    found = kept.newest_good()
    assert found is not None
    assert found.version == 4
    assert "00000006" in found.damaged[0]
    (tmp_path / "00000004" / "about.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint is usable"):
        kept.newest_good()


def test_a_torn_line_of_the_journal_is_dropped_and_the_rest_kept(tmp_path: Path) -> None:
    file = tmp_path / "arrived.jsonl"
    groups = [
        Group(number=n, trajectories=(trajectory(n),), audited=(0,), audit_bits=(1, 2, 3))
        for n in range(3)
    ]
    Journal(file).append(groups)
    assert Journal(file).held() == dict(enumerate(groups))
    file.write_bytes(file.read_bytes()[:-20])
    again = Journal(file)
    assert again.held() == dict(enumerate(groups[:2]))
    again.append([groups[2]])
    again.keep_from(1)
    assert sorted(Journal(file).held()) == [1, 2]


def test_groups_on_their_way_keep_the_version_that_they_started_on(tmp_path: Path) -> None:
    file = tmp_path / "arrived.jsonl"
    journal = Journal(file)
    journal.claim((0, 1), 0)
    journal.claim((2,), 1)
    journal.append([Group(number=1, trajectories=(trajectory(1),))])
    assert journal.claimed() == Journal(file).claimed() == {0: 0, 2: 1}
    journal.keep_from(1)
    again = Journal(file)
    assert (again.claimed(), sorted(again.held())) == ({2: 1}, [1])


ABOUT = {"model": "tiny:qwen3", "plan": "one"}


def config(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate({"recipe": "r", "task": "even", **changes})


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    first = closing(RunFolder(tmp_path, config(), resume=False, about=ABOUT))
    with first, pytest.raises(UsageError, match=r"another run is at work"):
        RunFolder(tmp_path, config(), resume=True, about=ABOUT)
    with pytest.raises(UsageError, match=r"already holds a run.*--resume"):
        RunFolder(tmp_path, config(), resume=False, about=ABOUT)
    RunFolder(tmp_path, config(updates=900), resume=True, about=ABOUT).close()


def test_the_lock_goes_with_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import fcntl, os, sys\n"
        f"handle = os.open({str(tmp_path / 'lock')!r}, os.O_CREAT | os.O_RDWR)\n"
        "fcntl.flock(handle, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(UsageError, match=r"another run"):
            RunFolder(tmp_path, config(), resume=False, about=ABOUT)
        other.kill()
        other.wait(60)
    RunFolder(tmp_path, config(), resume=False, about=ABOUT).close()


def test_resuming_with_other_settings_lists_every_difference(tmp_path: Path) -> None:
    RunFolder(tmp_path, config(lag=2, seed=1), resume=False, about=ABOUT).close()
    other = ABOUT | {"plan": "other"}
    with pytest.raises(UsageError, match=r"lag: 2 -> 3; seed: 1 -> 5; plan: one -> other;"):
        RunFolder(tmp_path, config(lag=3, seed=5), resume=True, about=other)
    RunFolder(tmp_path, config(lag=2, seed=1), resume=True, about=ABOUT).close()
    with pytest.raises(CheckpointError, match=r"holds no run"):
        RunFolder(tmp_path / "nothing", config(), resume=True, about=ABOUT)
