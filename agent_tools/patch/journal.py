"""What a run has attempted and what it has done: one JSON line each, written before and after.

    journal = Journal(run); journal.note("worktree", state="attempted"); journal.last("branch")

The journal says what there may be to undo; whether it is there is asked of git.
"""

import json
import os
from pathlib import Path
from typing import Any

FILE = "journal.jsonl"


class Journal:
    """Append-only, flushed to disk at every line."""

    def __init__(self, run: Path) -> None:
        self.file = run / FILE

    def note(self, step: str, **details: Any) -> None:
        """Write one line; a crash leaves at most half of the last one."""
        line = json.dumps({"step": step, **details}) + "\n"
        handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
            os.fsync(handle)
        finally:
            os.close(handle)

    def lines(self) -> list[dict[str, Any]]:
        """All whole lines."""
        if not self.file.is_file():
            return []
        found: list[dict[str, Any]] = []
        for line in self.file.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # the last line of a crash
        return found

    def last(self, step: str) -> dict[str, Any] | None:
        """The latest line of a step."""
        return next((line for line in reversed(self.lines()) if line["step"] == step), None)
