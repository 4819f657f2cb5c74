"""From a model to a recipe, on a tiny model: red, fixed, proven, written; and how it gets stuck."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zeromismatch.agent_tools import align as alignment
from zeromismatch.agent_tools.accuracy import measure_accuracy, reference_logprobs
from zeromismatch.agent_tools.drivers import autopilot
from zeromismatch.agent_tools.proof import prove
from zeromismatch.agent_tools.report import read_report
from zeromismatch.agent_tools.scenarios import default_requests
from zeromismatch.agent_tools.sides import Runner, Side
from zeromismatch.kernels.errors import RecipeError, UsageError
from zeromismatch.model_recipes.apply import apply
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import aligned_plan, stock_plan
from zeromismatch.model_recipes.schema import load_recipe
from zeromismatch.trainer.engines.base import Run


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("tiny:llama")


def score(model: LoadedModel, plan: str, side: str, requests: tuple) -> Run:
    return Runner(side=Side.parse(side), model=model, requests=requests, plan=plan).run()


def test_a_model_goes_from_red_to_a_recipe_that_a_second_model_can_adopt(
    model: LoadedModel, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    requests = default_requests(model, count=6, max_reply=16)
    result = alignment.align(
        model, requests, alignment.Options(out=out, command="zm align tiny:llama")
    )

    assert result.exit_code == 0, result.reason
    assert result.baseline.status == "DIVERGENT"
    assert {"linear", "attention"} <= {group.op_class for group in result.baseline.groups}
    assert all(claim.status == "pass" and claim.compared > 0 for claim in result.claims)
    assert "0 of" not in result.claims[0].control
    recipe = load_recipe(out / "recipe")
    assert recipe.plan.rules == aligned_plan("float32", "cpu").rules
    assert [item.verdict for item in recipe.evidence] == ["pass"] * 3
    assert recipe.model.spec in (out / "recipe" / "README.md").read_text()
    notes = (out / "recipe" / "NOTES.md").read_text()
    assert "linear.chain.float32.cpu.v1" in notes
    assert "linear: reduction order (" in notes  # the baseline's: the autopilot asks for no cause
    assert "unclassified" not in notes
    assert read_report(out).verdict == "EQUAL"
    other = load_model("tiny:llama")
    instrument = apply(other.module, out / "recipe")
    assert {site.contract for site in instrument.sites if site.op_class == "linear"} == {
        "linear.chain.float32.cpu.v1"
    }
    with pytest.raises(RecipeError, match="not for"):
        apply(load_model("tiny:llama", seed=1).module, out / "recipe")


def test_a_folder_in_use_is_refused_before_any_work(model: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    requests = default_requests(model, count=2, max_reply=4)
    with pytest.raises(UsageError, match="not an empty folder"):
        alignment.align(model, requests, alignment.Options(out=tmp_path, command="zm align"))
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_the_autopilot_stops_where_the_registry_has_nothing(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = autopilot.aligned_contract
    monkeypatch.setattr(
        autopilot,
        "aligned_contract",
        lambda name, *where: None if name == "attention" else offered(name, *where),
    )
    requests = alignment.shorten(default_requests(model, count=4, max_reply=8))
    outcome = autopilot.fly(model, requests)
    assert outcome.stuck is not None
    assert "attention" in outcome.stuck
    assert "self_attn" in outcome.stuck
    assert outcome.plan.is_stock
    assert {"reduction order"} <= {group.cause for group in outcome.divergences[-1].groups}


def test_stock_kernels_do_not_pass_the_proof(model: LoadedModel) -> None:
    prompts = [alignment.only_prompt(r) for r in default_requests(model, count=6, max_reply=12)]
    proof = prove(model, stock_plan(), prompts, pristine=load_model("tiny:llama"))
    assert not proof.passed
    assert proof.claims[0].claim.status == "fail"
    assert proof.claims[0].claim.differing > 0


def test_a_wrong_rotary_table_fails_the_accuracy_claim(model: LoadedModel) -> None:
    requests = default_requests(model, count=3, max_reply=12)
    reference = reference_logprobs(model, requests)
    stock = score(model, "stock", "packed:packed", requests)
    right = score(model, "aligned", "packed:packed", requests)
    wrong_model = load_model("tiny:llama")
    frequencies = wrong_model.module.model.rotary_emb.inv_freq
    with torch.no_grad():
        frequencies.mul_(1 + 2**-12)
        wrong_model.module.model.rotary_emb.original_inv_freq.copy_(frequencies)
    wrong = score(wrong_model, "stock", "packed:packed", requests)

    assert measure_accuracy(reference, ours=right, stock=stock).passed
    judged = measure_accuracy(reference, ours=wrong, stock=stock)
    assert not judged.passed
    assert judged.beyond > 0


def test_shortened_requests_keep_their_prompts() -> None:
    model = load_model("tiny:llama")
    requests = default_requests(model, count=5, max_reply=20)
    for short in alignment.shorten(requests, count=3, reply=4):
        whole = next(request for request in requests if request.id == short.id)
        assert short.tokens == whole.tokens[: len(short.tokens)]
        assert sum(short.sampled_mask) <= 4
        prompt = alignment.only_prompt(short)
        assert prompt.tokens == whole.tokens[: len(prompt.tokens)]
        assert not any(prompt.sampled_mask)
    assert alignment.only_prompt(replace(requests[0], sampled_mask=())) == replace(
        requests[0], sampled_mask=()
    )
