"""Tiny models: deterministic, exact between dtypes, and not so uniform that equality is vacuous."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from zeromismatch.kernels.errors import UsageError
from zeromismatch.model_recipes import tiny
from zeromismatch.model_recipes.checkpoint import load_checkpoint
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.state import state_digest

SPECS = ("tiny:llama", "tiny:llama+untied", "tiny:llama+attention_bias+mlp_bias", "tiny:qwen2",
         "tiny:qwen3", "tiny:mistral", "tiny:gemma3_text", "tiny:gemma3_text+softcap",
         "tiny:gemma2", "tiny:granite", "tiny:llama+yarn", "tiny:llama+llama3",
         "tiny:gpt_oss+dense", "tiny:qwen3_next", "tiny:nemotron_h",
         "tiny:kimi_linear")  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_next_token_entropy_is_at_most_seventy_percent_of_uniform(spec: str) -> None:
    module = tiny.build(spec, dtype=torch.float32)
    ids = torch.randint(3, module.config.vocab_size, (2, 48))
    with torch.no_grad():
        log_probs = module(ids, use_cache=False).logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    share = float(entropy) / math.log(module.config.vocab_size)
    assert 0.2 < share <= 0.7


def test_sizes_are_big_enough_to_tell_the_truth() -> None:
    config = tiny.config_for("tiny:llama")
    assert config.hidden_size >= 320
    assert config.hidden_size & (config.hidden_size - 1)
    assert config.num_hidden_layers >= 2
    assert config.head_dim % 16 == 0
    assert min(config.hidden_size, config.intermediate_size, config.head_dim) >= 3 * 16
    assert config.num_attention_heads > config.num_key_value_heads > 1


def test_bfloat16_widens_exactly_to_float32() -> None:
    narrow = tiny.build("tiny:llama", dtype=torch.bfloat16).state_dict()
    wide = tiny.build("tiny:llama", dtype=torch.float32).state_dict()
    assert all(torch.equal(narrow[name].float(), wide[name]) for name in wide)


def test_weights_depend_on_seed_and_name_only() -> None:
    first = load_model("tiny:llama").state_digest
    assert load_model("tiny:llama").state_digest == first
    other = load_model("tiny:llama", seed=1).state_digest
    assert all(other[name] != digest for name, digest in first.items())
    biased = load_model("tiny:llama+attention_bias").state_digest
    assert biased["model.embed_tokens.weight"] == first["model.embed_tokens.weight"]


def test_the_weights_of_a_seed_never_change() -> None:
    """A recipe's digests must stay true on every machine and in every later version."""
    root = load_model("tiny:llama").weights_root
    assert root == EXPECTED_ROOT, root


EXPECTED_ROOT = "a240a40b3ada7dd1c7553e91b4b7984d"


@pytest.mark.parametrize("spec", ["tiny:", "tiny:bert", "tiny:llama+wings"])
def test_unknown_tiny_models_are_named_with_what_there_is(spec: str) -> None:
    with pytest.raises(UsageError, match="llama"):
        load_model(spec)


def test_correction_biases_of_routers_are_fp32_as_in_a_loaded_checkpoint(tmp_path: Path) -> None:
    model: Any = tiny.build("tiny:deepseek_v3", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path, dtype=torch.bfloat16)
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert state_digest(loaded) == state_digest(model)
