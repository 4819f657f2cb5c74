"""vLLM beside the trainer, on a CPU: equal bits, named mismatches, publication, refusals.

What `make test` runs of it takes under two minutes on two cores; `make test-vllm` runs all.
"""

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


def test_every_policy_and_what_is_sampled_has_the_trainers_bits(ask: Any, checkpoint: str) -> None:
    """One engine, asked everything in one test: two workers would build one each."""
    found = ask("aligned", checkpoint)
    policies = found["policies"]
    assert sorted(policies) == ["alone", "batched", "chunk:7", "decode", "mixed", "prefix-hit"]
    for name, policy in policies.items():
        assert policy["tokens"] > 20, name
        assert policy["differing"] == 0, name
    assert policies["prefix-hit"]["hits"] >= 4
    assert policies["chunk:7"]["chunked"] == 4
    assert policies["batched"]["steps"] == 1
    assert policies["decode"]["steps"] > policies["alone"]["steps"]
    sampled_tokens_have_the_trainers_bits(found["sampled"])
    the_engine_says_what_serves_it(found["described"])
    publication_is_whole_or_not_at_all(found["publication"])


def sampled_tokens_have_the_trainers_bits(sampled: dict[str, Any]) -> None:
    assert sampled["compared"] == 48
    assert sampled["differing"] == 0
    assert sampled["facts"]["mixed_steps"] > 0
    assert sampled["facts"]["chunked_prompts"] > 0


def the_engine_says_what_serves_it(described: dict[str, Any]) -> None:
    assert described["vllm_attention"] == ["AlignedImpl"]
    assert described["vllm_logprobs_mode"] == "raw_logprobs"
    assert described["vllm_weights"] == "read back"
    assert described["plugin"]["AlignedRMSNorm"] == 5


def publication_is_whole_or_not_at_all(found: dict[str, Any]) -> None:
    assert found["refused"] == ["partial: UsageError", "foreign: UsageError", "late: BudgetError"]
    assert found["kept"]
    assert found["addresses"]
    assert found["root"]
    assert found["versions"] == [1]
    assert found["after"]["compared"] > 0
    assert found["after"]["differing"] == 0


def test_gates_pass_with_vllm_as_rollout(ask: Any, checkpoint: str) -> None:
    found = ask("gated", checkpoint)
    assert found["exit_code"] == 0
    for gate in found["gates"]:
        assert gate["verdict"] == "pass", gate
        assert gate["compared"] > 1000
        assert gate["differing"] == 0
        assert gate["red_controls"] > 0


@pytest.mark.long
def test_new_weights_between_two_steps_go_to_the_next_token(ask: Any, checkpoint: str) -> None:
    found = ask("continued", checkpoint)["versions"]
    assert all(each["tokens"] > 0 for each in found.values())
    assert [each["differing"] for each in found.values()] == [0, 0, 0]


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the recipe is that a test makes and another trains on."""
    return str(tmp_path_factory.mktemp("proven"))


@pytest.mark.long
def test_a_recipe_for_vllm_repeats_and_trains(ask: Any, checkpoint: str, proven: str) -> None:
    found = ask("trained", checkpoint, proven)
    assert found["align"] == "EQUAL", found["reason"]
    assert found["verified"] == "pass", found["why"]
    for run in found["runs"].values():
        assert run["status"] == "pass"
        assert run["kernel_compared"] > 0
        assert run["kernel_unequal"] == 0


@pytest.mark.long
def test_it_trains_over_ray_with_a_sharded_learner(ask: Any, checkpoint: str, proven: str) -> None:
    if not Path(proven, "align").exists():  # asked for alone
        ask("trained", checkpoint, proven)
    run = ask("over_ray", proven)
    assert run["status"] == "pass"
    assert run["kernel_compared"] == 64
    assert run["kernel_unequal"] == 0
    assert "use placement processes or ray" in run["refused"]


@pytest.mark.long
def test_localize_finds_nothing_under_a_plan(ask: Any, checkpoint: str) -> None:
    found = ask("located", checkpoint, "aligned")
    assert found["status"] == "EQUAL", found["reason"]
    assert found["self_test"]["passed"]
    assert found["coverage"]["share"] == 1.0


def test_localize_names_vllms_own_mismatches(ask: Any, checkpoint: str) -> None:
    found = ask("located", checkpoint, "stock")
    assert found["status"] == "DIVERGENT"
    groups = {group["op_class"]: group for group in found["groups"]}
    assert {"linear", "attention", "lm_head"} <= groups.keys()
    assert groups["linear"]["count"] == 14
    assert groups["linear"]["cause"] == "reduction order"
    assert found["confirmation"]["confirmed"]
    assert found["self_test"]["passed"]


@pytest.mark.long
def test_taps_inside_operators_name_the_first_that_differs(ask: Any, checkpoint: str) -> None:
    found = ask("tapped", checkpoint)
    plain, planted = found["plain"], found["planted"]
    assert plain["status"] == "EQUAL", plain["reason"]
    assert plain["self_test"]["passed"], plain["self_test"]
    assert "named model.layers.0.mlp.gate_up_proj, row 0" in plain["self_test"]["activation"]
    assert plain["coverage"]["share"] >= 0.8
    assert {"lm_head", "logprob"} <= set(plain["coverage"]["right_only"])
    assert planted["status"] == "DIVERGENT"
    assert planted["first_divergence"]["site"] == "model.layers.0.mlp#gated"


@pytest.mark.long
def test_without_a_recipe_the_plug_in_changes_nothing(ask: Any, checkpoint: str) -> None:
    found = ask("inert", checkpoint)
    assert "LlamaForCausalLM" in found["loaded"]
    assert found["class"] == "vllm.model_executor.models.llama.LlamaForCausalLM"
    assert found["evidence"]["layers"] == {}
    assert found["replaced"] == []


def test_a_recipe_is_adopted_in_two_lines(ask: Any, checkpoint: str, tmp_path: Path) -> None:
    found = ask("adopted", checkpoint, str(tmp_path / "recipe"))
    assert found["tokens"] == 48
    assert found["differing"] == 0
    assert "temperature=0.7, top_p=0.9" in found["unplain"]


@pytest.mark.long
def test_engines_are_told_by_options_or_by_a_block(
    ask: Any, checkpoint: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "recipe")
    found = ask("told", checkpoint, folder)
    assert found["verl"] == {"zero_mismatch": folder}
    assert "no vLLM engine was built" in found["errors"][0]
    assert "names 'elsewhere'" in found["errors"][1]
    assert not found["outside"]


def test_everything_a_recipe_does_not_cover_is_one_list(ask: Any, checkpoint: str) -> None:
    found = " | ".join(ask("refused", checkpoint)["violations"])
    for part in (
        "tensor parallelism of 2",
        "speculative decoding (ngram)",
        "a KV cache of fp8_e5m2",
        "logprobs_mode processed_logprobs",
        "dtype bfloat16: the recipe is for float32",
        "VLLM_BATCH_INVARIANT: without effect",
    ):
        assert part in found


@pytest.mark.long
def test_another_release_and_a_plug_in_that_was_not_loaded_are_named(
    ask: Any, checkpoint: str
) -> None:
    release, plug_in = ask("unloaded", checkpoint)["errors"]
    assert "has no vllm.config.of_another_release; install a release that was tried" in release
    assert "did not load the plug-in zero_mismatch" in plug_in
    assert "check that VLLM_PLUGINS allows it" in plug_in
