"""A mixture of experts in vLLM beside the trainer, on a CPU: equal bits, publication."""

from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def aligned(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sizes that vLLM's experts take on a CPU: multiples of 32."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=384, moe_intermediate_size=192, num_experts=16, num_experts_per_tok=4,
        norm_topk_prob=True, mlp_only_layers=[], num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, vocab_size=3011, tie_word_embeddings=True,
        max_position_embeddings=2048,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() > 1:
                tensor.normal_(0.0, 0.17 if "embed" in name else 0.06, generator=generator)
    folder = tmp_path_factory.mktemp("experts")
    model.save_pretrained(folder)
    return ask("aligned", str(folder))


def test_experts_in_vllm_have_the_trainers_bits(aligned: dict[str, Any]) -> None:
    assert aligned["described"]["plugin"]["AlignedMoeBlock"] == 2
    for name, found in aligned["policies"].items():
        assert found["tokens"] > 20, name
        assert found["differing"] == 0, name
    assert aligned["sampled"]["compared"] == 48
    assert aligned["sampled"]["differing"] == 0


def test_new_experts_are_published_in_place(aligned: dict[str, Any]) -> None:
    found = aligned["publication"]
    assert found["addresses"]
    assert found["root"]
    assert found["after"]["compared"] > 0
    assert found["after"]["differing"] == 0
