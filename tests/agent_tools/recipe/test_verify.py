"""Recipes are repeated, and one that was edited by hand does not pass."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.recipe_verify import recorded_command, verify_recipe
from zeromismatch.kernels.errors import RecipeError

KEPT = Path(__file__).resolve().parents[3] / "model_recipes" / "tiny" / "qwen3"


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the kept recipe with something changed."""
    copy = folder / "recipe"
    shutil.copytree(KEPT, copy)
    content = yaml.safe_load((copy / "recipe.yaml").read_text())
    change(content)
    (copy / "recipe.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return copy


@pytest.mark.slow
def test_every_claim_of_the_kept_recipe_repeats() -> None:
    found = verify_recipe(KEPT)
    assert (found.status, found.exit_code) == ("pass", 0), found.reason
    assert [entry.verdict for entry in found.claims] == ["repeats"] * 3
    assert all(entry.now.compared == 768 for entry in found.claims)


@pytest.mark.slow
def test_an_edited_digest_and_an_edited_count_do_not_repeat(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["evidence"][0]["digest"] = "0" * 32
        content["evidence"][1]["compared_tokens"] = 9000

    found = verify_recipe(edited(tmp_path, change))
    assert found.exit_code == 1
    assert [entry.verdict for entry in found.claims] == ["differs", "differs", "repeats"]
    assert "compared was 9000, is 768" in found.claims[1].detail
    assert "2 of 3 claims do not repeat" in found.reason


def cut_evidence(content: dict[str, Any]) -> None:
    content["evidence"] = []


def other_environment(content: dict[str, Any]) -> None:
    content["versions"]["torch"] = "9.9.9"


def other_plan(content: dict[str, Any]) -> None:
    content["plan"]["rules"]["linear"] = "stock"


def other_weights(content: dict[str, Any]) -> None:
    content["model"]["weights_root"] = "0" * 32


def other_command(content: dict[str, Any]) -> None:
    for entry in content["evidence"]:
        entry["command"] = "make demo"


def two_commands(content: dict[str, Any]) -> None:
    content["evidence"][0]["command"] += " --quick"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_evidence, "no evidence"),
        (other_environment, "one of them was edited"),
        (other_plan, "the plan has digest"),
        (other_weights, "the weights differ"),
        (other_command, "only `zm align MODEL"),
        (two_commands, "different commands"),
    ],
)
def test_a_recipe_that_contradicts_itself_or_its_model_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    folder = edited(tmp_path, change)
    with pytest.raises(RecipeError, match=message):
        verify_recipe(folder)
    assert run(["recipe", "verify", str(folder), "--json"]) == 2


def test_the_recorded_command_says_what_to_repeat() -> None:
    text = "zm align tiny:llama --rollout paged --dtype bfloat16 --seed 3 --quick --prompts a.jsonl"
    found = recorded_command(text, KEPT)
    assert (found.model, found.dtype, found.seed) == ("tiny:llama", "bfloat16", 3)
    assert found.quick
    assert found.prompts == Path("a.jsonl")
    with pytest.raises(RecipeError, match="--turbo"):
        recorded_command("zm align tiny:llama --turbo", KEPT)
