"""What the architectures bring beyond Llama: rotary scalings, heads with a tail, windows, sinks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from zeromismatch.agent_tools.accuracy import in_fp64
from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import ContractError, UncoveredSiteError
from zeromismatch.model_recipes import tiny
from zeromismatch.model_recipes.apply import apply_plan
from zeromismatch.model_recipes.head import find_tail
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.plan import aligned_plan, stock_plan
from zeromismatch.model_recipes.rotary_table import inverse_frequencies
from zeromismatch.model_recipes.sites import SiteCall

from .conftest import packed

ALIGNED = aligned_plan("float32", "cpu")
ROPES = ("linear", "dynamic", "yarn", "llama3")
BEYOND_LLAMA = ("tiny:qwen2", "tiny:qwen2+window", "tiny:qwen3", "tiny:mistral",
                "tiny:gemma3_text", "tiny:gemma3_text+softcap", "tiny:gemma2", "tiny:granite",
                "tiny:gpt_oss+dense", "tiny:qwen3_moe", "tiny:qwen3_moe+unnormed",
                "tiny:deepseek_v3", *(f"tiny:qwen3+{rope}" for rope in ROPES))  # fmt: skip


@pytest.mark.parametrize("spec", BEYOND_LLAMA)
@torch.no_grad()
def test_aligned_error_is_at_most_twice_the_stock_error(spec: str, sequences: list[Tensor]) -> None:
    model: Any = load_model(spec).module
    exact: Any = in_fp64(load_model(spec).module)
    longer = [*sequences, sequences[0].repeat(3)]  # windows bite, four pages
    reference = torch.cat([exact(ids[None]).logits[0] for ids in longer]).log_softmax(-1)
    stock = torch.cat([model(ids[None]).logits[0] for ids in longer]).log_softmax(-1)
    instrument = apply_plan(model, ALIGNED)
    aligned = model(**packed(longer)).logits[0].log_softmax(-1)
    instrument.remove()
    stock_error, aligned_error = (
        float((got.double() - reference).square().mean().sqrt()) for got in (stock, aligned)
    )
    assert 0 < aligned_error <= 2 * stock_error


@pytest.mark.parametrize("spec", ["tiny:qwen3", "tiny:gemma3_text+softcap", "tiny:granite",
                                  "tiny:gpt_oss+dense", "tiny:qwen3_moe",
                                  "tiny:deepseek_v3"])  # fmt: skip
def test_gradients_agree_with_fp64(spec: str, sequences: list[Tensor]) -> None:
    model, exact = load_model(spec).module, in_fp64(load_model(spec).module)
    instrument = apply_plan(model, ALIGNED)
    hidden = model.base_model(**packed(sequences))[0][0]  # type: ignore[operator]
    targets = torch.cat(sequences).roll(-1)
    instrument.head_logprob(hidden, targets).sum().backward()
    rows = torch.cat([exact(ids[None]).logits[0] for ids in sequences]).log_softmax(-1)
    rows.gather(1, targets[:, None]).sum().backward()
    wanted = dict(exact.named_parameters())
    for name, got in model.named_parameters():
        assert got.grad is not None, name
        reference = wanted[name].grad
        error = (got.grad.double() - reference).norm() / reference.norm()
        assert float(error) < 1e-4, name


@pytest.mark.parametrize("rope", ROPES)
def test_scaled_frequencies_are_the_modules_own(rope: str) -> None:
    rotary: Any = tiny.build(f"tiny:qwen3+{rope}", dtype=torch.float32).model.rotary_emb
    found = inverse_frequencies(rotary)
    assert found is not None
    assert float((found / rotary.inv_freq.double() - 1).abs().max()) < 1e-6


@torch.no_grad()
def test_dynamic_scaling_is_refused_where_a_token_would_depend_on_later_ones() -> None:
    model: Any = tiny.build("tiny:qwen3+dynamic", dtype=torch.float32)
    apply_plan(model, ALIGNED)
    ids = torch.arange(2100) % 900 + 3
    with pytest.raises(ContractError, match="longest sequence of the batch"):
        model(**packed([ids]))


def test_a_rope_formula_that_changed_is_not_followed() -> None:
    model: Any = tiny.build("tiny:qwen3+yarn", dtype=torch.float32)
    model.model.rotary_emb.inv_freq[9] *= 1.0001
    with pytest.raises(UncoveredSiteError, match=r"rope_type 'yarn'"):
        apply_plan(model, ALIGNED)


@pytest.mark.parametrize("spec", ["tiny:gemma3_text+softcap", "tiny:granite"])
@pytest.mark.parametrize("plan", [ALIGNED, stock_plan()])
@torch.no_grad()
def test_the_tail_of_the_head_is_a_site(spec: str, plan: Any, sequences: list[Tensor]) -> None:
    loaded = load_model(spec)
    model: Any = loaded.module
    tail = find_tail(model)
    assert tail is not None
    instrument = apply_plan(model, plan)
    last = [site.name for site in instrument.sites][-3:]
    assert last == ["lm_head", f"logits#{tail.kind}", "logprob"]
    hidden = torch.randn(5, 360)
    plain = instrument.head_logits(hidden)
    calls: list[SiteCall] = []
    instrument.listener = calls.append
    assert bits.equal(instrument.head_logits(hidden), plain)
    assert bits.equal(model.lm_head(hidden[None])[0].float(), plain)
    assert [call.site.name for call in calls] == last[:2] * 2
    targets = torch.arange(5)
    watched = instrument.head_logprob(hidden, targets, 0.7)
    instrument.listener = None
    assert bits.equal(instrument.head_logprob(hidden, targets, 0.7), watched)
    instrument.remove()
    assert getattr(model.config, tail.field) == tail.value


def test_a_config_that_names_a_tail_without_one_is_refused() -> None:
    model: Any = tiny.build("tiny:gemma3_text+softcap", dtype=torch.float32)

    class Halved(type(model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits / 2.0
            return output

    model.__class__ = Halved
    with pytest.raises(UncoveredSiteError, match=r"tanh|on the logits"):
        apply_plan(model, ALIGNED)


def test_stock_attention_keeps_the_softcap_that_sdpa_drops() -> None:
    assert load_model("tiny:gemma2").config._attn_implementation == "eager"
    assert load_model("tiny:gemma3_text").config._attn_implementation == "sdpa"


@pytest.mark.parametrize("spec", ["tiny:mistral", "tiny:gemma3_text", "tiny:qwen2+window"])
@torch.no_grad()
def test_windows_reach_attention(spec: str, sequences: list[Tensor]) -> None:
    windows: list[Any] = []
    model: Any = load_model(spec).module
    apply_plan(model, ALIGNED)

    class Spy:
        def attend(self, _layer: int, q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> Tensor:
            windows.append(options["window"])
            return q.new_zeros(*q.shape[:2], v.shape[-1])

    model(**packed(sequences), batch=Spy())
    assert 40 in windows


def test_the_experts_of_gpt_oss_are_named_and_refused() -> None:
    model = tiny.build("tiny:gpt_oss", dtype=torch.float32)
    with pytest.raises(UncoveredSiteError, match=r"layers\.0\.mlp\.router: .*torch\.topk"):
        apply_plan(model, ALIGNED)
