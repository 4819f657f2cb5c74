"""Recipes on disk: round trips, contradictions, foreign models, changed kernel files."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from torch import Tensor

import zeromismatch
from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import DiskError, RecipeError
from zeromismatch.model_recipes import tiny
from zeromismatch.model_recipes.apply import identify
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.plan import aligned_plan, plan_from, stock_plan
from zeromismatch.model_recipes.schema import (
    Evidence,
    ModelIdentity,
    Recipe,
    RecipeKernel,
    file_digest,
    load_recipe,
    save_recipe,
)

from .conftest import packed

EVIDENCE = Evidence(
    claim="every schedule on paged equals packed",
    command="zm localize tiny:llama --left paged:fuzz:1 --right packed:packed --plan aligned",
    verdict="pass",
    compared_tokens=768,
    differing_tokens=0,
    digest="0" * 32,
    environment_digest="1" * 32,
    seconds=1.5,
)


def recipe_for(module: Any, /, **changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "name": "tiny-llama-float32-cpu",
        "model": identify(module, "tiny:llama"),
        "plan": aligned_plan("float32", "cpu"),
        "dtype": "float32",
        "device": "cpu",
        "engines": {"paged": {"max_step_tokens": 64}},
        "versions": {"torch": torch.__version__},
        "evidence": (EVIDENCE,),
        "cost": {"tokens_per_second": 12.5},
        "not_covered": ("more than one process",),
        "precision": ("logits in fp32",),
    }
    return Recipe(**(fields | changes))


def test_a_recipe_survives_the_disk(model: Any, tmp_path: Path) -> None:
    recipe = recipe_for(model)
    file = save_recipe(recipe, tmp_path / "new" / "folder")
    assert load_recipe(file) == load_recipe(file.parent) == recipe
    assert [path.name for path in file.parent.iterdir()] == ["recipe.yaml"]
    assert plan_from(str(file), (), "float32", "cpu") == recipe.plan


@torch.no_grad()
def test_two_lines_apply_a_recipe(model: Any, sequences: list[Tensor], tmp_path: Path) -> None:
    save_recipe(recipe_for(model), tmp_path)
    instrument = zeromismatch.apply(model, tmp_path)
    aligned = model(**packed(sequences)).logits[0]
    alone = model(sequences[1][None], use_cache=False).logits[0]
    assert bits.equal(aligned[-len(sequences[1]) :], alone)
    instrument.remove()
    zeromismatch.apply(model, recipe_for(model, plan=stock_plan())).remove()


def test_a_recipe_for_another_model_names_both(model: Any) -> None:
    recipe = recipe_for(model)
    for other, what in (
        (tiny.build("tiny:qwen3", dtype=torch.float32), r"\(qwen3\): the architectures differ"),
        (tiny.build("tiny:llama+untied", dtype=torch.float32), "the configs differ"),
        (tiny.build("tiny:llama", dtype=torch.float32, seed=1), "the weights differ"),
    ):
        with pytest.raises(RecipeError, match=what) as caught:
            zeromismatch.apply(other, recipe)
        assert "is for tiny:llama (llama), not for this model" in str(caught.value)
    loaded = load_model("tiny:llama", seed=1)
    with pytest.raises(RecipeError, match="not for tiny:llama"):
        plan_from(recipe, (), "float32", "cpu", loaded.identity)
    assert identify(loaded.module, "tiny:llama") == loaded.identity
    narrow = tiny.build("tiny:llama", dtype=torch.bfloat16)
    wide = recipe_for(model, model=identify(narrow))
    with pytest.raises(RecipeError, match="is for float32 on cpu, this run is bfloat16 on cpu"):
        zeromismatch.apply(narrow, wide)


@pytest.mark.parametrize(
    "change",
    [
        {"compared_tokens": 0},
        {"differing_tokens": 1},
        {"verdict": "fail", "compared_tokens": 3, "differing_tokens": 4},
        {"verdict": "fine"},
        {"seconds": -1.0},
        {"author": "me"},
    ],
)
def test_contradictory_evidence_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Evidence(**(EVIDENCE.model_dump() | change))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda fields: fields | {"extra": 1}, "extra"),
        (lambda fields: fields | {"schema_version": 2}, "schema_version 2"),
        (lambda fields: fields | {"dtype": "float16"}, "dtype"),
        (lambda fields: {k: v for k, v in fields.items() if k != "model"}, "model"),
        (lambda fields: [fields], "holds no recipe"),
    ],
)
def test_edited_recipes_are_refused(model: Any, tmp_path: Path, edit: Any, message: str) -> None:
    file = save_recipe(recipe_for(model), tmp_path)
    file.write_text(yaml.safe_dump(edit(yaml.safe_load(file.read_text()))))
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path)


def test_unreadable_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist"):
        load_recipe(tmp_path)
    (tmp_path / "recipe.yaml").write_text("{: not yaml")
    with pytest.raises(RecipeError, match="not YAML"):
        load_recipe(tmp_path)


def test_a_changed_kernel_file_is_refused(model: Any, tmp_path: Path) -> None:
    source = tmp_path / "kernels" / "linear.py"
    source.parent.mkdir()
    source.write_text("KERNEL = 1\n")
    kernel = RecipeKernel(
        contract="linear.x.v1", path="kernels/linear.py", digest=file_digest(source)
    )
    save_recipe(recipe_for(model, kernels=(kernel,)), tmp_path)
    with pytest.raises(RecipeError, match="brings its own kernels"):
        zeromismatch.apply(model, load_recipe(tmp_path))
    source.write_text("KERNEL = 2\n")
    with pytest.raises(RecipeError, match="has digest"):
        load_recipe(tmp_path)
    source.unlink()
    with pytest.raises(RecipeError, match="is missing"):
        load_recipe(tmp_path)
    outside = kernel.model_copy(update={"path": "../linear.py"})
    save_recipe(recipe_for(model, kernels=(outside,)), tmp_path)
    with pytest.raises(RecipeError, match="lies outside"):
        load_recipe(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_disk_error(model: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot write"):
        save_recipe(recipe_for(model), tmp_path / "file" / "below")


def test_identity_is_about_numbers_not_paths(model: Any) -> None:
    before = identify(model)
    zeromismatch.apply(model, recipe_for(model))
    assert identify(model) == before
    model.config._name_or_path = "/somewhere/else"
    assert identify(model) == before
    model.config.rms_norm_eps = 1e-5
    after = identify(model)
    assert after.config_digest != before.config_digest
    assert after.weights_root == before.weights_root
    assert isinstance(after, ModelIdentity)
