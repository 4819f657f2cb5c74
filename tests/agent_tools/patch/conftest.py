"""A small git repository with the same shape as a checkout of this project."""

import difflib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

FILES = {
    "README.md": "text\n",
    "kernels/bits.py": "EQUAL = True\n",
    "kernels/dispatch.py": "x = 1\n",
    "kernels/reference/rmsnorm.py": "x = 1\n",
    "kernels/rmsnorm/gpu.py": "x = 1\n",
    "kernels/rmsnorm/cpu.py": "x = 1\n",
    "tests/test_one.py": "def test(): assert False\n",
    "agent_tools/gates/base.py": "x = 1\n",
    "model_recipes/org/model/NOTES.md": "broken\n",
}
Diff = Callable[[str, str | None], str]


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


def seen(folder: Path) -> tuple[str, ...]:
    """All that a user sees of a repository: HEAD, refs, index, files, worktrees."""
    files = "".join(
        f"{path.relative_to(folder)}:{path.read_bytes()!r}"
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    )
    asked = ("status --porcelain", "for-each-ref", "rev-parse HEAD", "ls-files -s", "worktree list")
    return (files, *(git(folder, *words.split()) for words in asked))


def make_repository(folder: Path) -> Path:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "repository")


def diff_of(path: str, new: str | None, old: str | None = None) -> str:
    """A unified diff from FILES to another text of one file; None deletes or makes it."""
    before = FILES.get(path) if old is None else old
    a, b = (f"{side}/{path}" for side in "ab")
    head = f"diff --git {a} {b}\n"
    if before is None:
        head, a = f"{head}new file mode 100644\n", "/dev/null"
    if new is None:
        head, b = f"{head}deleted file mode 100644\n", "/dev/null"
    lines = difflib.unified_diff(
        (before or "").splitlines(True), (new or "").splitlines(True), a, b
    )
    return head + "".join(lines)


def restore(saved: Path, place: Path) -> None:
    shutil.rmtree(place)
    shutil.copytree(saved, place, symlinks=True)
