"""Recurrent layers in vLLM beside the trainer, on a CPU: equal bits, preemption, publication."""

from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1000)]

CHUNK = 32


@pytest.fixture(scope="module")
def found(ask: Any) -> dict[str, Any]:
    return ask("recurrent", "tiny:nemotron_h")


@pytest.mark.parametrize("policy", ["alone", "chunk:7", "decode", "prefix-hit", "preempt"])
def test_every_policy_has_the_trainers_bits(found: dict[str, Any], policy: str) -> None:
    run = found["policies"][policy]
    assert run["tokens"] > 20
    assert run["differing"] == 0


def test_prefixes_are_hit_and_requests_are_preempted(found: dict[str, Any]) -> None:
    assert found["policies"]["prefix-hit"]["hits"] >= 4
    assert found["policies"]["preempt"]["preemptions"] > 0
    assert found["policies"]["chunk:7"]["shortest"] > 2 * CHUNK


def test_blocks_are_chunks_and_the_plan_serves_every_site(found: dict[str, Any]) -> None:
    described = found["described"]
    assert described["vllm_block_size"] == CHUNK
    assert described["vllm_attention"] == ["AlignedImpl"]
    assert described["plugin"]["recurrence_ssd"] == 2
    assert described["vllm_weights"] == "read back"
    assert sorted({kind for kind, _ in found["states"]}) == ["conv", "kv", "recurrent"]
    assert {granule for _, granule in found["states"]} == {CHUNK}


def test_new_weights_are_published_in_place(found: dict[str, Any]) -> None:
    publication = found["publication"]
    assert publication["addresses"]
    assert publication["root"]
    assert publication["after"]["compared"] > 0
    assert publication["after"]["differing"] == 0


def test_what_does_not_fit_is_refused(found: dict[str, Any]) -> None:
    unplanned, blocks, plain = found["misfits"]
    assert "additional_config names none" in unplanned
    assert "chunks of [32] rows and vLLM's blocks of 16 tokens" in blocks
    assert "by its own architecture" in plain


def test_localize_sees_every_site(ask: Any) -> None:
    located = ask("located", "tiny:qwen3_next", "aligned")
    assert located["status"] == "EQUAL", located["reason"]
    assert located["self_test"]["passed"]
    assert located["coverage"]["share"] == 1.0
