"""What a patch may touch: everything else is refused, with the rule and the path."""

from pathlib import Path

import pytest

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.patch import apply_patch, propose_patch, revert_patch
from zeromismatch.agent_tools.patch.policy import ALLOWED, DENIED, denied
from zeromismatch.agent_tools.patch.repository import locked
from zeromismatch.kernels.errors import UsageError

from .conftest import diff_of, git, seen

NOTES = "model_recipes/org/model/NOTES.md"
LINK = """diff --git a/model_recipes/org/model/out.md b/model_recipes/org/model/out.md
new file mode 120000
--- /dev/null
+++ b/model_recipes/org/model/out.md
@@ -0,0 +1 @@
+/etc/passwd
\\ No newline at end of file
"""
RUNNABLE = diff_of("model_recipes/org/model/kernels/a.py", "x = 1\n").replace("100644", "100755")
MOVED = """diff --git a/kernels/bits.py b/model_recipes/org/model/kernels/bits.py
similarity index 100%
rename from kernels/bits.py
rename to model_recipes/org/model/kernels/bits.py
"""
BINARY = """diff --git a/model_recipes/org/model/kernels/a.py b/model_recipes/org/model/kernels/a.py
new file mode 100644
index 0000000..1111111
GIT binary patch
literal 1
Ic${NkU|;|M00aO5

literal 0
HcmV?d00001

"""
BAD = {
    "nothing": ("", "empty"),
    "only spaces": (" \n\n", "empty"),
    "prose": ("Please make it faster.\n", "malformed"),
    "another base": (diff_of(NOTES, "fixed\n", old="never there\n"), "malformed"),
    "binary": (BINARY, "binary"),
    "a zero byte": (diff_of(NOTES, "fi\0xed\n"), "binary"),
    "two megabytes": (diff_of(NOTES, "x\n" * 1_000_000), "too-large"),
    "a parent folder": (diff_of("../outside.md", "x\n"), "outside"),
    "an absolute path": (diff_of("/etc/passwd", "x\n").replace("b//", "/"), "outside"),
    "git's own folder": (diff_of(".git/hooks/post-checkout", "x\n"), "outside"),
    "git attributes": (diff_of("model_recipes/org/model/.gitattributes", "x\n"), "outside"),
    "shell text in a name": (diff_of("kernels/rmsnorm/$(id).py", "x\n"), "outside"),
    "a symlink": (LINK, "symlink"),
    "a program": (RUNNABLE, "symlink"),
    "the comparer": (diff_of("kernels/bits.py", "EQUAL = 1\n"), "denied-file"),
    "the comparer moved away": (MOVED, "denied-file"),
    "the dispatch": (diff_of("kernels/dispatch.py", None), "denied-file"),
    "a reference": (diff_of("kernels/reference/rmsnorm.py", "x = 2\n"), "denied-file"),
    "a reference of a GPU": (diff_of("kernels/rmsnorm/gpu.py", "x = 2\n"), "denied-file"),
    "a test": (diff_of("tests/test_one.py", "def test(): pass\n"), "denied-file"),
    "a gate": (diff_of("agent_tools/gates/base.py", "x = 2\n"), "denied-file"),
    "a playbook": (diff_of("playbooks/day-0.md", "{{ x }}\n"), "denied-file"),
    "the compiled core": (diff_of("kernels/cpu/gemm.h", "x\n"), "denied-file"),
    "the README": (diff_of("README.md", "other\n"), "not-allowed"),
    "the build": (diff_of("pyproject.toml", "x\n"), "not-allowed"),
    "one good, one bad": (diff_of(NOTES, "f\n") + diff_of("tests/a.py", "x\n"), "denied-file"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_patch_is_refused_and_changes_nothing(name: str, repository: Path, tmp_path: Path):
    diff, rule = BAD[name]
    before = seen(repository)
    report = propose_patch(repository, diff, run=tmp_path / "run")
    assert report.status == "refused"
    assert rule in {entry.rule for entry in report.refusals}, report.reason
    assert seen(repository) == before
    with pytest.raises(UsageError):
        apply_patch(tmp_path / "run", gates=None)


def test_a_recipe_and_an_operator_may_be_changed(repository: Path, tmp_path: Path):
    diff = diff_of(NOTES, "fixed\n") + diff_of("kernels/rmsnorm/cpu.py", "x = 2\n")
    before = seen(repository)
    report = propose_patch(repository, diff, run=tmp_path / "run", purpose="fix it")
    assert report.status == "proposed", report.reason
    assert [(f.path, f.change, f.added, f.removed) for f in report.files] == [
        ("kernels/rmsnorm/cpu.py", "modified", 1, 1),
        (NOTES, "modified", 1, 1),
    ]
    assert seen(repository) == before


def test_capitals_open_no_denied_file():
    assert denied("Kernels/BITS.py") == denied("kernels/bits.py")
    assert set(DENIED).isdisjoint(ALLOWED)


def test_a_run_holds_one_patch_and_one_command(repository: Path, tmp_path: Path):
    propose_patch(repository, diff_of(NOTES, "fixed\n"), run=tmp_path / "run")
    with pytest.raises(UsageError, match="another run"):
        propose_patch(repository, diff_of(NOTES, "again\n"), run=tmp_path / "run")
    with locked(tmp_path / "run"), pytest.raises(UsageError, match="another command"):
        revert_patch(tmp_path / "run")


def test_an_edited_diff_is_not_applied(repository: Path, tmp_path: Path):
    propose_patch(repository, diff_of(NOTES, "fixed\n"), run=tmp_path / "run")
    (tmp_path / "run" / "patch.diff").write_text(diff_of("tests/test_one.py", "x\n"))
    with pytest.raises(UsageError, match="edited"):
        apply_patch(tmp_path / "run", gates=None)


def test_what_is_no_repository_or_no_run_is_said(tmp_path: Path):
    with pytest.raises(UsageError, match="in no git repository"):
        propose_patch(tmp_path, diff_of(NOTES, "x\n"), run=tmp_path / "run")
    with pytest.raises(UsageError, match="holds no patch"):
        revert_patch(tmp_path / "other")


def test_hooks_of_the_repository_do_not_run(repository: Path, tmp_path: Path):
    hooks = repository / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-checkout", "pre-commit", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (hooks / name).chmod(0o755)
    propose_patch(repository, diff_of(NOTES, "fixed\n"), run=tmp_path / "run")
    report = apply_patch(tmp_path / "run", gates=None)
    assert [entry.rule for entry in report.refusals] == ["gates"]
    assert not (tmp_path / "ran").exists()
    assert "worktree" not in git(repository, "worktree", "list")


def test_the_command_line_refuses_with_exit_code_1(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "patch.diff"
    file.write_text(BAD["a test"][0])
    words = ["patch", "propose", str(file), "--run", str(tmp_path / "run")]
    assert run([*words, "--repository", str(repository)]) == 1
    assert "denied-file" in capsys.readouterr().out
    assert run(["patch", "apply", str(tmp_path / "none"), "--gates", str(tmp_path)]) == 2


def test_a_folder_without_kernels_is_no_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(["patch", "draft", "tiny:llama", str(tmp_path), "--out", str(tmp_path / "o")]) == 2
    assert "is no draft" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
