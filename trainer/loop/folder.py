"""The run folder: one run at a time, one config for life.

    run/config.json  about.json  arrived.jsonl  checkpoints/  versions/  lock

``about.json`` says what the settings only name: model, dtype, task and the plan's digest, so that a
recipe which changed under its name does not continue a run. The lock belongs to the process and
goes with it, however it ends.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from ...kernels.errors import CheckpointError, DiskError, UsageError
from ...kernels.files import replace_whole
from .checkpoint import Checkpoints
from .config import TrainConfig, differences
from .journal import Journal
from .versions import Versions

CONFIG = "config.json"
ABOUT = "about.json"


class RunFolder:
    """See the module. ``resume``: whether the folder must hold a run already, or must not."""

    def __init__(
        self, path: Path, config: TrainConfig, *, resume: bool, about: Mapping[str, str]
    ) -> None:
        self.path = path
        self._lock = _locked(path)
        try:
            self._check(config, resume, about)
            replace_whole(path / ABOUT, json.dumps(dict(about), indent=2) + "\n")
            replace_whole(path / CONFIG, config.model_dump_json(indent=2) + "\n")
            self.versions = Versions(path / "versions")
            self.checkpoints = Checkpoints(path / "checkpoints")
            self.journal = Journal(path / "arrived.jsonl")
        except BaseException:
            self.close()
            raise

    def _check(self, config: TrainConfig, resume: bool, about: Mapping[str, str]) -> None:
        kept = self.path / CONFIG
        if kept.exists() and not resume:
            raise UsageError(
                f"{self.path} already holds a run; continue it with --resume {self.path}, or "
                "choose another folder"
            )
        if not resume:
            return
        settings = differences(read_config(self.path), config)
        kept_about = _read_about(self.path)
        wrong = [
            *settings,
            *(
                f"{name}: {kept_about.get(name)} -> {value}"
                for name, value in about.items()
                if kept_about.get(name) != value
            ),
        ]
        if wrong:
            raise UsageError(
                f"{self.path} was started with other settings: {'; '.join(wrong)}; resume with the "
                "run's own, or start a new one in another folder"
            )

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._lock)


def read_config(path: Path) -> TrainConfig:
    """The settings that a run folder was started with."""
    file = path / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{path} holds no run ({CONFIG} is missing); give a run's folder")
    try:
        return TrainConfig.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error.errors()[0]['msg']}; restore it, or start a new run"
        ) from error


def _read_about(path: Path) -> dict[str, str]:
    file = path / ABOUT
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}; restore it, or start a new run"
        ) from error


def _locked(path: Path) -> int:
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise DiskError(f"cannot write into {path}: {error}; choose another folder") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise UsageError(
            f"another run is at work in {path}; wait for it, or choose another folder"
        ) from error
    return handle
