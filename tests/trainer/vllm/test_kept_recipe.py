"""The recipe shown on vLLM belongs to this version's contracts and to the packaged model."""

from pathlib import Path

import pytest

from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.plan import check_plan
from zeromismatch.model_recipes.schema import check_identity, load_recipe

FOLDER = Path(__file__).parents[3] / "model_recipes" / "HuggingFaceTB" / "SmolLM2-135M-Instruct"


@pytest.mark.slow
def test_its_contracts_are_served_here_and_its_weights_are_the_packaged_ones() -> None:
    recipe = load_recipe(FOLDER)
    check_plan(recipe.plan, (), recipe.dtype, recipe.device)
    check_identity(recipe, load_model(recipe.model.spec, dtype=recipe.dtype).identity)
    assert all(entry.verdict == "pass" for entry in recipe.evidence)
    assert {"README.md", "NOTES.md"} <= {file.name for file in FOLDER.iterdir()}
