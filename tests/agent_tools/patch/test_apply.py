"""Admitted as one commit on a branch, or as if it had never been there, whatever happens."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zeromismatch.agent_tools.gates import GATES, run_gates
from zeromismatch.agent_tools.patch import apply_patch, propose_patch, revert_patch
from zeromismatch.agent_tools.patch.journal import Journal
from zeromismatch.agent_tools.patch.records import PatchReport
from zeromismatch.agent_tools.patch.trial import FASTER
from zeromismatch.kernels import certify, dispatch
from zeromismatch.kernels.errors import MisalignedError
from zeromismatch.model_recipes.models import load_model

from .conftest import FILES, diff_of, git, make_repository, restore, seen

NOTES = "model_recipes/org/model/NOTES.md"
KERNEL = "model_recipes/org/model/kernels/norm.py"
CONTRACT = "rmsnorm.lanes16.float32.cpu.v1"
GRADIENT = "rmsnorm_grad.lanes16.float32.cpu.v1"
CANDIDATE = Path(__file__).parents[1] / "verify" / "candidates" / "norm.py"
REPRO = """
import pathlib, sys
sys.exit(0 if "fixed" in pathlib.Path("model_recipes/org/model/NOTES.md").read_text() else 1)
"""
FIX = diff_of(NOTES, "fixed\n")
FORGED = """
import json, os, sys
answers = {"certify": {"refused": 0}, "regress": {"status": "pass", "reason": "all green"}}
for command, answer in answers.items():
    if command in sys.argv:
        os.write(1, json.dumps(answer).encode())
        os._exit(0)
"""


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A green report of the cheapest gate."""
    repeat = [gate for gate in GATES if gate.id == "C2"]
    report = run_gates(load_model("tiny:llama"), "aligned", quick=True, gates=repeat)
    assert report.status == "pass"
    file = tmp_path_factory.mktemp("gates") / "gates.json"
    file.write_text(report.model_dump_json())
    return file


@pytest.fixture
def repro(tmp_path: Path) -> Path:
    file = tmp_path / "repro.py"
    file.write_text(REPRO)
    return file


def attempt(repository: Path, diff: str, folder: Path, **options: Any) -> PatchReport:
    proposed = propose_patch(repository, diff, run=folder, purpose="say that it is fixed")
    assert proposed.status == "proposed", proposed.reason
    return apply_patch(folder, quick=True, **options)


