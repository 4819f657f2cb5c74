"""On a GPU too: the trainer's packed forward and the paged rollout give one logprob per token."""

from typing import Any

import pytest
import torch

from zeromismatch.kernels.attention import PAGE
from zeromismatch.kernels.attention import gpu_flash3 as flash3
from zeromismatch.model_recipes.apply import find_sites
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import Plan, plan_from
from zeromismatch.trainer.engines.base import Sampling
from zeromismatch.trainer.engines.build import make_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}


def smollm2_shaped(dtype: torch.dtype, **changed: int) -> LoadedModel:
    """SmolLM2-135M's shape (heads of 64, 9 over 3) with seeded weights: no download needed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**SHAPE, **changed})
    torch.manual_seed(0)
    module = LlamaForCausalLM(config).eval()
    for parameter in module.parameters():  # rotary buffers stay fp32, as in a loaded model
        parameter.data = parameter.data.to(dtype)
    module = module.to("cuda")
    return LoadedModel(spec="smollm2-shaped", module=module, tokenizer=None, config=module.config)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("smollm2", torch.bfloat16),
        ("smollm2", torch.float16),
        ("smollm2", torch.float32),
        ("tiny:llama", torch.float32),
        ("tiny:gemma2", torch.bfloat16),
        ("tiny:gpt_oss+dense", torch.bfloat16),
    ],
)
def test_packed_equals_paged(
    spec: str, dtype: torch.dtype, requests: Any, scenario: Any, bits_of: Any
) -> None:
    name = str(dtype).removeprefix("torch.")
    if spec == "smollm2":
        loaded = smollm2_shaped(dtype)
    else:
        loaded = load_model(spec, dtype=name, device="cuda")  # type: ignore[arg-type]
    packed = make_engine("packed", loaded, "aligned")
    paged = make_engine("paged", loaded, "aligned", instrument=packed.instrument)
    try:
        expected = bits_of(packed.run(scenario(packed.schedule("packed", requests), requests)))
        assert len(expected) == sum(len(r.tokens) - 1 for r in requests)
        for schedule in ("mixed", "alone", "decode", "chunk:7", "prefix-hit", "preempt", "fuzz:3"):
            run = paged.run(scenario(paged.schedule(schedule, requests), requests))
            scored = bits_of(run)
            assert scored, schedule
            assert scored.items() <= expected.items(), schedule
        scores = packed.logprobs(requests)
        assert bool(torch.isfinite(scores).all())
        scores.sum().backward()
        missing = [n for n, p in loaded.module.named_parameters() if p.grad is None]
        assert not missing
    finally:
        packed.close()


def test_a_plan_may_adopt_flash_attention_3(requests: Any, scenario: Any, bits_of: Any) -> None:
    if flash3.missing():
        pytest.skip(str(flash3.missing()))
    loaded = smollm2_shaped(torch.bfloat16, num_attention_heads=6, head_dim=128)
    ours = plan_from(
        "aligned", find_sites(loaded.module), loaded.dtype, loaded.device, loaded.identity
    )
    rule = {"attention": flash3.contract_id(torch.bfloat16)}
    found: list[Any] = []
    for plan in (ours, Plan(name="flash3", rules={**ours.rules, **rule})):
        packed = make_engine("packed", loaded, plan)
        paged = make_engine("paged", loaded, plan, instrument=packed.instrument)
        try:
            expected = bits_of(packed.run(scenario(packed.schedule("packed", requests), requests)))
            for schedule in ("mixed", "decode", "chunk:7", "prefix-hit"):
                run = paged.run(scenario(paged.schedule(schedule, requests), requests))
                scored = bits_of(run)
                assert scored, schedule
                assert scored.items() <= expected.items(), schedule
            packed.logprobs(requests).sum().backward()
            found.append(expected)
        finally:
            packed.close()
    assert found[0] != found[1]


def test_stock_engines_differ_on_the_same_requests(
    requests: Any, scenario: Any, bits_of: Any
) -> None:
    # wide enough that cuBLAS splits the sums of few rows: at SmolLM2's own widths it does not
    loaded = smollm2_shaped(
        torch.bfloat16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
        num_key_value_heads=8, num_hidden_layers=2,
    )  # fmt: skip
    packed = make_engine("packed", loaded, "stock")
    paged = make_engine("paged", loaded, "stock", instrument=packed.instrument)
    try:
        left = bits_of(packed.run(scenario(packed.schedule("packed", requests), requests)))
        right = bits_of(paged.run(scenario(paged.schedule("decode", requests), requests)))
        assert left.keys() == right.keys()
        assert left != right
    finally:
        packed.close()


def test_what_a_rollout_sampled_is_what_the_trainer_scores(scenario: Any, bits_of: Any) -> None:
    from zeromismatch.trainer.engines.base import Request

    loaded = smollm2_shaped(torch.bfloat16)
    packed = make_engine("packed", loaded, "aligned")
    paged = make_engine("paged", loaded, "aligned", instrument=packed.instrument)
    try:
        prompts = [
            Request(
                id=f"p{i}",
                tokens=tuple(range(5 + i, 5 + i + 3 * PAGE + 7 * i)),
                sampling=Sampling(max_new_tokens=20, temperature=0.8, seed=i),
            )
            for i in range(4)
        ]
        run = paged.generate(prompts)
        sampled = set(bits_of(run).items())
        again = packed.run(scenario(packed.schedule("packed", run.requests), run.requests))
        scored = bits_of(again)
        assert len(sampled) >= 80
        assert all(scored[token] == value for token, value in sampled)
    finally:
        packed.close()
