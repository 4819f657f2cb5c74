"""Patches that are admitted or never happened.

    report = propose_patch(repository, diff, run=Path("runs/p1"), purpose="a faster rmsnorm")
    report = apply_patch(Path("runs/p1"), repro=Path("runs/r1/repro.py"), gates=Path("runs/g1"))
    report = revert_patch(Path("runs/p1"))

A patch lives in a git worktree of its own until it is admitted; then it is one commit on one
branch. The user's checkout, index and branches are never touched, so a crash leaves nothing to
repair. ``zm patch propose / apply / revert`` are these functions.
"""

from .patch import apply_patch, propose_patch, read_report, revert_patch
from .records import PatchReport

__all__ = ["PatchReport", "apply_patch", "propose_patch", "read_report", "revert_patch"]
