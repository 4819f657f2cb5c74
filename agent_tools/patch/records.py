"""What the patch commands hand back.

    proposal = propose_patch(repository, diff, run=run, purpose="serve rmsnorm faster")
    report = apply_patch(run, repro=..., gates=...)       # admitted, or nothing happened
    revert_patch(run)

A run is a folder (``runs/<id>/``): the patch, the proposal, the journal and the verdict live there.
"""

from typing import Literal

from pydantic import Field

from ..records import Record

PatchStatus = Literal["proposed", "waiting", "admitted", "refused", "reverted"]
"""``waiting``: every condition is met but a person's tick for a new contract."""
EXIT_CODES: dict[PatchStatus, int] = {
    "proposed": 0, "waiting": 3, "admitted": 0, "refused": 1, "reverted": 0,
}  # fmt: skip


class Refusal(Record):
    """One reason why a patch is not admitted.

    Refusal(rule="denied-file", detail="kernels/bits.py is the comparer", path="kernels/bits.py")
    """

    rule: str
    """Id of a rule in :data:`.policy.RULES`."""
    detail: str
    path: str | None = None


class ChangedFile(Record):
    """One file of a patch."""

    path: str
    change: Literal["added", "modified", "deleted"]
    added: int
    """Lines."""
    removed: int


class Check(Record):
    """One condition of admission, as it was found in the worktree."""

    name: Literal["repro-before", "repro-after", "verify", "contracts", "regress", "review"]
    status: Literal["pass", "fail", "not-applicable", "not-run"]
    detail: str
    command: str | None = None
    """What repeats it."""


class PatchReport(Record):
    """Where one patch stands."""

    schema_version: Literal[1] = 1
    kind: Literal["patch"] = "patch"
    status: PatchStatus
    reason: str
    """One sentence; it ends with the next step where there is one."""
    run: str
    """The run's folder."""
    purpose: str = ""
    base: str
    """Commit that the patch applies to."""
    digest: str
    """BLAKE2b-128 of the diff."""
    files: tuple[ChangedFile, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    checks: tuple[Check, ...] = ()
    branch: str | None = None
    """Branch that holds the admitted commit; None until then. Nothing is merged or pushed."""
    commit: str | None = None
    needs_review: tuple[str, ...] = ()
    """New contract ids and other decisions that wait for a person."""
    seconds: float = Field(default=0.0, ge=0)

    @property
    def exit_code(self) -> int:
        """What ``zm patch`` returns."""
        return EXIT_CODES[self.status]
