"""``zm patch`` as three functions; see the package's docstring."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from .records import PatchReport

Progress = Callable[[str], None]


def propose_patch(
    repository: Path, diff: str, *, run: Path, purpose: str = "", base: str = "HEAD"
) -> PatchReport:
    """Check a unified diff against the allow- and deny-lists and store it in ``run``."""
    raise NotImplementedError


def apply_patch(
    run: Path,
    *,
    repro: Path | None = None,
    kernels: Sequence[tuple[str, str]] = (),
    gates: Path | None = None,
    reviewed: Collection[str] = (),
    progress: Progress = lambda stage: None,
) -> PatchReport:
    """Try the proposed patch in its worktree; admit it as one commit on a branch, or undo it.

    repro: a repro script that must turn from mismatch (1) to equal (0). kernels: (file in the
    patch, contract id) pairs for the verifier; by default those that the patch's recipes name.
    gates: a gates.json whose green gates must stay green. reviewed: new contract ids that a
    person ticked.
    """
    raise NotImplementedError


def revert_patch(run: Path) -> PatchReport:
    """Remove the patch's branch and worktree, whatever state a crash left them in."""
    raise NotImplementedError
