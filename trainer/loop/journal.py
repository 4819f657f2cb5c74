"""Groups that arrived, on disk at once, so that a killed run loses none of them.

One JSON document a line, with a checksum before it. A line that a kill cut short is dropped: its
groups are generated again. When a checkpoint makes groups superfluous the file is written anew.

    journal = Journal(folder / "arrived.jsonl")
    journal.append([group]); journal.held()
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...kernels.errors import DiskError
from ...kernels.files import replace_whole
from .audit import Group
from .trajectories import from_json, to_json


class Journal:
    """See the module. Several threads may append."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._held = {group.number: group for group in _read(file)}
        self._write_anew()

    def held(self) -> dict[int, Group]:
        """Arrived groups by number."""
        return dict(self._held)

    def append(self, groups: Iterable[Group]) -> None:
        """Keep these; they are on disk when this returns."""
        with self._lock:
            fresh = {group.number: group for group in groups}
            try:
                with self.file.open("a", encoding="utf-8") as opened:
                    opened.writelines(_line(group) for group in fresh.values())
                    opened.flush()
                    os.fsync(opened.fileno())
            except OSError as error:
                raise DiskError(
                    f"cannot write to {self.file}: {error}; free some space, then resume"
                ) from error
            self._held |= fresh

    def keep_from(self, number: int) -> None:
        """Forget groups below ``number``."""
        with self._lock:
            self._held = {n: group for n, group in self._held.items() if n >= number}
            self._write_anew()

    def _write_anew(self) -> None:
        lines = "".join(_line(self._held[number]) for number in sorted(self._held))
        try:
            replace_whole(self.file, lines)
        except OSError as error:
            raise DiskError(
                f"cannot write {self.file}: {error}; free some space, then resume"
            ) from error


def _line(group: Group) -> str:
    text = json.dumps(
        {
            "number": group.number,
            "trajectories": [to_json(each) for each in group.trajectories],
            "audited": group.audited,
            "audit_bits": group.audit_bits,
        }
    )
    return f"{_checksum(text)} {text}\n"


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _read(file: Path) -> Iterable[Group]:
    """Whole lines up to the first that is not."""
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        checksum, _, text = line.partition(" ")
        if _checksum(text) != checksum:
            return
        values: dict[str, Any] = json.loads(text)
        yield Group(
            number=values["number"],
            trajectories=tuple(from_json(each) for each in values["trajectories"]),
            audited=tuple(values["audited"]),
            audit_bits=tuple(values["audit_bits"]),
        )
