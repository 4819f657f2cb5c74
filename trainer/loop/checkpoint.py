"""Checkpoints of the learner: whole or absent, the last two kept.

    checkpoints = Checkpoints(folder)
    checkpoints.save(learner.state(), version=10)
    found = checkpoints.load()          # the newest that is undamaged, or None

Together with the journal of arrived groups and the published versions this is all of a run:
prompts, noise and audits depend on the seed and on numbers alone, so no random state is kept.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...kernels.errors import CheckpointError, DiskError
from .versions import digest

KEPT = 2
STATE, ABOUT = "state.safetensors", "about.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A learner's state at a version. damaged: newer checkpoints that could not be used."""

    state: dict[str, Tensor]
    version: int
    damaged: tuple[str, ...] = ()


class Checkpoints:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, state: Mapping[str, Tensor], version: int) -> None:
        """Write, then rename; older ones than the last two go. DiskError leaves the last good."""
        part, final = self.folder / f".{version:08d}.part", self.folder / f"{version:08d}"
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            plain = {name: tensor.detach().contiguous() for name, tensor in state.items()}
            save_file(_untied(plain), part / STATE)
            about = {"version": version, "root": digest(plain)}
            (part / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")
            for file in (part / STATE, part / ABOUT, part):
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

    def load(self) -> Checkpoint | None:
        """The newest undamaged checkpoint; None if there never was one."""
        damaged: list[str] = []
        for version in reversed(self.present()):
            folder = self.folder / f"{version:08d}"
            try:
                about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
                state = load_file(folder / STATE)
                if about != {"version": version, "root": digest(state)}:
                    raise CheckpointError(f"{folder} is not what was saved")
            except (OSError, ValueError, SafetensorError) as error:
                damaged.append(f"{folder}: {error}")
                continue
            return Checkpoint(state=state, version=version, damaged=tuple(damaged))
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


def _untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses two names for one storage (an fp32 weight is its own master)."""
    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = tensor.data_ptr()
        plain[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return plain


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
