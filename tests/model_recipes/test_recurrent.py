"""Recurrent mixers as sites: stock bits under the cuts, with and without transformers' cache."""

import functools
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import CheckpointError, RecipeError, UncoveredSiteError
from zeromismatch.model_recipes.apply import apply_plan, find_sites
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.plan import aligned_plan, stock_plan
from zeromismatch.model_recipes.recurrent import recurrent_chunks
from zeromismatch.model_recipes.sites import SiteCall

from .conftest import packed

MODELS = {
    "tiny:qwen3_next": {"conv", "q_norm", "k_norm", "beta", "decay", "recurrence", "gate"},
    "tiny:kimi_linear": {"conv", "q_norm", "k_norm", "beta", "decay", "recurrence"},
    "tiny:nemotron_h": {"conv", "time_step", "discretised", "recurrence", "skip"},
}


def schedule(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits of a whole prompt, then of a chunk and two decode rows on transformers' cache."""
    whole = model(input_ids=ids, use_cache=False).logits
    cache, found = DynamicCache(config=model.config), [whole]
    for piece in (ids[:, :35], ids[:, 35:70], ids[:, 70:71], ids[:, 71:72]):
        found.append(model(input_ids=piece, past_key_values=cache, use_cache=True).logits)
    return found


@pytest.mark.parametrize("spec", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_stock_mixers_cut_at_their_sites_have_stock_bits(spec: str, dtype: Any) -> None:
    model: Any = load_model(spec, dtype=dtype).module
    ids = torch.arange(3, 75)[None]
    untouched = schedule(model, ids)
    instrument = apply_plan(model, stock_plan(), "module")
    for ours, theirs in zip(schedule(model, ids), untouched, strict=True):
        assert bits.equal(ours, theirs)
    seen: set[str] = set()

    def listen(call: SiteCall) -> None:
        seen.add(call.site.part)
        if call.rerun is not None and call.site.part in MODELS[spec]:
            assert bits.equal(call.rerun(call.inputs), call.output), call.site.name

    instrument.listener = listen
    assert bits.equal(model(input_ids=ids, use_cache=False).logits, untouched[0])
    instrument.remove()
    assert seen >= MODELS[spec]


@torch.no_grad()
def test_packed_rows_without_an_engine_are_each_request_alone(sequences: Any) -> None:
    model: Any = load_model("tiny:nemotron_h").module
    instrument = apply_plan(model, aligned_plan("float32", "cpu"))
    both = model(**packed(sequences)).logits[0]
    first = model(**packed(sequences[:1])).logits[0]
    padded = torch.nn.functional.pad(sequences[0], (0, 6))[None]
    mask = (torch.arange(len(padded[0])) < len(sequences[0])).long()[None]
    right = model(input_ids=padded, attention_mask=mask, use_cache=False).logits[0]
    instrument.remove()
    assert bits.equal(both[: len(sequences[0])], first)
    assert bits.equal(right[: len(sequences[0])], first)


def test_a_chunk_size_that_the_checkpoint_contradicts_is_refused() -> None:
    model: Any = load_model("tiny:qwen3_next").module
    assert recurrent_chunks(model) == {64}
    model.config.chunk_size = 32
    with pytest.raises(CheckpointError, match=r"says chunk_size 32, but .* in chunks of 64"):
        find_sites(model)


def test_a_mixer_whose_code_computes_something_else_is_named(monkeypatch: Any) -> None:
    model: Any = load_model("tiny:nemotron_h").module
    kind = type(model.model.layers[0].mixer)
    own = kind.forward

    @functools.wraps(own)
    def other(self: Any, x: Any, **more: Any) -> Any:
        return own(self, x * 1.5, **more)

    monkeypatch.setattr(kind, "forward", other)
    with pytest.raises(UncoveredSiteError, match=r"model\.layers\.0\.mixer"):
        apply_plan(model, stock_plan())


def test_transformers_cache_serves_stock_alone() -> None:
    model: Any = load_model("tiny:nemotron_h").module
    plan = aligned_plan("float32", "cpu")
    rules = plan.rules | {"attention": "stock"}
    with pytest.raises(RecipeError, match="use the packed or paged engine"):
        apply_plan(model, plan.model_copy(update={"rules": rules}), "module")
