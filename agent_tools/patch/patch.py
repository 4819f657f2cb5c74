"""``zm patch`` as three functions; see the package's docstring.

The order in :func:`apply_patch` is the promise: everything is tried in the run's worktree, and the
one step that the repository keeps is the last, a single reference update. Whatever ends the process
before it leaves a worktree that the next command of the run removes.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...kernels.errors import MisalignedError, UsageError, ZeroMismatchError
from ...kernels.files import replace_whole
from ..gates import read_gates
from ..verify import verify_kernel
from . import policy
from .journal import Journal
from .kernels import kernels_of, operators_of
from .records import Check, PatchReport, Refusal
from .repository import Repository, locked
from .reviews import Reviews
from .trial import FASTER, Trial, faster, reference_files

Progress = Callable[[str], None]
DIFF, REPORT, TREE, ADMITTED = "patch.diff", "patch.json", "worktree", "admitted.json"


def propose_patch(
    repository: Path, diff: str, *, run: Path, purpose: str = "", base: str = "HEAD"
) -> PatchReport:
    """Check a unified diff against the allow- and deny-lists and store it in ``run``.

    Nothing is checked out. The report is ``refused`` with every reason, or ``proposed``. UsageError
    for a folder that holds a proposal already, or that is in no git repository.
    """
    began = time.monotonic()
    repo = Repository(repository)
    run = run.absolute()
    with locked(run):
        if (run / REPORT).exists():
            raise UsageError(f"{run.name} holds a patch already; propose it as another run")
        commit = repo.commit_of(base)
        refusals = policy.text_refusals(diff)
        files: tuple[policy.ChangedFile, ...] = ()
        if not refusals:
            try:
                changes, lines = repo.tried(commit, diff)
            except UsageError as error:
                refusals = [Refusal(rule="malformed", detail=str(error))]
            else:
                files = policy.changed_files(changes, lines)
                refusals = policy.judge(changes, reference_files())
                if not changes:
                    refusals = [Refusal(rule="empty", detail="the diff changes nothing")]
        report = PatchReport(
            status="refused" if refusals else "proposed",
            reason=_refused(refusals) if refusals else "allowed; try it: `zm patch apply`",
            run=run.name,
            purpose=purpose[:200],
            base=commit,
            digest=_digest(diff),
            files=files,
            refusals=tuple(refusals),
            seconds=round(time.monotonic() - began, 3),
        )
        replace_whole(run / DIFF, diff)
        replace_whole(run / "repository", str(repo.root))
        return _stored(run, report)


def apply_patch(
    run: Path,
    *,
    repro: Path | None = None,
    kernels: Sequence[tuple[str, str]] = (),
    gates: Path | None = None,
    reviewed: Collection[str] = (),
    quick: bool = False,
    progress: Progress = lambda stage: None,
) -> PatchReport:
    """Try the proposed patch in its worktree; admit it as one commit on a branch, or undo it.

    repro: a repro script that must turn from mismatch (1) to equal (0). kernels: (file in the
    patch, contract id) pairs for the verifier; by default those that the patch's recipes name.
    gates: a gates.json whose green gates must stay green. reviewed: new contract ids, and files of
    the project's own code, that a person ticked; without it the report is ``waiting`` and nothing
    is kept. quick: short verification and sweeps.
    """
    began = time.monotonic()
    run = run.absolute()
    with locked(run):
        report, diff, repo = _proposed(run)
        asked = _Asked(
            repro=repro, kernels=tuple(kernels), gates=gates, reviewed=frozenset(reviewed),
            quick=quick,
        )  # fmt: skip
        if asked.gates is not None:
            read_gates(asked.gates)  # an edited report ends here
        journal, tree = Journal(run), run / TREE
        _clean(repo, run)
        try:
            journal.note("worktree", path=str(tree), base=report.base)
            repo.add_worktree(tree, report.base)
            attempt = _Attempt(
                repo=repo, run=run, tree=tree, diff=diff, report=report, asked=asked,
                trial=Trial(run=run, tree=tree, progress=progress), journal=journal,
                reviews=Reviews(repo=repo, tree=tree, reviewed=asked.reviewed),
            )  # fmt: skip
            report = attempt.decide()
        finally:
            _clean(repo, run)
            journal.note("removed", path=str(tree))
        report = report.model_copy(update={"seconds": round(time.monotonic() - began, 3)})
        return _stored(run, report)


def revert_patch(run: Path) -> PatchReport:
    """Remove the patch's branch and worktree, whatever state a crash left them in.

    MisalignedError where somebody committed on the branch since: that is theirs to keep.
    """
    run = run.absolute()
    with locked(run):
        report, _, repo = _read(run)
        journal = Journal(run)
        branch = journal.last("branch")
        if branch is not None:
            held = repo.branch_exists(branch["name"])
            if held not in (None, branch["commit"]):
                raise MisalignedError(
                    f"branch {branch['name']} has moved on to {held}; keep or delete it yourself"
                )
            if held is not None:
                repo.delete_branch(branch["name"], branch["commit"])
                journal.note("deleted", name=branch["name"], commit=held)
        _clean(repo, run)
        changed = {
            "status": "reverted", "reason": "its branch and worktree are gone", "branch": None,
            "commit": None,
        }  # fmt: skip
        return _stored(run, report.model_copy(update=changed))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    repro: Path | None
    kernels: tuple[tuple[str, str], ...]
    gates: Path | None
    reviewed: frozenset[str]
    quick: bool


class _RefusedError(Exception):
    """A condition of admission is not met."""

    def __init__(self, rule: str, detail: str, path: str | None = None) -> None:
        super().__init__(detail)
        self.refusal = Refusal(rule=rule, detail=detail, path=path)


@dataclass(slots=True, kw_only=True)
class _Attempt:
    repo: Repository
    run: Path
    tree: Path
    diff: str
    report: PatchReport
    asked: _Asked
    trial: Trial
    journal: Journal
    reviews: Reviews
    checks: list[Check] = field(default_factory=list[Check])
    fast: bool = False

    def decide(self) -> PatchReport:
        """Every condition in turn; the first that fails refuses the patch."""
        try:
            self._try()
        except _RefusedError as refused:
            refusals = (refused.refusal,)
        except ZeroMismatchError as error:
            refusals = (Refusal(rule="malformed", detail=str(error)),)
        else:
            return self._wait() if self.reviews.waiting else self._admit()
        return self._report("refused", _refused(refusals), refusals=refusals)

    def _try(self) -> None:
        self.trial.prepare()
        if self.asked.gates is None:
            raise _RefusedError("gates", "no gate report; make one: `zm gate MODEL --out DIR`")
        self._repro_before()
        code = any(entry.path.startswith("kernels/") for entry in self.report.files)
        before = self.trial.contracts("before") if code else None
        self.journal.note("applying")
        changes = self.repo.apply(self.tree, self.diff)
        refusals = policy.judge(changes, reference_files())
        if refusals:
            raise _RefusedError(refusals[0].rule, refusals[0].detail, refusals[0].path)
        paths = [change.path for change in changes]
        self._verify(paths)
        if before is not None:
            self._contracts(before)
            self._certify(paths)
            self.reviews.ask_for_code([path for path in paths if path.startswith("kernels/")])
        self._repro_after()
        if self.asked.repro is None and not self.fast:
            detail = f"without a repro, a kernel must be {FASTER} times as fast as what it replaces"
            raise _RefusedError("no-gain", detail)
        self._regress(self.asked.gates)
        self.reviews.forget()
        touched = self.repo.dirty(self.tree)
        if touched:
            raise _RefusedError("outside", "something wrote into the worktree", touched[0])

    def _check(self, name: str, good: bool, detail: str, command: str | None = None) -> None:
        status = "pass" if good else "fail"
        self.checks.append(
            Check(name=name, status=status, detail=detail, command=command)  # type: ignore[arg-type]
        )

    def _repro_before(self) -> None:
        if self.asked.repro is None:
            return
        code = self.trial.repro(self.asked.repro, "repro-before")
        self._check("repro-before", code == 1, f"exit code {code}, 1 is a mismatch")
        if code != 1:
            raise _RefusedError("repro", f"the repro gives {code} before the patch, not 1")

    def _repro_after(self) -> None:
        if self.asked.repro is None:
            return
        code = self.trial.repro(self.asked.repro, "repro-after")
        self._check("repro-after", code == 0, f"exit code {code}, 0 is equal")
        if code != 0:
            raise _RefusedError("repro", f"the repro gives {code} after the patch, not 0")

    def _verify(self, paths: Sequence[str]) -> None:
        found, refusals = kernels_of(self.tree, paths, self.asked.kernels)
        if refusals:
            raise _RefusedError(refusals[0].rule, refusals[0].detail, refusals[0].path)
        for each in found:
            path, contract = each.path, each.contract
            if path not in paths:
                raise _RefusedError("kernel", "the patch does not change this file", path)
            self.trial.progress(f"verifying {path}")
            verdict = verify_kernel(
                self.tree / path, contract, model=each.model, quick=self.asked.quick
            )
            text = verdict.model_dump_json(indent=2) + "\n"
            replace_whole(self.run / f"verify-{Path(path).name}.json", text)
            good = verdict.status in ("pass", "needs-review")
            took = f"{'quick' if verdict.quick else 'whole'}, {verdict.seconds:.0f} s"
            self._check("verify", good, f"{path}: {verdict.reason} ({took})", f"zm verify {path}")
            if not good:
                raise _RefusedError("verify", verdict.reason, path)
            self.fast = self.fast or faster(verdict)
            if verdict.status == "needs-review":
                self.reviews.ask(each, verdict)

    def _contracts(self, before: dict[str, dict[str, object]]) -> None:
        after = self.trial.contracts("after")
        changed = [name for name, entry in before.items() if after.get(name) != entry]
        new = sorted(set(after) - set(before) - self.asked.reviewed)
        self._check("contracts", not changed, f"{len(before)} contracts, {len(changed)} changed")
        if changed:
            raise _RefusedError("contracts", f"contract {changed[0]} is no longer what it was")
        if new:
            self.reviews.told.append(f"new contract {new[0]}")
            raise _RefusedError("review", f"new contract {new[0]} waits for a person's tick")

    def _certify(self, paths: Sequence[str]) -> None:
        touched = operators_of(paths)
        if not touched:
            return
        code, said = self.trial.certify(touched)
        self._check("verify", code == 0, f"certifying sweep of {len(touched)} contracts: {said}")
        if code != 0:
            raise _RefusedError("verify", f"an implementation is refused by the sweep: {said}")

    def _regress(self, gates: Path) -> None:
        code, reason, command = self.trial.regress(gates)
        self._check("regress", code == 0, reason, command)
        if code != 0:
            raise _RefusedError("regress", reason)

    def _wait(self) -> PatchReport:
        """Everything is green, and a person decides."""
        waiting = self.reviews.waiting
        ids = ", ".join(waiting)
        reason = (
            f"every condition is met but one: {ids} waits for a person's tick; read the change, "
            f"then repeat `zm patch apply` with --reviewed {' --reviewed '.join(waiting)}"
        )
        self.checks.append(Check(name="review", status="not-run", detail=f"{ids} is not ticked"))
        return self._report("waiting", reason)

    def _admit(self) -> PatchReport:
        """One commit in the worktree, then one reference update: the only lasting step."""
        branch = f"zero-mismatch/{self.run.name}"
        subject = self.report.purpose.splitlines()[0] if self.report.purpose else self.run.name
        commit = self.repo.commit(self.tree, f"{subject}\n\nAssisted-by: zero-mismatch")
        reason = f"every condition is met; review and merge {branch}"
        admitted = self._report("admitted", reason)
        admitted = admitted.model_copy(update={"branch": branch, "commit": commit})
        replace_whole(self.run / ADMITTED, admitted.model_dump_json(indent=2) + "\n")
        self.journal.note("branch", name=branch, commit=commit)
        self.repo.make_branch(branch, commit)
        self.journal.note("admitted", name=branch, commit=commit)
        return admitted

    def _report(
        self, status: str, reason: str, refusals: tuple[Refusal, ...] = ()
    ) -> PatchReport:
        changed = {
            "status": status, "reason": reason, "refusals": refusals,
            "checks": tuple(self.checks), "needs_review": tuple(self.reviews.told),
        }  # fmt: skip
        return self.report.model_copy(update=changed)


def read_report(run: Path) -> PatchReport:
    """Where the patch of a run stands."""
    return _read(run)[0]


def _read(run: Path) -> tuple[PatchReport, str, Repository]:
    try:
        report = PatchReport.model_validate_json((run / REPORT).read_text())
        diff, root = (run / DIFF).read_text(), (run / "repository").read_text()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{run.name} holds no patch ({type(error).__name__}); make one: `zm patch propose`"
        ) from error
    repo = Repository(Path(root))
    return _settled(run, report, repo), diff, repo


def _settled(run: Path, report: PatchReport, repo: Repository) -> PatchReport:
    """The report, or the one that a crash kept from being stored: the branch decides."""
    if report.status in ("proposed", "waiting") and (run / ADMITTED).is_file():
        admitted = PatchReport.model_validate_json((run / ADMITTED).read_text())
        if admitted.branch and repo.branch_exists(admitted.branch) == admitted.commit:
            return _stored(run, admitted)
    return report


def _proposed(run: Path) -> tuple[PatchReport, str, Repository]:
    report, diff, repo = _read(run)
    if report.status not in ("proposed", "waiting", "refused") or policy.text_refusals(diff):
        raise UsageError(f"{run.name} is {report.status}; propose the patch again as another run")
    if _digest(diff) != report.digest:
        raise UsageError(f"{run / DIFF} was edited since it was proposed; propose it again")
    if report.status == "refused" and not report.checks:
        raise UsageError(f"{run.name} was refused: {report.reason}; propose another patch")
    return report, diff, repo


def _clean(repo: Repository, run: Path) -> None:
    """Remove what an attempt leaves on disk; its reports and its journal stay."""
    if (run / TREE).exists() or Journal(run).last("worktree") is not None:
        repo.remove_worktree(run / TREE)
    for name in ("tmp", "cache"):
        shutil.rmtree(run / name, ignore_errors=True)


def _refused(refusals: Sequence[Refusal]) -> str:
    first = refusals[0]
    place = f"{first.path}: " if first.path else ""
    return f"refused by rule {first.rule}: {place}{first.detail}"


def _digest(diff: str) -> str:
    return hashlib.blake2b(diff.encode(), digest_size=16).hexdigest()


def _stored(run: Path, report: PatchReport) -> PatchReport:
    replace_whole(run / REPORT, report.model_dump_json(indent=2) + "\n")
    return report
