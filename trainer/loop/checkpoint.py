"""Checkpoints of the learner: whole or absent, the last two kept.

    checkpoints = Checkpoints(folder)
    checkpoints.save(learner.save, version=10)
    found = checkpoints.newest_good()          # the newest that is undamaged, or None
    learner.restore(found.folder, found.version)

What is in one is the learner's business (one safetensors file; ``torch.distributed.checkpoint``
where it is sharded); every file's digest lies beside it. Together with the journal of arrived
groups and the published versions this is all of a run: prompts, noise and audits depend on the seed
and on numbers alone, so no random state is kept.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from ...kernels.errors import CheckpointError, DiskError
from ...model_recipes.schema import file_digest

KEPT = 2
ABOUT = "about.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint. damaged: newer ones that could not be used, and why."""

    folder: Path
    version: int
    damaged: tuple[str, ...] = ()


class Checkpoints:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, write: Callable[[Path], None], version: int) -> None:
        """Let ``write`` fill a folder, then rename it; all but the last two checkpoints go.

        DiskError leaves the last good one as it was.
        """
        part, final = self.folder / f".{version:08d}.part", self.folder / f"{version:08d}"
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            write(part)
            files = {file.name: file_digest(file) for file in sorted(part.iterdir())}
            about = {"version": version, "files": files}
            (part / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")
            for file in (*part.iterdir(), part):
                _to_disk(file)
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
            _to_disk(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise DiskError(
                f"cannot write the checkpoint of version {version} into {self.folder}: {error}; "
                f"the last good one is {self.newest()}: free some space, then resume"
            ) from error
        for old in self.present()[:-KEPT]:
            with contextlib.suppress(OSError):
                shutil.rmtree(self.folder / f"{old:08d}")

    def newest_good(self) -> Found | None:
        """The newest undamaged checkpoint; None if there never was one."""
        damaged: list[str] = []
        for version in reversed(self.present()):
            folder = self.folder / f"{version:08d}"
            fault = _fault(folder, version)
            if fault is None:
                return Found(folder=folder, version=version, damaged=tuple(damaged))
            damaged.append(f"{folder}: {fault}")
        if damaged:
            raise CheckpointError(
                "no checkpoint is usable (" + "; ".join(damaged) + "); restore one from a copy, or "
                "start again in another folder"
            )
        return None

    def present(self) -> list[int]:
        """Versions that have a checkpoint, ascending."""
        return sorted(int(entry.name) for entry in self.folder.glob("[0-9]*"))

    def newest(self) -> int | None:
        """The last version that has one."""
        present = self.present()
        return present[-1] if present else None

    def oldest(self) -> int:
        """The first version that a resumed run may start from."""
        present = self.present()
        return present[0] if len(present) == KEPT else 0


def _fault(folder: Path, version: int) -> str | None:
    """What is wrong with a checkpoint, if anything."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if about["version"] != version:
            return f"it says version {about['version']}"
        for name, digest in about["files"].items():
            if file_digest(folder / name) != digest:
                return f"{name} is not what was saved"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
