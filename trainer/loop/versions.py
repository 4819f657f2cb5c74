"""Published weights: one file per version in the run folder, complete or absent.

    store.publish(weights, version=3)       # written aside, then renamed: nobody sees half of it
    weights = store.read(3)
    store.newest()                          # 3

Workers, other processes included, find versions here. The file carries the digest of all tensors,
which is checked against what was read; a publication that was cut off leaves a file nobody looks
at. Versions that nobody needs any more are deleted by :meth:`Versions.keep_from`.

Where the learner also keeps its last versions in a GPU's memory (:mod:`..publication.shelf`), a
reader on that machine copies them from there; the bits are the same, and are compared.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...kernels.errors import CheckpointError, DiskError
from ...model_recipes.state import digests_of, weights_root
from ..publication.flat import write
from ..publication.shelf import Shelved, remove_cards, shelved

SUFFIX = ".safetensors"


class Versions:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def publish(
        self, weights: Mapping[str, Tensor], version: int, *, root: str | None = None
    ) -> str:
        """Write a version; returns the digest over all tensors. root: that, where it is known."""
        root = root or digest(weights)
        plain = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
        about = {"version": str(version), "root": root}
        self._whole(version, lambda part: save_file(plain, part, about))
        return root

    def publish_flat(self, put: Shelved, flat: Tensor) -> None:
        """Write a version of the shelf; flat: its slot's bytes, in the processor's memory."""
        about = {"version": str(put.card.version), "root": put.card.root}
        self._whole(put.card.version, lambda part: write(part, put.layout, flat, about))

    def _whole(self, version: int, save: Callable[[Path], None]) -> None:
        """Written aside, then renamed."""
        part = self.folder / f".{version:08d}.part"
        try:
            save(part)
            part.replace(self._file(version))
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise DiskError(
                f"cannot write version {version} into {self.folder}: {error}; free some space, "
                "then resume"
            ) from error

    def shelved(self, version: int, device: torch.device) -> Shelved | None:
        """The version in the learner's memory, where that is memory of this kind and readable."""
        found = shelved(self.folder, version)
        return found if found is not None and found.flat.device.type == device.type else None

    def read(self, version: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The weights of a version on ``device``, checked there against their digest."""
        there = self.shelved(version, torch.device(device))
        copied = None if there is None else _copied(there, torch.device(device))
        if copied is not None:
            return copied
        file = self._file(version)
        try:
            with safe_open(file, framework="pt") as opened:
                about = opened.metadata()
                names = opened.keys()
                weights = {name: opened.get_tensor(name).to(device) for name in names}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"version {version} cannot be read from {file}: {error}; resume the run, which "
                "publishes it again"
            ) from error
        if about.get("root") != digest(weights):
            raise CheckpointError(
                f"{file} is not what was published as version {version}; delete it and resume"
            )
        return weights

    def root(self, version: int) -> str:
        """The digest that a version was published with."""
        with safe_open(self._file(version), framework="pt") as opened:
            return opened.metadata()["root"]

    def present(self) -> list[int]:
        """Versions that are here, ascending."""
        return sorted(int(file.stem) for file in self.folder.glob(f"[0-9]*{SUFFIX}"))

    def newest(self) -> int:
        """The last published version."""
        return self.present()[-1]

    def keep_from(self, oldest: int) -> None:
        """Delete versions below ``oldest``."""
        for version in self.present():
            if version < oldest:
                self._file(version).unlink(missing_ok=True)

    def drop_after(self, version: int) -> None:
        """Delete versions above ``version``: a resumed run publishes them again."""
        remove_cards(self.folder)
        for each in self.present():
            if each > version:
                self._file(each).unlink(missing_ok=True)

    def _file(self, version: int) -> Path:
        return self.folder / f"{version:08d}{SUFFIX}"


def digest(weights: Mapping[str, Tensor]) -> str:
    """One digest over all tensors, as the engines compute it of what is installed."""
    return weights_root(digests_of(weights))


def _copied(there: Shelved, device: torch.device) -> dict[str, Tensor] | None:
    """A copy of a version on the shelf; None where its slot was used again meanwhile."""
    weights = there.layout.views(there.flat.to(device, copy=True))
    if digests_of(weights) == there.card.digests:
        return weights
    if there.is_gone():
        return None
    raise CheckpointError(
        f"version {there.card.version} has other bits in the learner's memory than {there.file} "
        "announces; resume the run, and report this if it happens again"
    )
