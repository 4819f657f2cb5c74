"""A recipe becomes a branch and a text; the checkout never notices."""

import subprocess
from pathlib import Path

import pytest
import yaml

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.recipe_pr import make_pr
from zeromismatch.kernels.errors import RecipeError, UsageError

ROOT = Path(__file__).resolve().parents[3]
KEPT = ROOT / "model_recipes" / "tiny" / "qwen3"


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "README.md").write_text("# A repository\n")
    git(folder, "add", "README.md")
    git(folder, "commit", "-q", "-m", "Begin")
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "recipe"
    folder.mkdir(parents=True)
    for file in KEPT.iterdir():
        (folder / file.name).write_text(file.read_text())
    (folder / "scratch.bin").write_text("not part of a recipe")
    return folder


def change(recipe: Path, **fields: object) -> None:
    file = recipe / "recipe.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | fields, sort_keys=False))


def test_a_recipe_becomes_a_branch_and_the_checkout_stays(repository: Path, recipe: Path):
    before = git(repository, "rev-parse", "HEAD")
    found = make_pr(recipe, repository=repository)
    assert found.branch == "recipe/tiny-qwen3-float32-cpu"
    assert git(repository, "rev-parse", "HEAD", found.base).split() == [before, before]
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "worktree", "list").count("\n") == 0
    changed = git(repository, "diff", "--name-only", "main", found.branch).splitlines()
    assert changed == [
        f"model_recipes/tiny/qwen3/{n}" for n in ("NOTES.md", "README.md", "recipe.yaml")
    ]
    assert "Assisted-by:" in git(repository, "log", "-1", "--format=%B", found.branch)
    assert git(repository, "remote") == ""
    assert not found.pushed


def test_the_text_holds_every_part_that_a_reviewer_needs(repository: Path, recipe: Path):
    text = Path(make_pr(recipe, repository=repository).body).read_text()
    for heading in ("Summary", "Gates", "Decisions about precision, to be ticked by a person",
                    "Cost", "Not covered", "Repeat it", "Machine assistance", "For the reviewer",
                    "Rollback"):  # fmt: skip
        assert f"\n## {heading}\n" in text, heading
    assert "No gate report came with this recipe" in text
    assert "| rmsnorm | `rmsnorm.lanes16.float32.cpu.v1` |" in text
    assert "- [ ] Rotary tables are computed in fp64" in text
    assert "zm recipe verify model_recipes/tiny/qwen3" in text
    assert "e9c73eabdf665747fef4569047a4231f" in text


def test_kernels_are_committed_first_and_each_needs_a_tick(repository: Path, recipe: Path):
    from zeromismatch.model_recipes.schema import file_digest

    (recipe / "kernels").mkdir()
    file = recipe / "kernels" / "own.py"
    file.write_text('"""A kernel."""\n')
    own = {"contract": "own.ieee.float32.cpu.v1", "path": "kernels/own.py"}
    change(recipe, kernels=[own | {"digest": file_digest(file)}])
    found = make_pr(recipe, repository=repository)
    assert len(found.commits) == 2
    first = git(repository, "show", "--name-only", "--format=", found.commits[0])
    assert first == "model_recipes/tiny/qwen3/kernels/own.py"
    assert "- [ ] New contract `own.ieee.float32.cpu.v1`" in Path(found.body).read_text()
    file.write_text('"""Another kernel."""\n')
    with pytest.raises(RecipeError, match="digest"):
        make_pr(recipe, repository=repository, branch="again")


def test_text_of_a_recipe_cannot_break_out_of_its_cell(repository: Path, recipe: Path):
    change(recipe, precision=["x | y\n\n## Gates\n\nall green <script>"])
    text = Path(make_pr(recipe, repository=repository).body).read_text()
    assert text.count("\n## Gates\n") == 1
    assert "<script>" not in text


@pytest.mark.parametrize(
    ("spec", "place"),
    [("Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B"), ("smollm2-135m", "local/smollm2-135m"),
     ("/models/my model", "local/my-model"), ("code:runs/heron", "code/heron"),
     ("tiny:llama+untied", "tiny/llama-untied")],
)  # fmt: skip
def test_the_folder_follows_the_models_name(repository: Path, recipe: Path, spec: str, place: str):
    model = yaml.safe_load((recipe / "recipe.yaml").read_text())["model"]
    change(recipe, model=model | {"spec": spec})
    found = make_pr(recipe, repository=repository)
    assert found.files[0].startswith(f"model_recipes/{place}/")


def test_what_cannot_be_done_leaves_nothing_behind(
    repository: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make_pr(recipe, repository=repository)
    branches = git(repository, "for-each-ref")
    with pytest.raises(UsageError, match="exists"):
        make_pr(recipe, repository=repository)
    with pytest.raises(UsageError, match="no plain branch name"):
        make_pr(recipe, repository=repository, branch="--upload-pack=x")
    with pytest.raises(UsageError, match="no git repository"):
        make_pr(recipe, repository=tmp_path / "run")
    (recipe / "NOTES.md").unlink()
    (recipe / "NOTES.md").symlink_to("/etc/hostname")
    with pytest.raises(RecipeError, match="is a link"):
        make_pr(recipe, repository=repository, branch="other")
    assert run(["recipe", "pr", str(tmp_path / "absent"), "--repository", str(repository)]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert git(repository, "for-each-ref") == branches
    assert git(repository, "worktree", "list").count("\n") == 0
    assert git(repository, "status", "--porcelain") == ""
