"""Which files a patch may touch, and which it may not, each with the reason.

    refusals = judge(changes, references={"kernels/rmsnorm/gpu.py": "rmsnorm.lanes..."})

Decided from what git says it did (`git diff --raw`), never from the patch's own text alone. What is
on neither list is refused: a fix lives in a recipe's folder or in an operator's.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from .records import ChangedFile, Refusal

MOST_BYTES = 1_000_000
RULES = {
    "empty": "changes something",
    "too-large": f"has at most {MOST_BYTES} bytes",
    "binary": "is text",
    "malformed": "is a unified diff that applies to its base",
    "outside": "stays inside the repository: relative paths, no .., nothing of git's own",
    "symlink": "makes no links and no submodules, and nothing executable",
    "denied-file": "leaves alone what judges it",
    "not-allowed": "touches a recipe's folder or an operator's, nothing else",
    "contracts": "changes or removes no existing contract",
    "repro": "turns its repro from a mismatch to equal",
    "no-gain": "comes with a repro, or with a kernel that is measurably faster",
    "verify": "every kernel in it passes the verifier",
    "kernel": "every kernel in it says which contract it serves",
    "regress": "turns no green gate red",
    "gates": "comes with the report whose green gates it must keep",
    "review": "a new contract, and a change of the project's own code, is ticked by a person",
}
DENIED = {
    "kernels/bits.py": "it is the comparer",
    "kernels/contract.py": "it is the registry of contracts",
    "kernels/dispatch.py": "it decides who may serve",
    "kernels/cert*.py": "it certifies kernels",
    "kernels/trial.py": "it tries kernels",
    "kernels/cases*.py": "these are the cases of the certifying sweep",
    "kernels/adversarial.py": "it makes the adversarial data",
    "kernels/*.py": "it belongs to the core of the kernels layer",
    "kernels/reference/**": "references are frozen",
    "kernels/cpu/**": "the compiled core serves every contract, and a patch does not build it",
    "kernels/gpu/**": "every GPU operator uses it",
    "tests/**": "tests are not patched to pass",
    "agent_tools/**": "gates, verifier and localizer judge the patch",
    "trainer/**": "engines produce what the gates compare",
    "model_recipes/*/*/ticks.yaml": "a person ticks contracts, no patch does",
    "model_recipes/*.py": "it decides how a plan is applied",
    "src/**": "it is how the package is found",
    "skill/**": "it instructs agents",
    "playbooks/**": "they instruct agents",
    ".ci/**": "it is how the project is tested",
}
ALLOWED = (
    "model_recipes/*/*/recipe.yaml",
    "model_recipes/*/*/*.md",
    "model_recipes/*/*/kernels/*.py",
    "model_recipes/*/*/regressions/*.py",
    "model_recipes/*/*/regressions/*.json",
    "kernels/*/*.py",
)
_PLAIN = re.compile(r"[A-Za-z0-9_.+/-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawChange:
    """One line of ``git diff --raw``: modes in octal, and git's letter for what happened."""

    path: str
    old_mode: str
    new_mode: str
    letter: str


def text_refusals(diff: str) -> list[Refusal]:
    """What can be said about a patch before git sees it."""
    if not diff.strip():
        return [_refusal("empty", "the diff is empty")]
    if len(diff.encode(errors="replace")) > MOST_BYTES:
        return [_refusal("too-large", f"the diff has {len(diff)} characters")]
    if "\0" in diff or re.search(r"^(GIT binary patch|Binary files )", diff, flags=re.MULTILINE):
        return [_refusal("binary", "the diff holds binary content")]
    paths = re.findall(r"^(?:---|\+\+\+) (.*)$", diff, flags=re.MULTILINE)
    paths += re.findall(r"^(?:rename|copy) (?:from|to) (.*)$", diff, flags=re.MULTILINE)
    found = [entry for path in paths for entry in _outside(path.split("\t")[0])]
    if re.search(r"^(new|deleted) file mode 1[26]0000|^new mode 1[026]0", diff, re.MULTILINE):
        modes = re.findall(r"^(?:new file|deleted file|new) mode (\d+)$", diff, flags=re.MULTILINE)
        found += [_refusal("symlink", f"mode {mode}") for mode in modes if mode != "100644"]
    return list(dict.fromkeys(found))


def _outside(path: str) -> list[Refusal]:
    if path in ("/dev/null", ""):
        return []
    bare = path[2:] if path[:2] in ("a/", "b/") else path
    parts = PurePosixPath(bare).parts
    hidden = any(part.lower() == ".git" or part.startswith(".git") for part in parts)
    if bare.startswith(("/", "~", '"')) or ".." in parts or hidden or not _PLAIN.fullmatch(bare):
        return [_refusal("outside", "not a plain path inside the repository", bare)]
    return []


def judge(changes: Iterable[RawChange], references: Mapping[str, str]) -> list[Refusal]:
    """Every reason to refuse these changes. references: file -> a contract it defines."""
    found: list[Refusal] = []
    for change in changes:
        path = change.path
        found += _outside(path)
        if change.new_mode not in ("100644", "000000") or change.old_mode not in (
            "100644", "000000",
        ):  # fmt: skip
            modes = f"mode {change.old_mode} becomes {change.new_mode}"
            found.append(_refusal("symlink", modes, path))
        if path in references:
            reason = f"it holds the reference of {references[path]}"
            found.append(_refusal("denied-file", reason, path))
        elif (reason := denied(path)) is not None:
            found.append(_refusal("denied-file", reason, path))
        elif not any(_matches(path, pattern) for pattern in ALLOWED):
            found.append(_refusal("not-allowed", "it is on no allow-list", path))
    return list(dict.fromkeys(found))


def denied(path: str) -> str | None:
    """Why nobody's patch may touch this file, or None; capitals do not help."""
    return next((why for pattern, why in DENIED.items() if _matches(path.lower(), pattern)), None)


def _matches(path: str, pattern: str) -> bool:
    """``*`` within one folder, a trailing ``**`` for everything below."""
    if pattern.endswith("/**"):
        return path.startswith(pattern[:-2])
    expression = re.escape(pattern).replace(r"\*", "[^/]*")
    return re.fullmatch(expression, path) is not None


def _refusal(rule: str, detail: str, path: str | None = None) -> Refusal:
    return Refusal(rule=rule, detail=detail, path=path)


def changed_files(changes: Iterable[RawChange], lines: Mapping[str, tuple[int, int]]) -> tuple[
    ChangedFile, ...
]:  # fmt: skip
    """The changes for the report; lines: (added, removed) by path."""
    names = {"A": "added", "D": "deleted"}
    return tuple(
        ChangedFile(
            path=change.path,
            change=names.get(change.letter, "modified"),  # pyright: ignore[reportArgumentType]
            added=lines.get(change.path, (0, 0))[0],
            removed=lines.get(change.path, (0, 0))[1],
        )
        for change in changes
    )
