"""Mixtures of experts in a model: stock bits under the sites, what is seen, what is refused."""

from typing import Any

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import ContractError, NonFiniteError, UncoveredSiteError
from zeromismatch.model_recipes.apply import apply_plan, find_sites
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.plan import aligned_plan, stock_plan
from zeromismatch.model_recipes.sites import SiteCall

from .conftest import packed

MODELS = ("tiny:qwen3_moe", "tiny:deepseek_v3")
PARTS = ("scores", "experts", "weights", "gate_up", "gated", "down", "combine")


@pytest.mark.parametrize("spec", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_stock_experts_cut_at_their_sites_have_stock_bits(spec: str, dtype: Any) -> None:
    model: Any = load_model(spec, dtype=dtype).module
    ids = torch.arange(3, 40)[None]
    untouched = model(input_ids=ids, use_cache=False).logits
    instrument = apply_plan(model, stock_plan(), "module")
    assert bits.equal(model(input_ids=ids, use_cache=False).logits, untouched)
    seen: dict[str, str] = {}

    def listen(call: SiteCall) -> None:
        if call.site.part in PARTS:
            seen[call.site.part] = call.site.op_class
            assert call.rerun is not None
            assert bits.equal(call.rerun(call.inputs), call.output), call.site.name

    instrument.listener = listen
    assert bits.equal(model(input_ids=ids, use_cache=False).logits, untouched)
    instrument.remove()
    assert seen.keys() == set(PARTS)


@torch.no_grad()
def test_a_choice_put_in_place_moves_what_comes_after_it(sequences: list[torch.Tensor]) -> None:
    model: Any = load_model("tiny:qwen3_moe").module
    instrument = apply_plan(model, aligned_plan("float32", "cpu"))
    plain = model(**packed(sequences)).logits
    name = "model.layers.1.mlp.gate#experts"

    def flip(call: SiteCall) -> torch.Tensor | None:
        return call.output.flip(1) if call.site.name == name else None

    instrument.listener = flip
    assert not bits.equal(model(**packed(sequences)).logits, plain)  # slots add in their order
    instrument.remove()


def test_experts_that_run_another_way_are_refused_under_stock() -> None:
    model: Any = load_model("tiny:qwen3_moe").module
    model.config._experts_implementation = "eager"
    with pytest.raises(UncoveredSiteError, match="experts_implementation='grouped_mm'"):
        find_sites(model)


def test_a_model_that_chooses_more_experts_than_it_has_is_refused() -> None:
    model: Any = load_model("tiny:qwen3_moe").module
    model.model.layers[1].mlp.gate.top_k = 17
    with pytest.raises(ContractError, match="top-k 17 of 16 experts"):
        find_sites(model)


@torch.no_grad()
def test_a_router_that_gives_nan_is_refused_by_expert_and_row(
    sequences: list[torch.Tensor],
) -> None:
    model: Any = load_model("tiny:qwen3_moe").module
    instrument = apply_plan(model, aligned_plan("float32", "cpu"))
    model.model.layers[1].mlp.gate.weight[5, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="logit of expert 5 for row 0 is nan"):
        model(**packed(sequences))
    instrument.remove()
