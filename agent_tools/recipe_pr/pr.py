"""``zm recipe pr``: the recipe as commits on a branch of its own, and a body for people.

The branch begins at HEAD and holds the recipe's folder under ``model_recipes/<org>/<model>/``:
first its kernels and regressions, then the recipe. It is made in a worktree of its own and appears
in one step, so that a crash leaves no branch; checkout, index and other branches are never touched.
Nothing is pushed or merged. Without a green gate report the body says so in its first lines.

Given the run of an admitted patch instead of a recipe's folder, it takes the recipe from the
patch's commit and the gates that admitted it: what was judged is what a person reviews.
"""

import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from ...kernels.errors import RecipeError, UsageError
from ...model_recipes import ticks
from ...model_recipes.own_kernels import is_registered
from ...model_recipes.schema import FILE, Recipe, load_recipe
from ..gates import GateReport, read_gates
from ..patch.repository import Repository
from ..records import Record
from ..report import write_whole

TEMPLATE = Path(__file__).parents[1] / "templates" / "pr_body.md.j2"
KEPT = ("*.md", FILE, ticks.FILE, "kernels/*.py", "regressions/*.py", "regressions/*.json",
        "regressions/*.safetensors")  # fmt: skip
TRAILER = "Assisted-by: zero-mismatch"
BODY = "PR.md"
GREEN = ("pass", "not-applicable")


class PullRequest(Record):
    """What was made. ``commits``: oldest first; ``pushed`` is always False."""

    kind: str = "pull-request"
    branch: str
    base: str
    commits: tuple[str, ...]
    files: tuple[str, ...]
    body: str
    """Path of the body."""
    gates: str
    """``pass``, ``fail``, ``inconclusive``, or ``none`` where no report was given."""
    pushed: bool = False


def make_pr(
    recipe: Path, *, repository: Path, gates: Path | None = None, driver: str = "autopilot",
    out: Path | None = None, branch: str | None = None,
) -> PullRequest:  # fmt: skip
    """Make the branch and write the body; UsageError or RecipeError before anything is made."""
    folder = recipe if recipe.is_dir() else recipe.parent
    if (folder / "patch.json").is_file():
        folder, gates = _of_patch(folder, gates)
    loaded = load_recipe(folder)
    report = _gates(loaded, gates or _beside(folder))
    place = place_of(loaded)
    name = branch or f"recipe/{place.parts[-2]}-{place.parts[-1]}-{loaded.dtype}-{loaded.device}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", name) or ".." in name:
        raise UsageError(f"{name!r} is no plain branch name; use letters, digits, / . _ -")
    repo = Repository(repository)
    if repo.branch_exists(name):
        raise UsageError(f"branch {name} exists; review that one, or give another --branch")
    files = kept_files(folder)
    base = repo.commit_of("HEAD")
    waiting = {own.contract for own in ticks.unticked(loaded, folder)}
    text = body_text(
        loaded, report, place=place, files=files, base=base, driver=driver, waiting=waiting
    )
    commits = _commit(repo, base, folder, place, files, loaded)
    body = write_whole(out or folder.parent / BODY, text)
    repo.make_branch(name, commits[-1])
    return PullRequest(
        branch=name,
        base=base,
        commits=commits,
        files=tuple(str(place / file) for file in files),
        body=str(body),
        gates="none" if report is None else report.status,
    )


def _of_patch(run: Path, gates: Path | None) -> tuple[Path, Path | None]:
    """(the recipe of an admitted patch, written beside it; the gates that admitted it)."""
    from ..patch import read_report
    from ..patch.trial import AFTER

    report = read_report(run)
    if report.status != "admitted" or report.commit is None:
        raise UsageError(f"{run.name} is {report.status}, not admitted: {report.reason}")
    places = {str(Path(file.path).parent) for file in report.files if file.path.endswith(FILE)}
    if len(places) != 1:
        raise UsageError(f"{run.name} changes {len(places)} recipes; give the folder of one")
    target = run / "admitted"
    shutil.rmtree(target, ignore_errors=True)
    repo = Repository(Path((run / "repository").read_text()))
    repo.export(report.commit, places.pop(), target)
    return target, gates or run / "out" / AFTER


