"""500 different schedules per architecture have the bits of one packed forward.

Schedules are drawn by hypothesis without randomness of its own, so every run tries the same ones;
those that failed once are in ``corpus/`` and come first. A failure here is shrunk; keep it with
``report.failure.save(CORPUS)``.
"""

from pathlib import Path

import pytest

from zeromismatch.agent_tools.fuzzing import FuzzReport, fuzz
from zeromismatch.model_recipes.models import DTypeName, load_model
from zeromismatch.trainer.engines.schedule_file import to_json

CORPUS = Path(__file__).parent / "corpus"
ARCHITECTURES = ("tiny:llama", "tiny:qwen2", "tiny:qwen3", "tiny:mistral", "tiny:gemma3_text",
                 "tiny:gpt_oss+dense")  # fmt: skip
KINDS = ("mixed", "decode", "draft", "padded", "hit", "again", "evict", "preempt", "resume")


def assert_equal(report: FuzzReport, examples: int) -> None:
    failure = report.failure
    assert failure is None, f"{failure.tokens} differ in\n{to_json(failure.schedule)}"
    assert report.replayed == len(list(CORPUS.glob("*.json"))) > 0
    assert report.distinct >= examples
    assert report.compared > 20 * examples
    rare = {kind: report.kinds[kind] for kind in KINDS if report.kinds[kind] < examples // 20}
    assert not rare


@pytest.mark.parametrize("spec", ARCHITECTURES)
def test_five_hundred_schedules_equal_the_packed_forward(spec: str) -> None:
    report = fuzz(load_model(spec), examples=500, corpus=CORPUS, rollouts=8)
    assert_equal(report, 500)
    assert report.rollouts == 8


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("spec", ARCHITECTURES)
def test_five_hundred_schedules_equal_the_packed_forward_in_bfloat16(spec: str) -> None:
    dtype: DTypeName = "bfloat16"
    assert_equal(fuzz(load_model(spec, dtype=dtype), examples=500, corpus=CORPUS), 500)


EXPERTS = ("tiny:qwen3_moe", "tiny:deepseek_v3")


@pytest.mark.parametrize("spec", EXPERTS)
def test_schedules_of_mixtures_of_experts_equal_the_packed_forward(spec: str) -> None:
    assert_equal(fuzz(load_model(spec), examples=60, corpus=CORPUS), 60)


@pytest.mark.parametrize("spec", [*ARCHITECTURES, "tiny:gemma2", "tiny:qwen2+window", *EXPERTS])
def test_schedules_equal_the_packed_forward_in_bfloat16(spec: str) -> None:
    dtype: DTypeName = "bfloat16"
    assert_equal(fuzz(load_model(spec, dtype=dtype), examples=60, corpus=CORPUS), 60)


VARIANTS = ("tiny:llama+untied", "tiny:llama+llama3", "tiny:qwen3+linear", "tiny:qwen3+dynamic",
            "tiny:qwen3+yarn", "tiny:gemma3_text+softcap", "tiny:granite")  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", VARIANTS)
def test_schedules_of_scaled_rotations_and_other_heads_equal_the_packed_forward(
    spec: str, dtype: DTypeName
) -> None:
    assert_equal(fuzz(load_model(spec, dtype=dtype), examples=20, corpus=CORPUS), 20)
