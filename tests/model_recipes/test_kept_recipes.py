"""The recipes kept in this repository belong to the models and the contracts of this version."""

from pathlib import Path

import pytest

from zeromismatch.model_recipes.apply import find_sites
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.plan import aligned_plan, plan_from
from zeromismatch.model_recipes.schema import load_recipe

FOLDER = Path(__file__).parents[2] / "model_recipes"
KEPT = sorted(file.parent for file in FOLDER.rglob("recipe.yaml"))


def test_the_recipe_of_tiny_qwen3_is_kept() -> None:
    assert FOLDER / "tiny" / "qwen3" in KEPT


@pytest.mark.parametrize("folder", [f for f in KEPT if f.parent.name == "tiny"], ids=str)
def test_a_kept_tiny_recipe_still_applies_to_its_model(folder: Path) -> None:
    recipe = load_recipe(folder)
    model = load_model(recipe.model.spec, dtype=recipe.dtype)
    sites = find_sites(model.module)
    plan = plan_from(folder, sites, model.dtype, model.device, model.identity)
    now = aligned_plan(recipe.dtype, "cpu")
    assert [plan.choice(site) for site in sites] == [now.choice(site) for site in sites]
    assert all(entry.verdict == "pass" for entry in recipe.evidence)
    assert {"README.md", "NOTES.md"} <= {file.name for file in folder.iterdir()}