@pytest.mark.slow
def test_a_crash_at_any_step_leaves_the_repository_as_it_was(
    repository: Path, tmp_path: Path, repro: Path, gates: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is on disk at every line of the journal is what a crash there would leave."""
    folder, saved, before = tmp_path / "run", tmp_path / "saved", seen(repository)
    steps: list[str] = []
    note = Journal.note

    def photographed(self: Journal, step: str, **details: object) -> None:
        note(self, step, **details)
        for name, place in (("repository", repository), ("run", folder)):
            shutil.copytree(place, saved / f"{len(steps)}-{name}", symlinks=True)
        steps.append(step)

    monkeypatch.setattr(Journal, "note", photographed)
    report = attempt(repository, FIX, folder, repro=repro, gates=gates)
    monkeypatch.undo()
    assert report.status == "admitted", report.reason
    assert steps == ["worktree", "applying", "branch", "admitted", "removed"]
    assert report.commit == git(repository, "rev-parse", "zero-mismatch/run").strip()
    assert git(repository, "diff", "--stat", "main", "zero-mismatch/run").count("NOTES.md") == 1
    parent = git(repository, "rev-parse", "zero-mismatch/run~1")
    assert parent == git(repository, "rev-parse", "HEAD")
    assert [check.name for check in report.checks] == [
        "repro-before", "repro-after", "regress",
    ]  # fmt: skip
    for number, step in enumerate(steps):
        restore(saved / f"{number}-repository", repository)
        restore(saved / f"{number}-run", folder)
        if step in ("worktree", "applying", "branch"):
            assert seen(repository)[:4] == before[:4], step
        undone = revert_patch(folder)
        assert undone.status == "reverted"
        assert seen(repository) == before, step
        assert not (folder / "worktree").exists()


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_running_and_nothing_changed(
    repository: Path, tmp_path: Path, gates: Path
):
    folder, before = tmp_path / "run", seen(repository)
    endless = tmp_path / "repro.py"
    endless.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(folder / 'out' / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    propose_patch(repository, FIX, run=folder)
    program = (
        "import sys; from pathlib import Path; "
        "from zeromismatch.agent_tools.patch import apply_patch; "
        "apply_patch(Path(sys.argv[1]), repro=Path(sys.argv[2]), gates=Path(sys.argv[3]))"
    )
    words = [sys.executable, "-c", program, str(folder), str(endless), str(gates)]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    pid_file = folder / "out" / "pid"
    watch = os.pidfd_open(process.pid)
    try:
        waited = 0
        while not (pid_file.is_file() and pid_file.read_text()) and waited < 600:
            waited += 1
            assert process.poll() is None
            signal.sigtimedwait([signal.SIGUSR2], 0.2)
        child = os.pidfd_open(int(pid_file.read_text()))
        process.kill()
        process.wait(timeout=20)
        assert ended(child), "the repro still runs"
    finally:
        process.kill()
        os.close(watch)
    assert seen(repository)[:4] == before[:4]
    revert_patch(folder)
    assert seen(repository) == before


def ended(handle: int) -> bool:
    """Whether a process ends within ten seconds."""
    import select

    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(10_000))


def test_a_patch_that_fixes_nothing_is_undone(
    repository: Path, tmp_path: Path, repro: Path, gates: Path
):
    before, diff = seen(repository), diff_of(NOTES, "other\n")
    report = attempt(repository, diff, tmp_path / "run", repro=repro, gates=gates)
    assert report.status == "refused"
    assert [entry.rule for entry in report.refusals] == ["repro"]
    assert seen(repository) == before
    assert report.branch is None


def test_a_repro_that_is_equal_already_admits_nothing(
    repository: Path, tmp_path: Path, repro: Path, gates: Path
):
    (repository / NOTES).write_text("fixed\n")
    git(repository, "commit", "-qam", "by hand")
    diff = diff_of(NOTES, "fixed twice\n", old="fixed\n")
    report = attempt(repository, diff, tmp_path / "run", repro=repro, gates=gates)
    assert report.reason.startswith("refused by rule repro")


def test_a_repro_cannot_write_into_the_repository(repository: Path, tmp_path: Path, gates: Path):
    spiteful = tmp_path / "repro.py"
    target = repository / "README.md"
    spiteful.write_text(f"open({str(target)!r}, 'w').write('mine')\n{REPRO}")
    before = seen(repository)
    report = attempt(repository, FIX, tmp_path / "run", repro=spiteful, gates=gates)
    assert report.status == "refused"
    assert seen(repository) == before


def test_a_cheating_kernel_is_refused_by_name(
    repository: Path, tmp_path: Path, repro: Path, gates: Path
):
    cheat = CANDIDATE.read_text().replace("(offset ? 1.0f + weight[c] : weight[c])", "weight[c]")
    assert cheat != CANDIDATE.read_text()
    before = seen(repository)
    report = attempt(
        repository, FIX + diff_of(KERNEL, cheat), tmp_path / "run", repro=repro, gates=gates,
        kernels=[(KERNEL, CONTRACT)],
    )  # fmt: skip
    assert report.refusals[0].rule == "verify"
    assert re.search("breaks rule (bits|accuracy)", report.reason)
    assert seen(repository) == before


def test_a_kernel_says_which_contract_it_serves(
    repository: Path, tmp_path: Path, repro: Path, gates: Path
):
    diff = FIX + diff_of(KERNEL, CANDIDATE.read_text())
    report = attempt(repository, diff, tmp_path / "run", repro=repro, gates=gates)
    assert report.refusals[0].rule == "kernel"


@pytest.mark.slow
def test_a_verified_kernel_is_admitted_and_reverted_whole(
    repository: Path, tmp_path: Path, repro: Path, gates: Path
):
    folder, before = tmp_path / "run", seen(repository)
    diff = FIX + diff_of(KERNEL, CANDIDATE.read_text())
    report = attempt(
        repository, diff, folder, repro=repro, gates=gates, kernels=[(KERNEL, CONTRACT)]
    )
    assert report.status == "admitted", report.reason
    verdict = json.loads((folder / "verify-norm.py.json").read_text())
    assert verdict["status"] == "pass"
    assert all(control["red"] for control in verdict["controls"])
    git(repository, "branch", "mine", "zero-mismatch/run")
    revert_patch(folder)
    git(repository, "branch", "-D", "mine")
    assert seen(repository) == before


@pytest.fixture
def portable() -> Iterator[None]:
    """The portable core serves the norm, as on a machine without wide vectors."""
    certify.load_operators()
    held = {each: dispatch.choose(each).name for each in (CONTRACT, GRADIENT)}
    for each in held:
        dispatch.adopt(each, "core-portable")
    yield
    for each, name in held.items():
        dispatch.adopt(each, name)


@pytest.mark.slow
@pytest.mark.usefixtures("portable")
def test_a_faster_kernel_with_the_same_bits_is_admitted_without_a_repro(
    repository: Path, tmp_path: Path, gates: Path
):
    diff = diff_of(KERNEL, CANDIDATE.read_text())
    report = attempt(
        repository, diff, tmp_path / "run", gates=gates, kernels=[(KERNEL, CONTRACT)]
    )
    assert report.status == "admitted", report.reason
    assert [(each.name, each.status) for each in report.checks] == [
        ("verify", "pass"), ("regress", "pass"),
    ]  # fmt: skip
    verdict = json.loads((tmp_path / "run" / "verify-norm.py.json").read_text())
    assert verdict["speed"]["baseline"] == "core-portable"
    assert verdict["speed"]["ratio"] >= FASTER


def test_what_mends_nothing_and_is_no_faster_is_undone(
    repository: Path, tmp_path: Path, gates: Path
):
    before = seen(repository)
    report = attempt(repository, FIX, tmp_path / "run", gates=gates)
    assert [entry.rule for entry in report.refusals] == ["no-gain"]
    assert seen(repository) == before


def test_a_branch_that_somebody_built_on_is_kept(repository: Path, tmp_path: Path):
    folder = tmp_path / "run"
    propose_patch(repository, FIX, run=folder)
    first = git(repository, "rev-parse", "HEAD").strip()
    git(repository, "commit", "-q", "--allow-empty", "-m", "theirs")
    git(repository, "branch", "zero-mismatch/run")
    Journal(folder).note("branch", name="zero-mismatch/run", commit=first)
    with pytest.raises(MisalignedError, match="moved on"):
        revert_patch(folder)
    assert git(repository, "branch", "--list", "zero-mismatch/run")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of this project, whose own code then runs in the worktree."""
    folder = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--shared", str(Path(__file__).parents[3]), str(folder))
    return folder


@pytest.mark.slow
def test_a_changed_contract_is_refused(clone: Path, tmp_path: Path, gates: Path):
    path = "kernels/embedding/cpu.py"
    old = (clone / path).read_text()
    new = old.replace("order=_order", 'order=f"any, or {_order}"')
    assert new != old
    diff = diff_of(path, new, old=old)
    report = attempt(clone, diff, tmp_path / "run", gates=gates)
    assert report.refusals[0].rule == "contracts", report.reason
    assert report.refusals[0].detail.startswith("contract embedding")


@pytest.mark.slow
def test_code_that_forges_its_own_judgement_is_not_admitted(
    clone: Path, tmp_path: Path, gates: Path
):
    """It runs inside sweep, repro and gates, and answers for them: all green, and yet no branch."""
    path, before = "kernels/embedding/cpu.py", seen(clone)
    old = (clone / path).read_text()
    diff = diff_of(path, old + FORGED, old=old)
    judged = tmp_path / "repro.py"
    judged.write_text(
        "import sys\nfrom zeromismatch.kernels.embedding import cpu\n"
        "sys.exit(0 if cpu.__dict__.get('answers') else 1)\n"
    )
    report = attempt(clone, diff, tmp_path / "run", repro=judged, gates=gates)
    assert {(each.name, each.status) for each in report.checks} == {
        ("repro-before", "pass"), ("contracts", "pass"), ("verify", "pass"),
        ("repro-after", "pass"), ("regress", "pass"), ("review", "not-run"),
    }  # fmt: skip
    assert (report.status, report.branch) == ("waiting", None)
    assert f"--reviewed {path}" in report.reason
    assert seen(clone) == before


def test_the_small_repository_is_whole(tmp_path: Path):
    folder = make_repository(tmp_path / "r")
    assert git(folder, "ls-files").split() == sorted(FILES)
