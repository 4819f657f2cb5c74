"""The only module that talks to git (GitPython, argument lists, no shell, no hooks).

    repository = Repository(Path("."))
    with repository.worktree(base, folder) as tree: tree.apply(diff); tree.commit("...")

Nothing here touches the user's checkout, index, HEAD or existing branches. The one change that
outlives a run is a new branch, made by a single reference update.
"""

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from ...kernels.errors import CapabilityError, UsageError
from .policy import RawChange

SECONDS = 120
NO_HOOKS = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "gc.auto=0")
IDENTITY = ("-c", "user.name=zero-mismatch", "-c", "user.email=zero-mismatch@localhost")


def _git() -> Any:
    try:
        return importlib.import_module("git")
    except ImportError as error:
        raise CapabilityError(
            "patches need git and GitPython, and one is missing here: `pip install GitPython`, or "
            "`make install`"
        ) from error


class Repository:
    """A git repository that patches are tried against."""

    def __init__(self, path: Path) -> None:
        git = _git()
        try:
            found = git.Repo(path, search_parent_directories=True)
        except (git.InvalidGitRepositoryError, git.NoSuchPathError) as error:
            raise UsageError(f"{path} is in no git repository; go to one, or `git init`") from error
        if found.working_tree_dir is None:
            raise UsageError(f"{path} is a bare repository; give one with a checkout")
        self.root = Path(found.working_tree_dir)
        found.close()

    def run(
        self, *arguments: str, folder: Path | None = None, environment: Mapping[str, str] = {},
        text: str | None = None,
    ) -> str:  # fmt: skip
        """One git command; UsageError with git's own words where it fails."""
        git = _git()
        command = ["git", *NO_HOOKS, *IDENTITY, *arguments]
        handle = None
        if text is not None:
            handle = tempfile.TemporaryFile()  # noqa: SIM115 - git reads it as its input
            handle.write(text.encode())
            handle.seek(0)
        try:
            return str(
                git.Git(str(folder or self.root)).execute(
                    command, env=dict(environment), istream=handle, strip_newline_in_stdout=False,
                    kill_after_timeout=SECONDS,
                )
            )  # fmt: skip
        except git.GitCommandError as error:
            said = str(error.stderr).strip().removeprefix("stderr: ").strip("' \n")
            raise UsageError(
                f"git {arguments[0]} failed: {said[-400:]}; correct the patch or its base"
            ) from error
        finally:
            if handle is not None:
                handle.close()

    def commit_of(self, name: str) -> str:
        """The full id of a commit."""
        if name.startswith("-"):
            raise UsageError(f"{name!r} is no commit; give HEAD, a branch or an id")
        return self.run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()

    def branch_exists(self, branch: str) -> str | None:
        """The commit of a branch, or None."""
        listed = self.run("for-each-ref", "--format=%(objectname)", f"refs/heads/{branch}")
        return listed.strip() or None

    def tried(self, base: str, diff: str) -> tuple[list[RawChange], dict[str, tuple[int, int]]]:
        """What the diff would change on top of ``base``, by way of an index of its own."""
        with tempfile.TemporaryDirectory(prefix="zm-index-") as folder:
            environment = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
            self.run("read-tree", base, environment=environment)
            words = ("apply", "--cached", "--whitespace=nowarn", "-")
            self.run(*words, environment=environment, text=diff)
            raw = self.run(
                "diff-index", "--cached", "--raw", "--no-renames", "-z", base,
                environment=environment,
            )  # fmt: skip
            counted = self.run(
                "diff-index", "--cached", "--numstat", "--no-renames", "-z", base,
                environment=environment,
            )  # fmt: skip
        return _changes(raw), _lines(counted)

    def diff_to(self, base: str, folder: Path) -> str:
        """The diff from ``base`` to what lies in ``folder``, by way of an index of its own."""
        with tempfile.TemporaryDirectory(prefix="zm-index-") as scratch:
            environment = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
            self.run("read-tree", base, environment=environment)
            words = (f"--work-tree={folder.resolve()}", "add", "--all", "--force", ".")
            place = {**environment, "GIT_DIR": str(self.root / ".git")}
            self.run(*words, folder=folder, environment=place)
            return self.run("diff-index", "--cached", "-p", base, environment=environment)

    def add(self, folder: Path, path: str) -> None:
        """Put one file of a worktree into its index."""
        self.run("add", "--force", "--", path, folder=folder)

    def export(self, commit: str, path: str, folder: Path) -> None:
        """Write the files below ``path`` of a commit into ``folder``."""
        listed = self.run("ls-tree", "-r", "-z", "--name-only", commit, "--", f"{path}/")
        for name in filter(None, listed.split("\0")):
            target = folder / Path(name).relative_to(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(self.run("show", f"{commit}:{name}"))

    def add_worktree(self, folder: Path, base: str) -> None:
        """A detached checkout of ``base`` in ``folder``."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.run("worktree", "add", "--detach", "--no-guess-remote", str(folder), base)

    def remove_worktree(self, folder: Path) -> None:
        """Remove a worktree, whatever state it is in, and git's note of it."""
        with contextlib.suppress(UsageError):
            self.run("worktree", "remove", "--force", "--force", str(folder))
        shutil.rmtree(folder, ignore_errors=True)
        self.run("worktree", "prune", "--expire=now")

    def apply(self, folder: Path, diff: str) -> list[RawChange]:
        """Apply a diff in a worktree, index included; what it changed there."""
        self.run("apply", "--index", "--whitespace=nowarn", "-", folder=folder, text=diff)
        raw = self.run(
            "diff-index", "--cached", "--raw", "--no-renames", "-z", "HEAD", folder=folder
        )
        return _changes(raw)

    def dirty(self, folder: Path) -> list[str]:
        """Files of a worktree that differ from its index: somebody wrote there since."""
        listed = self.run("diff-files", "--name-only", "-z", folder=folder)
        return [name for name in listed.split("\0") if name]

    def commit(self, folder: Path, message: str) -> str:
        """Commit a worktree's index on its detached HEAD; no branch moves."""
        self.run("commit", "--quiet", "--no-verify", "-m", message, folder=folder)
        return self.run("rev-parse", "HEAD", folder=folder).strip()

    def make_branch(self, branch: str, commit: str) -> None:
        """Point a new branch at a commit; fails where the branch exists."""
        self.run("update-ref", f"refs/heads/{branch}", commit, "0" * 40)

    def delete_branch(self, branch: str, commit: str) -> None:
        """Delete a branch that still points at ``commit``."""
        self.run("update-ref", "-d", f"refs/heads/{branch}", commit)


def initialised(folder: Path, message: str) -> Repository:
    """A new repository in ``folder`` whose first commit is what lies there."""
    _git().Repo.init(folder, initial_branch="main").close()
    repo = Repository(folder)
    repo.run("add", "--all", "--force", ".", folder=folder)
    repo.run("commit", "--quiet", "--no-verify", "-m", message, folder=folder)
    return repo


def _changes(raw: str) -> list[RawChange]:
    fields = raw.split("\0")
    found: list[RawChange] = []
    for head, path in zip(fields[::2], fields[1::2], strict=False):
        old, new, _, _, letter = head.removeprefix(":").split(" ")
        found.append(RawChange(path=path, old_mode=old, new_mode=new, letter=letter[0]))
    return found


def _lines(counted: str) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for entry in counted.split("\0"):
        if entry:
            added, removed, path = entry.split("\t", 2)
            if added != "-":
                found[path] = (int(added), int(removed))
    return found


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """One command at a time on a run; UsageError where another holds it."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise UsageError(
            f"another command works on {folder.name}; wait for it, or use another run"
        ) from error
    try:
        yield
    finally:
        os.close(handle)
