"""Plans: what a rule means, and every way in which one can be wrong."""

from typing import Any

import pytest

from zeromismatch.kernels.errors import RecipeError, UncoveredSiteError
from zeromismatch.model_recipes.apply import find_sites
from zeromismatch.model_recipes.bindings import OP_CLASSES, aligned_contract, check_contract
from zeromismatch.model_recipes.plan import Plan, aligned_plan, plan_from, stock_plan
from zeromismatch.model_recipes.sites import Site

DOWN = Site(path="model.layers.0.mlp.down_proj", op_class="linear")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_aligned_covers_every_class_with_contracts_that_serve_it(dtype: str) -> None:
    plan = aligned_plan(dtype, "cpu")
    assert set(plan.rules) == set(OP_CLASSES)
    for op_class, contract in plan.rules.items():
        check_contract(contract, op_class, dtype, "cpu")
    assert plan.rules["linear"] == f"linear.chain.{dtype}.cpu.v1"
    assert plan.rules["logprob"] == "logprob.lanes16.float32.cpu.v1"
    assert not plan.is_stock


@pytest.mark.parametrize("kind", ["ssd", "gated_delta", "kda"])
def test_recurrences_of_bf16_models_on_hopper_are_those_in_blocks(kind: str) -> None:
    op_class, rows = f"recurrence_{kind}", f"recurrence.{kind}.float32.sm90.v1"
    blocks = aligned_contract(op_class, "bfloat16", "sm90") or ""
    assert blocks.startswith(f"recurrence_blocks.{kind}.bfloat16.sm90.")
    for contract in (blocks, rows):
        check_contract(contract, op_class, "bfloat16", "sm90")
    assert aligned_contract(op_class, "float32", "sm90") == rows
    with pytest.raises(RecipeError, match="does not serve"):
        check_contract(blocks, op_class, "float32", "sm90")
    assert aligned_contract(op_class, "bfloat16", "cpu") == f"recurrence.{kind}.float32.cpu.v1"


def test_plan_from_understands_names_plans_and_sites(model: Any) -> None:
    sites = find_sites(model)
    assert plan_from("stock", sites, "float32", "cpu").is_stock
    aligned = plan_from("aligned", sites, "float32", "cpu")
    assert aligned.name == "aligned-float32-cpu"
    assert plan_from(aligned, sites, "float32", "cpu") is aligned
    assert plan_from("stock", (), "float32", "cpu").choice(DOWN) == "stock"


def test_an_override_wins_and_digests_follow_the_content() -> None:
    plan = stock_plan()
    other = Plan(
        name="other", rules=plan.rules, overrides={DOWN.name: "linear.chain.float32.cpu.v1"}
    )
    assert other.choice(DOWN) == "linear.chain.float32.cpu.v1"
    assert other.digest != plan.digest
    assert Plan(name="renamed", rules=plan.rules).digest == plan.digest


def test_a_class_without_a_contract_is_named(model: Any) -> None:
    strange = Site(path="model.layers.0.mixer", op_class="state_space")
    with pytest.raises(UncoveredSiteError, match=r"state_space at float32-cpu .*mixer"):
        plan_from("aligned", (*find_sites(model), strange), "float32", "cpu")
    with pytest.raises(UncoveredSiteError, match=r"no contract for model\.layers\.0\.mixer"):
        stock_plan().choice(strange)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rules": {"linaer": "stock"}}, "no operator class"),
        ({"rules": {"linear": "linear.chain.bfloat16.cpu.v1"}}, "does not serve linear at float32"),
        ({"rules": {"linear": "rmsnorm.lanes16.float32.cpu.v1"}}, "does not serve linear"),
        ({"rules": {"linear": "linear.chain.float32.cpu.v2"}}, "this build has linear.chain"),
        ({"overrides": {"model.layers.9.mlp.up_proj": "stock"}}, "no site of this model"),
        ({"overrides": {DOWN.name: "nonsense.v1"}}, "does not serve linear"),
    ],
)
def test_unusable_plans_are_refused(model: Any, change: dict[str, Any], message: str) -> None:
    base = stock_plan()
    plan = Plan(
        name="broken",
        rules=base.rules | change.get("rules", {}),
        overrides=change.get("overrides", {}),
    )
    with pytest.raises(RecipeError, match=message):
        plan_from(plan, find_sites(model), "float32", "cpu")


def test_a_missing_plan_file_is_named() -> None:
    with pytest.raises(RecipeError, match="neither stock, aligned nor a recipe"):
        plan_from("no/such/recipe", (), "float32", "cpu")
