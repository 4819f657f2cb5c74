"""``zm train``: refuses what is not green here, trains, resumes, says what it did."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.recipe import environment_digest, environment_of
from zeromismatch.agent_tools.training import rise
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.schema import Recipe, load_recipe, save_recipe
from zeromismatch.model_recipes.state import state_digest, weights_root

KEPT = Path(__file__).parents[3] / "model_recipes" / "tiny" / "qwen3"
SETTINGS = """
groups: 2
group_size: 2
max_new_tokens: 3
checkpoint_every: 2
"""


def stamped(recipe: Recipe, environment: dict[str, str]) -> Recipe:
    """The recipe, its evidence moved to an environment: as if it had been proved there."""
    digest = environment_digest(environment)
    evidence = [
        entry.model_copy(update={"environment_digest": digest}) for entry in recipe.evidence
    ]
    return recipe.model_copy(update={"versions": environment, "evidence": tuple(evidence)})


@pytest.fixture(scope="module")
def here() -> dict[str, str]:
    recipe = load_recipe(KEPT)
    return environment_of(load_model("tiny:qwen3"), recipe.plan)


@pytest.fixture
def green(tmp_path: Path, here: dict[str, str]) -> Path:
    save_recipe(stamped(load_recipe(KEPT), here), tmp_path / "green")
    return tmp_path / "green"


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, object]]]:
    def zm(*words: object) -> tuple[int, dict[str, object]]:
        code = run(["train", *map(str, words), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return zm


def test_a_recipe_that_is_not_green_here_is_refused(
    tmp_path: Path, here: dict[str, str], ask: Callable[..., tuple[int, dict[str, object]]]
) -> None:
    good = stamped(load_recipe(KEPT), here)
    red = good.evidence[0].model_copy(update={"verdict": "fail", "differing_tokens": 3})
    elsewhere = stamped(good, here | {"torch": "2.99.0"})
    edited = good.model_copy(update={"versions": here | {"torch": "2.99.0"}})
    other = good.model.model_copy(update={"weights_root": "0" * 32})
    for recipe, message in (
        (good.model_copy(update={"evidence": (red, *good.evidence[1:])}), "came out fail"),
        (elsewhere, "green for another environment (torch: 2.99.0"),
        (edited, "one of them was edited"),
        (good.model_copy(update={"evidence": ()}), "no evidence"),
        (good.model_copy(update={"model": other}), "the weights differ"),
    ):
        save_recipe(recipe, tmp_path / "recipe")
        code, answer = ask(tmp_path / "recipe", "--task", "even", "--out", tmp_path / "run")
        assert (code, message in str(answer["error"])) == (2, True), answer
        assert not (tmp_path / "run").exists()


def test_arguments_that_cannot_be_used_are_refused(
    green: Path, tmp_path: Path, ask: Callable[..., tuple[int, dict[str, object]]]
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("lag: 1\nclip: 0.2\n")
    for words, message in (
        ((green,), "has no task"),
        (("--task", "even"), "has no recipe"),
        ((green, "--task", "even", "--lag", "-1"), "lag"),
        ((green, "--task", "even", "--config", bad), "clip"),
        ((green, "--task", "even", "--resume", tmp_path / "nothing"), "holds no run"),
        ((green, "--task", "parrot"), "no task 'parrot'"),
    ):
        code, answer = ask(*words)
        assert (code, message in str(answer["error"])) == (2, True), answer


@pytest.mark.slow
def test_train_then_resume(
    green: Path, tmp_path: Path, ask: Callable[..., tuple[int, dict[str, object]]]
) -> None:
    more, folder = tmp_path / "more.yaml", tmp_path / "run"
    more.write_text(SETTINGS)
    words = (green, "--task", "even", "--lag", 1, "--config", more, "--learning-rate", 1e-3)
    code, answer = ask(*words, "--updates", 3, "--out", folder)
    assert code == 0, answer
    assert (answer["status"], answer["updates"], answer["kernel_unequal"]) == ("pass", 3, 0)
    assert (answer["lag_median"], answer["lag_most"], answer["lag_cap"]) == (1.0, 1, 1)
    code, answer = ask("--resume", folder, "--lag", 2)
    assert code == 2
    assert "lag: 1 -> 2" in str(answer["error"])
    code, answer = ask("--resume", folder, "--updates", 4)
    assert code == 0, answer
    assert (answer["resumed_at"], answer["updates"]) == (3, 4)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == [0, 1, 2, 3]
    exported = load_model(str(answer["export"]))
    assert weights_root(state_digest(exported.module)) == answer["weights_root"]


def test_rise_is_the_mean_of_the_ends_with_its_error() -> None:
    first, last, error = rise([0.0, 1.0] * 10 + [5.0] * 7 + [2.0, 3.0] * 10)
    assert (first, last) == (0.5, 2.5)
    assert round(error, 12) == round((2 * (20 / 4 / 19) / 20) ** 0.5, 12)
