"""What ``codex`` has used so far, from its own log of the session, while it runs.

    log = CodexLog()
    log.news("0199a213-...")    # {"usage": {...}, "steps": 7, "log": "..."}, or None

``codex exec --json`` tells usage once, when it ends. Its log, which ``codex exec resume`` reads
too, gets the thread's sum after every answer of the model: below ``$CODEX_HOME`` (``~/.codex``), in
``sessions/YYYY/MM/DD/rollout-*-ID.jsonl``, lines ``event_msg`` with a ``token_count``. A sum that
is told again is no new step. The log is written a moment later, so a limit may be passed by a step.
"""

import json
import os
from pathlib import Path
from typing import Any


class CodexLog:
    """See the module. The log is found by the session's name, once there is one."""

    def __init__(self) -> None:
        home = os.environ.get("CODEX_HOME")
        self.home = Path(home) if home else Path.home() / ".codex"
        self.path: Path | None = None
        self._read = 0
        self._steps = 0
        self._last: object = None

    def news(self, session: str) -> dict[str, Any] | None:
        """The thread's usage and steps, where the log tells more than at the last call."""
        if self.path is None and session:
            found = self.home.glob(f"sessions/*/*/*/rollout-*-{session}.jsonl")
            self.path = max(found, default=None)
        if self.path is None:
            return None
        known = self._steps
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError:
            return None  # no news; what needs some ends the run
        whole = text.rfind(b"\n") + 1
        self._read += whole
        for line in text[:whole].splitlines():
            total = _total(line) if b'"token_count"' in line else None
            if total is not None and total != self._last:
                self._last, self._steps = total, self._steps + 1
        if self._steps == known:
            return None
        return {"usage": self._last, "steps": self._steps, "log": str(self.path)}


def _total(line: bytes) -> dict[str, Any] | None:
    """The sum in one line of the log, if it holds one."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    for name in ("payload", "info", "total_token_usage"):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None
