"""The transcript: append-only JSONL; each line carries the digest of the one before.

    {"n": 3, "kind": "attempted", "elapsed": 4.1, "data": {...}, "prev": "9f..", "digest": "c2.."}

Kinds: ``begin`` (task, budgets, model, tools), ``reply``, ``attempted`` and ``returned`` (each
call, before and after it ran), ``told``, ``verdict`` (of the gates), ``resumed``, ``end``; of
external programs ``stream`` (what they print) and ``exited``. A line is on the disk before what it
announces happens. ``transcript.head`` beside it holds count and digest of the last line, so that a
file that lost its tail is noticed; one torn last line is what a crash leaves, and is dropped.

Secrets are replaced before anything is written. Left out: what the entries mean (``loop.py``).
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels.errors import UsageError
from ...kernels.files import replace_whole

FILE = "transcript.jsonl"
HEAD = "transcript.head"
START = "0" * 32
REDACTED = "[redacted]"
_SECRET = re.compile(
    r"sk-[A-Za-z0-9_-]{16,}|(?<=Bearer )[A-Za-z0-9._~+/-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|hf_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line, checked."""

    n: int
    kind: str
    elapsed: float
    data: dict[str, Any]
    digest: str


class Transcript:
    """An open transcript. secrets: values that may never be written."""

    def __init__(self, folder: Path, secrets: Iterable[str] = ()) -> None:
        self.path = folder / FILE
        self.head = folder / HEAD
        self.secrets = tuple(sorted((s for s in secrets if s), key=len, reverse=True))
        self.count, self.last = 0, START

    @classmethod
    def begin(cls, folder: Path, secrets: Iterable[str] = ()) -> "Transcript":
        """A new one; the folder may not hold another."""
        if (folder / FILE).exists():
            raise UsageError(
                f"{folder / FILE} exists; resume that run, or choose another folder for a new one"
            )
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, secrets)

    @classmethod
    def reopen(cls, folder: Path, secrets: Iterable[str] = ()) -> tuple["Transcript", list[Entry]]:
        """An existing one with its entries, ready for more; a torn last line is cut off."""
        entries, whole = read_entries(folder)
        found = cls(folder, secrets)
        with found.path.open("r+b") as file:
            file.truncate(whole)
        found.count, found.last = len(entries), entries[-1].digest if entries else START
        return found, entries

    def append(self, kind: str, elapsed: float, data: Mapping[str, Any]) -> Entry:
        """Write one line and wait until it is on the disk."""
        clean = json.loads(self._redact(json.dumps(data, ensure_ascii=False, default=str)))
        elapsed = round(elapsed, 3)
        body = {"n": self.count, "kind": kind, "elapsed": elapsed, "data": clean}
        digest = digest_of(self.last, body)
        line = json.dumps({**body, "prev": self.last, "digest": digest}, ensure_ascii=False) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        entry = Entry(n=self.count, kind=kind, elapsed=elapsed, data=clean, digest=digest)
        self.count, self.last = self.count + 1, digest
        replace_whole(self.head, f"{self.count} {digest}\n")
        return entry

    def _redact(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(json.dumps(secret)[1:-1], REDACTED)
        return _SECRET.sub(REDACTED, text)


def digest_of(previous: str, body: Mapping[str, Any]) -> str:
    """BLAKE2b-128 over the digest before and a line's content."""
    text = previous + json.dumps(body, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_transcript(folder: Path) -> list[Entry]:
    """All entries, checked; see :func:`read_entries`."""
    return read_entries(folder)[0]


def read_entries(folder: Path) -> tuple[list[Entry], int]:
    """(entries, bytes of whole lines). UsageError: missing, edited, or cut in half."""
    path = folder / FILE
    if not path.is_file():
        raise UsageError(f"{path} does not exist; give the folder of a run that an agent drove")
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    entries = list(_checked(content[:whole], path))
    promised = _promised(folder / HEAD)
    if len(entries) < promised:
        raise UsageError(
            f"{path} was cut: {len(entries)} of {promised} entries are there, and what happened "
            "after them is unknown; restore the file, or start a new run"
        )
    return entries, whole


def require_open(entries: Sequence[Entry], now: Mapping[str, str], folder: Path) -> None:
    """UsageError where a run cannot go on: it is over, or ``now`` is not what it began with."""
    if not entries or entries[0].kind != "begin":
        raise UsageError(f"the transcript in {folder} has no beginning; start a new run")
    if entries[-1].kind == "end" and entries[-1].data["reason"] != "cancelled":
        raise UsageError(
            f"the run in {folder} is over ({entries[-1].data['reason']}); start a new run in "
            "another folder"
        )
    for name, value in now.items():
        if entries[0].data[name] != value:
            raise UsageError(
                f"the run in {folder} has another {name}; resume it with the one it began with, "
                "or start a new run"
            )


def _checked(content: bytes, path: Path) -> Iterator[Entry]:
    previous = START
    lines = content.decode("utf-8", errors="replace").split("\n")[:-1]
    for n, line in enumerate(lines):
        try:
            found = json.loads(line)
            body = {key: found[key] for key in ("n", "kind", "elapsed", "data")}
            digest, prev = found["digest"], found["prev"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path} line {n + 1} cannot be read; restore the file, or start a new run"
            ) from error
        if body["n"] != n or prev != previous or digest != digest_of(previous, body):
            raise UsageError(
                f"{path} line {n + 1} was edited or moved: its digest does not follow from the "
                "line before; restore the file, or start a new run"
            )
        previous = digest
        yield Entry(digest=digest, **body)


def _promised(head: Path) -> int:
    text = head.read_text().split() if head.is_file() else []
    return int(text[0]) if text and text[0].isdecimal() else 0
