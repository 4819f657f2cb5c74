"""The attention context: what an engine's batch object is given, and what it may tell."""

from typing import Any

import pytest
import torch
from torch import Tensor

from zeromismatch.kernels import bits
from zeromismatch.kernels.attention import (
    AttentionBatch,
    KVCache,
    new_cache,
    paged_attention,
    read_kv,
    write_kv,
)
from zeromismatch.kernels.errors import ContractError, UncoveredSiteError
from zeromismatch.model_recipes import tiny
from zeromismatch.model_recipes.apply import apply_plan
from zeromismatch.model_recipes.plan import aligned_plan, stock_plan
from zeromismatch.model_recipes.sites import SiteCall

from .conftest import packed

ALIGNED = aligned_plan("float32", "cpu")


class OneRequest:
    """A paged context for one request in consecutive pages: a small engine."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.caches: list[KVCache] = [
            new_cache(
                8, config.num_key_value_heads, config.head_dim, dtype=torch.float32, device="cpu"
            )
            for _ in range(config.num_hidden_layers)
        ]
        self.length = 0
        self.seen: list[dict[str, Any]] = []

    def step(self, model: Any, ids: Tensor) -> Tensor:
        start, self.length = self.length, self.length + len(ids)
        self.batch = AttentionBatch(
            query_start=torch.tensor([0, len(ids)], dtype=torch.int32),
            kv_len=torch.tensor([self.length], dtype=torch.int32),
            block_table=torch.arange(8, dtype=torch.int32)[None],
            slot=torch.arange(start, self.length),
        )
        positions = torch.arange(start, self.length)[None]
        output = model.model(ids[None], position_ids=positions, use_cache=False, batch=self)
        return output.last_hidden_state[0]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> Tensor:
        self.seen.append({"layer": layer_idx, "shapes": [q.shape, k.shape, v.shape], **options})
        options.pop("attention")
        write_kv(self.caches[layer_idx], k, v, self.batch.slot)
        return paged_attention(q, self.caches[layer_idx], self.batch, **options)

    def stored(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        rows = self.batch.slot.numel()
        k, v = read_kv(self.caches[layer_idx], self.batch.block_table[0], self.length)
        return k[-rows:], v[-rows:]


@torch.no_grad()
def test_paged_steps_have_the_bits_of_one_packed_forward(
    model: Any, sequences: list[Tensor]
) -> None:
    apply_plan(model, ALIGNED)
    whole = model.model(**packed(sequences[1:])).last_hidden_state[0]
    request = OneRequest(model)
    parts = [request.step(model, ids) for ids in sequences[1].split([20, 7, 1, 1, 1, 10])]
    assert bits.equal(torch.cat(parts), whole)
    first = request.seen[0]
    assert first["attention"] == ALIGNED.rules["attention"]
    assert first["layer"] == 0
    assert first["scale"] == 48**-0.5
    assert [tuple(shape) for shape in first["shapes"]] == [(20, 6, 48), (20, 2, 48), (20, 2, 48)]
    assert (first["window"], first["softcap"], first["sinks"]) == (None, None, None)


@torch.no_grad()
def test_cache_writes_are_shown_as_stored(model: Any, sequences: list[Tensor]) -> None:
    """A write that lands in the wrong place shows at the write, not only in what attends later."""

    class Forgetful(OneRequest):
        def attend(
            self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, /, **options: Any
        ) -> Tensor:
            return super().attend(layer_idx, q, k, v.flip(0) if layer_idx == 1 else v, **options)

    instrument = apply_plan(model, ALIGNED)
    writes: dict[str, SiteCall] = {}

    def listener(call: SiteCall) -> None:
        if call.site.op_class == "kv_write":
            writes[call.site.path] = call

    instrument.listener = listener
    Forgetful(model).step(model, sequences[0])
    for path, call in writes.items():
        handed_over = torch.cat([call.inputs["k"], call.inputs["v"]], dim=1)
        assert bits.equal(call.output, handed_over) is (path == "model.layers.0.self_attn")


def test_the_stock_choice_is_handed_to_the_context(model: Any, sequences: list[Tensor]) -> None:
    apply_plan(model, stock_plan())
    request = OneRequest(model)
    with torch.no_grad():
        request.step(model, sequences[0])
    assert {options["attention"] for options in request.seen} == {"stock"}
    with pytest.raises(ContractError, match="attention='module'"):
        model.model(**packed(sequences))


def test_windows_reach_the_context() -> None:
    mistral: Any = tiny.build("tiny:mistral", dtype=torch.float32)
    apply_plan(mistral, ALIGNED)
    request = OneRequest(mistral)
    with torch.no_grad():
        request.step(mistral, torch.arange(3, 9))
    assert {options["window"] for options in request.seen} == {40}


def test_what_attention_cannot_honour_is_refused(model: Any, sequences: list[Tensor]) -> None:
    apply_plan(model, ALIGNED)
    with pytest.raises(UncoveredSiteError, match="called with position_bias"):
        model.model(**packed(sequences), position_bias=torch.zeros(1))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.train()
    with pytest.raises(ContractError, match="dropout"):
        model.model(**packed(sequences))


def test_an_attention_module_without_a_plan_says_so(model: Any, sequences: list[Tensor]) -> None:
    instrument = apply_plan(model, ALIGNED)
    name = model.config._attn_implementation
    instrument.remove()
    model.config._attn_implementation = name
    with pytest.raises(ContractError, match="carries no plan"):
        model.model(**packed(sequences))


@pytest.mark.parametrize("spec", ["tiny:kimi_linear", "tiny:llama"])
def test_rows_put_into_transformers_cache_are_read_by_every_later_step(spec: str) -> None:
    """A cache of latents (Kimi-Linear) is expanded anew by each step; one of keys is not."""
    from transformers import DynamicCache

    model: Any = tiny.build(spec, dtype=torch.float32)
    instrument = apply_plan(model, stock_plan(), "module")
    outputs: list[Tensor] = []

    def put_zeros(call: SiteCall) -> Tensor | None:
        if call.site.op_class == "attention":
            outputs.append(call.output)
        return torch.zeros_like(call.output) if call.site.op_class == "kv_write" else None

    instrument.listener = put_zeros
    cache = DynamicCache(config=model.config)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        for first, last in ((0, 35), (35, 36), (36, 37)):
            model(ids[:, first:last], past_key_values=cache, use_cache=True)
    instrument.remove()
    assert len(outputs) == 3 * sum(site.op_class == "attention" for site in instrument.sites)
    for output in outputs:  # every value read was a zero, so is their mean
        assert bits.equal(output, torch.zeros_like(output))