def place_of(recipe: Recipe) -> Path:
    """``model_recipes/<org>/<model>``, after the hub's name of the model."""
    spec = recipe.model.spec.rstrip("/")
    prefix, colon, rest = spec.partition(":")
    if colon and prefix in ("tiny", "code"):
        parts = [prefix, Path(rest).parent.name if rest.endswith("/model") else Path(rest).name]
    elif spec.count("/") == 1 and not spec.startswith((".", "/", "~")):
        parts = spec.split("/")
    else:
        parts = ["local", Path(spec).name]
    plain = [re.sub(r"[^A-Za-z0-9.-]+", "-", part).strip("-.") for part in parts]
    if not all(plain):
        raise RecipeError(f"{spec!r} gives no folder name; correct model.spec in the recipe")
    return Path("model_recipes", *plain)


def kept_files(folder: Path) -> tuple[str, ...]:
    """The recipe's own files, relative to its folder; links and everything else stay out."""
    found = {path for pattern in KEPT for path in folder.glob(pattern)}
    linked = sorted(str(path) for path in found if path.is_symlink())
    if linked:
        raise RecipeError(f"{linked[0]} is a link; put the file itself into the recipe's folder")
    return tuple(sorted(str(path.relative_to(folder)) for path in found))


def _beside(folder: Path) -> Path | None:
    places = (folder / "gates.json", folder.parent / "gates.json")
    return next((place for place in places if place.is_file()), None)


def _gates(recipe: Recipe, path: Path | None) -> GateReport | None:
    """The report, if it is about this recipe's weights and plan."""
    if path is None:
        return None
    report = read_gates(path)
    theirs, own = report.identity, recipe.model
    if (theirs.weights_root, theirs.config_digest) != (own.weights_root, own.config_digest):
        raise RecipeError(
            f"{path} is about other weights than the recipe; run `zm gate` on {own.spec} again"
        )
    if report.plan_digest != recipe.plan.digest:
        raise RecipeError(
            f"{path} is about another plan than the recipe; run `zm gate` with it as --plan"
        )
    return report


def _commit(
    repo: Repository, base: str, folder: Path, place: Path, files: tuple[str, ...], recipe: Recipe
) -> tuple[str, ...]:
    code = [file for file in files if file.startswith(("kernels/", "regressions/"))]
    rest = [file for file in files if file not in code]
    with tempfile.TemporaryDirectory(prefix="zm-pr-") as scratch:
        tree = Path(scratch) / "tree"
        repo.add_worktree(tree, base)
        try:
            if (tree / place).exists():
                shutil.rmtree(tree / place)
            made: list[str] = []
            for part, what in ((code, "kernels and regressions"), (rest, "recipe")):
                for file in part:
                    target = tree / place / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(folder / file, target)
                if part:
                    repo.run("add", "--all", "--", str(place), folder=tree)
                    if not repo.run("diff", "--cached", "--name-only", folder=tree).strip():
                        continue
                    made.append(repo.commit(tree, _message(recipe, what)))
        finally:
            repo.remove_worktree(tree)
    if not made:
        raise UsageError(f"{place} is already what HEAD holds; there is nothing to review")
    return tuple(made)


def _message(recipe: Recipe, what: str) -> str:
    model = f"{recipe.model.spec} ({recipe.dtype}, {recipe.device})"
    return f"Add the {what} that align {model}\n\n{TRAILER}\n"


def body_text(
    recipe: Recipe, report: GateReport | None, *, place: Path, files: tuple[str, ...], base: str,
    driver: str, waiting: Collection[str] = (),
) -> str:  # fmt: skip
    """The body of the pull request. waiting: contracts that no person has ticked."""
    from jinja2 import Environment, StrictUndefined

    def cell(text: object) -> str:
        return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")

    environment = Environment(
        undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["cell"] = cell
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        recipe=recipe,
        report=report,
        not_green=[gate for gate in report.gates if gate.result not in GREEN] if report else [],
        place=place,
        files=files,
        base=base,
        driver=driver,
        waiting=waiting,
        registered=[own.contract for own in recipe.kernels if is_registered(own.contract)],
    )
