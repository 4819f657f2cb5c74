"""Groups on their way and groups that arrived, on disk at once: a killed run loses none of them.

One JSON document a line, with a checksum before it. A group on its way is kept as its number and
the version it started on: with the seed that is all its responses depend on, so a resumed run draws
them again in the same bits. A line that a kill cut short is dropped: its groups are generated
again. When a checkpoint makes groups superfluous the file is written anew.

    journal = Journal(folder / "arrived.jsonl")
    journal.claim((4, 5), version=1); journal.claimed()      # {4: 1, 5: 1}
    journal.append([group]); journal.held()
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Sequence
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
        self._held, self._claimed = _read(file)
        self._write_anew()

    def held(self) -> dict[int, Group]:
        """Arrived groups by number."""
        return dict(self._held)

    def claimed(self) -> dict[int, int]:
        """The version that each group started on that has not arrived."""
        return {n: version for n, version in self._claimed.items() if n not in self._held}

    def claim(self, numbers: Sequence[int], version: int) -> None:
        """Keep that these groups start on ``version``; on disk when this returns."""
        with self._lock:
            self._add([_claim_line(numbers, version)])
            self._claimed |= dict.fromkeys(numbers, version)

    def append(self, groups: Iterable[Group]) -> None:
        """Keep these; they are on disk when this returns."""
        with self._lock:
            fresh = {group.number: group for group in groups}
            self._add([_line(group) for group in fresh.values()])
            self._held |= fresh

    def keep_from(self, number: int) -> None:
        """Forget groups below ``number``."""
        with self._lock:
            self._held = {n: group for n, group in self._held.items() if n >= number}
            self._claimed = {n: v for n, v in self.claimed().items() if n >= number}
            self._write_anew()

    def _add(self, lines: Iterable[str]) -> None:
        try:
            with self.file.open("a", encoding="utf-8") as opened:
                opened.writelines(lines)
                opened.flush()
                os.fsync(opened.fileno())
        except OSError as error:
            raise DiskError(
                f"cannot write to {self.file}: {error}; free some space, then resume"
            ) from error

    def _write_anew(self) -> None:
        lines = [_claim_line((number,), version) for number, version in self.claimed().items()]
        lines += [_line(self._held[number]) for number in sorted(self._held)]
        try:
            replace_whole(self.file, "".join(lines))
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
        },
        separators=(",", ":"),  # encoded beside the learner, in its interpreter
    )
    return f"{_checksum(text)} {text}\n"


def _claim_line(numbers: Sequence[int], version: int) -> str:
    text = json.dumps({"claimed": list(numbers), "version": version})
    return f"{_checksum(text)} {text}\n"


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _read(file: Path) -> tuple[dict[int, Group], dict[int, int]]:
    """Arrived groups and versions of claimed ones: whole lines up to the first that is not."""
    held: dict[int, Group] = {}
    claimed: dict[int, int] = {}
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    for line in text.splitlines():
        checksum, _, document = line.partition(" ")
        if _checksum(document) != checksum:
            break
        values: dict[str, Any] = json.loads(document)
        if "claimed" in values:
            claimed |= dict.fromkeys(values["claimed"], values["version"])
        else:
            held[values["number"]] = Group(
                number=values["number"],
                trajectories=tuple(from_json(each) for each in values["trajectories"]),
                audited=tuple(values["audited"]),
                audit_bits=tuple(values["audit_bits"]),
            )
    return held, claimed
