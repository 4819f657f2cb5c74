"""A plan on a model: stock bits stay, aligned values stay close, models stay apart, grafts flow."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.activations import ACT2FN

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import (
    ContractError,
    RecipeError,
    UncoveredSiteError,
)
from zeromismatch.model_recipes import tiny
from zeromismatch.model_recipes.apply import apply_plan, find_sites
from zeromismatch.model_recipes.plan import Plan, aligned_plan, stock_plan
from zeromismatch.model_recipes.sites import SiteCall

from .conftest import packed

ALIGNED = aligned_plan("float32", "cpu")


class Recorder:
    """A listener that keeps every call; ``grafts`` replaces outputs by site name."""

    def __init__(self, **grafts: Tensor) -> None:
        self.calls: list[SiteCall] = []
        self.grafts = grafts

    def __call__(self, call: SiteCall, /) -> Tensor | None:
        self.calls.append(call)
        return self.grafts.get(call.site.name)

    def output(self, name: str) -> Tensor:
        return next(call.output for call in self.calls if call.site.name == name)


def decode(model: Any, ids: Tensor, prefill: int) -> list[Tensor]:
    cache = DynamicCache(config=model.config)
    hidden = [model.model(ids[:, :prefill], past_key_values=cache).last_hidden_state]
    for position in range(prefill, ids.shape[1]):
        step = model.model(ids[:, position : position + 1], past_key_values=cache)
        hidden.append(step.last_hidden_state)
    return hidden


def test_every_operator_of_tiny_llama_is_a_site(model: Any) -> None:
    sites = find_sites(model)
    layer = [
        ("input_layernorm", "rmsnorm"),
        ("self_attn.q_proj", "linear"),
        ("self_attn.k_proj", "linear"),
        ("self_attn.v_proj", "linear"),
        ("self_attn#rotary_q", "rotary"),
        ("self_attn#rotary_k", "rotary"),
        ("self_attn#kv_write", "kv_write"),
        ("self_attn#attention", "attention"),
        ("self_attn.o_proj", "linear"),
        ("#add_0", "add"),
        ("post_attention_layernorm", "rmsnorm"),
        ("mlp.gate_proj", "linear"),
        ("mlp.up_proj", "linear"),
        ("mlp#gated", "gated"),
        ("mlp.down_proj", "linear"),
        ("#add_1", "add"),
    ]
    expected = [("model.embed_tokens", "embedding"), ("model.rotary_emb", "rotary_table")]
    for index in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{index}"
        expected += [
            (prefix + (name if name[0] == "#" else f".{name}"), kind) for name, kind in layer
        ]
    expected += [("model.norm", "rmsnorm"), ("lm_head", "lm_head"), ("logprob", "logprob")]
    assert [(site.name, site.op_class) for site in sites] == expected


@pytest.mark.parametrize(
    "spec",
    [
        "tiny:llama+attention_bias+mlp_bias",
        "tiny:qwen2",
        "tiny:qwen3",
        "tiny:mistral",
        "tiny:gemma3_text",
        "tiny:gemma3_text+softcap",
        "tiny:gemma2",
        "tiny:gpt_oss+dense",
        "tiny:granite",
        "tiny:qwen2+window",
        "tiny:llama+yarn",
    ],
)
@torch.no_grad()
def test_stock_plan_changes_no_bit(spec: str, sequences: list[Tensor]) -> None:
    model: Any = tiny.build(spec, dtype=torch.float32)
    ids = torch.stack([ids[:20] for ids in sequences])
    before = [model(ids).logits, *decode(model, ids, 18)]
    instrument = apply_plan(model, stock_plan(), "module")
    for listener in (None, Recorder()):
        instrument.listener = listener
        after = [model(ids).logits, *decode(model, ids, 18)]
        assert all(bits.equal(a, b) for a, b in zip(before, after, strict=True))


@torch.no_grad()
def test_stock_plan_changes_no_bit_with_padding_and_eager_attention(model: Any) -> None:
    model.set_attn_implementation("eager")
    ids = torch.arange(3, 27).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    before = model(ids, attention_mask=mask).logits
    instrument = apply_plan(model, stock_plan(), "module")
    instrument.listener = recorder = Recorder()
    assert bits.equal(model(ids, attention_mask=mask).logits, before)
    assert recorder.output("model.layers.1.self_attn#attention").shape == (24, 6, 48)


@pytest.mark.parametrize("spec", ["tiny:llama", "tiny:llama+untied+attention_bias+mlp_bias"])
@torch.no_grad()
def test_aligned_error_is_at_most_twice_the_stock_error(spec: str, sequences: list[Tensor]) -> None:
    model: Any = tiny.build(spec, dtype=torch.float32)
    exact: Any = tiny.build(spec, dtype=torch.float32).double()
    reference = torch.cat([exact(ids[None]).logits[0] for ids in sequences]).log_softmax(-1)
    stock = torch.cat([model(ids[None]).logits[0] for ids in sequences]).log_softmax(-1)
    instrument = apply_plan(model, ALIGNED)
    aligned = model(**packed(sequences)).logits[0].log_softmax(-1)
    instrument.remove()
    stock_error, aligned_error = (
        float((got.double() - reference).square().mean().sqrt()) for got in (stock, aligned)
    )
    assert 0 < aligned_error <= 2 * stock_error


@torch.no_grad()
def test_aligned_bits_do_not_depend_on_packing_or_on_being_watched(
    model: Any, sequences: list[Tensor]
) -> None:
    instrument = apply_plan(model, ALIGNED)
    together = model.model(**packed(sequences)).last_hidden_state[0]
    alone = [model.model(**packed([ids])).last_hidden_state[0] for ids in sequences]
    assert bits.equal(together, torch.cat(alone))
    width = max(len(ids) for ids in sequences)
    padded = torch.stack([torch.nn.functional.pad(ids, (0, width - len(ids))) for ids in sequences])
    mask = torch.stack([torch.arange(width) < len(ids) for ids in sequences]).long()
    batched = model.model(padded, attention_mask=mask, use_cache=False).last_hidden_state
    assert bits.equal(batched[mask.bool()], together)
    instrument.listener = Recorder()
    assert bits.equal(model.model(**packed(sequences)).last_hidden_state[0], together)


@torch.no_grad()
def test_head_gives_the_same_bits_watched_or_not(model: Any, sequences: list[Tensor]) -> None:
    targets = torch.cat(sequences)
    temperature = torch.linspace(0.5, 1.5, len(targets))
    for plan in (ALIGNED, stock_plan()):
        instrument = apply_plan(model, plan)
        hidden = torch.randn(len(targets), model.config.hidden_size)
        plain = instrument.head_logprob(hidden, targets, temperature)
        instrument.listener = recorder = Recorder()
        assert bits.equal(instrument.head_logprob(hidden, targets, temperature), plain)
        logits = recorder.output("lm_head")
        assert bits.equal(logits, instrument.head_logits(hidden))
        scaled = (logits.double() / temperature[:, None]).log_softmax(-1)
        exact = scaled.gather(1, targets[:, None])[:, 0]
        assert float((plain - exact).abs().max()) < 1e-4
        assert plain.dtype == torch.float32
        assert {call.call for call in recorder.calls} == {0}
        instrument.remove()


def test_two_models_carry_two_plans_side_by_side(sequences: list[Tensor]) -> None:
    first, second, third = (tiny.build("tiny:llama", dtype=torch.float32) for _ in range(3))
    config = first.config
    for model in (first, second, third):  # one config object for all three
        for child in model.modules():
            if "config" in child.__dict__:
                child.config = config
    with torch.no_grad():
        untouched = third(sequences[0][None]).logits
        aligned = apply_plan(first, ALIGNED)
        aligned_bits = first(**packed(sequences[:1])).logits
        stock = apply_plan(second, stock_plan(), "module")
        assert bits.equal(second(sequences[0][None]).logits, untouched)
        assert bits.equal(third(sequences[0][None]).logits, untouched)
        assert bits.equal(first(**packed(sequences[:1])).logits, aligned_bits)
        assert not bits.equal(aligned_bits, untouched)
        stock.remove()
        assert bits.equal(first(**packed(sequences[:1])).logits, aligned_bits)
        aligned.remove()
        assert bits.equal(first(sequences[0][None]).logits, untouched)


def test_remove_restores_the_model(model: Any, sequences: list[Tensor]) -> None:
    before = {path: dict(child.__dict__) for path, child in model.named_modules()}
    hooks = {path: len(child._forward_hooks) for path, child in model.named_modules()}
    instrument = apply_plan(model, ALIGNED)
    instrument.listener = Recorder()
    with pytest.raises(RecipeError, match="already carries plan aligned-float32-cpu"):
        apply_plan(model, stock_plan())
    instrument.remove()
    for path, child in model.named_modules():
        assert child.__dict__.keys() == before[path].keys(), path
        assert child.__dict__.get("config") is before[path].get("config")
        assert len(child._forward_hooks) == hooks[path]
    apply_plan(model, stock_plan()).remove()


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens",
        "model.rotary_emb",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn#rotary_k",
        "model.layers.0.self_attn#kv_write",
        "model.layers.0.self_attn#attention",
        "model.layers.0#add_0",
        "model.layers.1.mlp#gated",
        "model.norm",
    ],
)
@pytest.mark.parametrize("mode", ["module", "context"])
@torch.no_grad()
def test_a_graft_flows_on_and_touches_nothing_before_it(
    model: Any, sequences: list[Tensor], name: str, mode: Any
) -> None:
    instrument = apply_plan(model, stock_plan() if mode == "module" else ALIGNED, mode)
    inputs = packed(sequences[:1])
    instrument.listener = plain = Recorder()
    model.model(**inputs)
    graft = plain.output(name) + 1.0
    instrument.listener = grafted = Recorder(**{name: graft})
    last = model.model(**inputs).last_hidden_state
    order = [call.site.name for call in plain.calls]
    assert order == [call.site.name for call in grafted.calls]
    for a, b in zip(plain.calls[: order.index(name)], grafted.calls, strict=False):
        assert bits.equal(a.output, b.output)
    if name == "model.norm":
        assert bits.equal(last[0], graft)
    assert not bits.equal(last[0], plain.output("model.norm"))
    instrument.listener = Recorder(**{name: plain.output(name)})
    assert bits.equal(model.model(**inputs).last_hidden_state[0], plain.output("model.norm"))


@torch.no_grad()
def test_a_grafted_cache_write_stays_in_the_cache(model: Any, sequences: list[Tensor]) -> None:
    instrument = apply_plan(model, stock_plan(), "module")
    ids = sequences[0][None]
    name = "model.layers.0.self_attn#kv_write"
    clean = decode(model, ids, 20)[-1]
    cache = DynamicCache(config=model.config)
    instrument.listener = first = Recorder()
    model.model(ids[:, :20], past_key_values=cache)
    cache = DynamicCache(config=model.config)
    instrument.listener = Recorder(**{name: first.output(name) * 2.0})
    model.model(ids[:, :20], past_key_values=cache)
    instrument.listener = None
    step = model.model(ids[:, 20:21], past_key_values=cache).last_hidden_state
    assert not bits.equal(step, clean)


@torch.no_grad()
def test_stateless_sites_can_be_rerun_on_their_own_inputs(
    model: Any, sequences: list[Tensor]
) -> None:
    for mode, plan in (("module", stock_plan()), ("context", ALIGNED)):
        instrument = apply_plan(model, plan, mode)  # type: ignore[arg-type]
        instrument.listener = recorder = Recorder()
        hidden = model.model(**packed(sequences[:1])).last_hidden_state[0]
        instrument.head_logprob(hidden, sequences[0])
        for call in recorder.calls:
            rows = call.output.shape[0]
            assert rows == len(sequences[0])
            assert all(tensor.shape[0] == rows for tensor in call.inputs.values())
            if call.site.op_class in ("attention", "kv_write"):
                assert call.rerun is None
            else:
                assert call.rerun is not None, call.site
                assert bits.equal(call.rerun(call.inputs), call.output), call.site
        instrument.remove()


@torch.no_grad()
def test_calls_name_their_weights(model: Any, sequences: list[Tensor]) -> None:
    instrument = apply_plan(model, stock_plan(), "module")
    instrument.listener = recorder = Recorder()
    instrument.head_logits(model.model(sequences[0][None]).last_hidden_state[0])
    used = {name for call in recorder.calls for name in call.weights}
    assert used == {name for name, _ in model.named_parameters()}


def test_gradients_flow_through_an_aligned_model(model: Any, sequences: list[Tensor]) -> None:
    targets = torch.cat(sequences)
    inputs = packed(sequences)
    apply_plan(model, ALIGNED)
    logits = model(**inputs).logits[0]
    torch.nn.functional.cross_entropy(logits, targets).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    exact: Any = tiny.build("tiny:llama", dtype=torch.float32).double()
    logits = torch.cat([exact(ids[None]).logits[0] for ids in sequences])
    torch.nn.functional.cross_entropy(logits, targets).backward()
    for (name, got), wanted in zip(model.named_parameters(), exact.parameters(), strict=True):
        error = (got.grad.double() - wanted.grad).norm() / wanted.grad.norm()
        assert float(error) < 1e-4, name


def test_aligned_attention_is_refused_where_transformers_runs_it(model: Any) -> None:
    with pytest.raises(RecipeError, match="can only be stock"):
        apply_plan(model, ALIGNED, "module")
    assert "forward" not in model.model.norm.__dict__


def test_a_plan_without_a_rule_names_the_site(model: Any) -> None:
    rules = {name: contract for name, contract in ALIGNED.rules.items() if name != "gated"}
    with pytest.raises(UncoveredSiteError, match=r"model\.layers\.0\.mlp#gated"):
        apply_plan(model, Plan(name="partial", rules=rules))


def test_an_activation_without_a_kernel_names_the_site(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = ACT2FN["gelu_new"]
    with pytest.raises(UncoveredSiteError, match=r"layers\.0\.mlp#gated uses NewGELUActivation"):
        apply_plan(model, ALIGNED)


@torch.no_grad()
def test_an_override_runs_one_site_stock(model: Any, sequences: list[Tensor]) -> None:
    name = "model.layers.0.mlp.down_proj"
    plan = ALIGNED.model_copy(update={"overrides": {name: "stock"}})
    instrument = apply_plan(model, plan)
    contracts = {site.name: site.contract for site in instrument.sites}
    assert contracts[name] is None
    assert contracts["model.layers.1.mlp.down_proj"] == ALIGNED.rules["linear"]
    instrument.listener = recorder = Recorder()
    model.model(**packed(sequences[:1]))
    call = next(call for call in recorder.calls if call.site.name == name)
    stock = torch.nn.functional.linear(call.inputs["x"], model.model.layers[0].mlp.down_proj.weight)
    assert bits.equal(call.output, stock)


@torch.no_grad()
def test_what_a_plain_call_cannot_mean_is_refused(model: Any, sequences: list[Tensor]) -> None:
    instrument = apply_plan(model, ALIGNED)
    ids = sequences[0][None]
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(ContractError, match="pad on the right"):
        model(ids, attention_mask=mask, use_cache=False)
    cache = DynamicCache(config=model.config)
    model(ids[:, :5], past_key_values=cache)
    with pytest.raises(ContractError, match="use_cache=False"):
        model(ids[:, 5:6], past_key_values=cache)
    with pytest.raises(ContractError, match="count up by one"):
        model(ids, position_ids=torch.arange(3, 3 + ids.shape[1])[None], use_cache=False)
    with pytest.raises(ContractError, match="past the model's length"):
        model.model.rotary_emb(
            torch.zeros(1), torch.tensor([[model.config.max_position_embeddings]])
        )
    hidden = torch.randn(2, model.config.hidden_size)
    with pytest.raises(ContractError, match="must be positive"):
        instrument.head_logprob(hidden, torch.tensor([1, 2]), 0.0)
    with pytest.raises(ContractError, match="as many targets"):
        instrument.head_logprob(hidden, torch.tensor([1]))
    instrument.listener = Recorder(**{"model.norm": torch.zeros(1)})
    with pytest.raises(ContractError, match=r"graft for model\.norm"):
        model(ids, use_cache=False)
