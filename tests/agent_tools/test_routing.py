"""Choices of experts, judged apart from the error of logprobs."""

from dataclasses import replace

import pytest
import torch

from zeromismatch.agent_tools.accuracy import measure_accuracy, reference_logprobs
from zeromismatch.agent_tools.gates.bench import engines_on
from zeromismatch.agent_tools.routing import Replay, RoutingTrace, explained, judged, slack
from zeromismatch.kernels.moe import Routing
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.plan import stock_plan
from zeromismatch.trainer.engines.base import Request

SITE = "model.layers.1.mlp.gate#experts"


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_token_sent_elsewhere_has_the_reference_of_where_it_went(name: str) -> None:
    model, pristine = load_model(f"tiny:{name}"), load_model(f"tiny:{name}")
    tokens = tuple(range(3, 15))
    request = Request(id="a", tokens=tokens, sampled_mask=(False,) * 4 + (True,) * 8)
    engines = engines_on(model, stock_plan())
    own, trace = RoutingTrace(), RoutingTrace()
    plain = engines.pack([request], own)
    forced = own.choices.forced(request)
    other = next(e for e in range(15, -1, -1) if e not in forced[SITE][5])
    moved = (*forced[SITE][:5], (*forced[SITE][5][:-1], other), *forced[SITE][6:])
    flipped = engines.pack([replace(request, forced=forced | {SITE: moved})], trace)
    engines.paged.close()

    healthy, replay = Replay(pristine.module, own), Replay(pristine.module, trace)
    fair = reference_logprobs(pristine, [request], replay=replay)
    of_stock = reference_logprobs(pristine, [request], replay=healthy)
    assert of_stock == reference_logprobs(pristine, [request])
    unfair = measure_accuracy(of_stock, ours=flipped, stock=plain)
    assert unfair.ours.largest > 100 * unfair.stock.largest
    assert measure_accuracy(fair, ours=flipped, stock=plain, of_stock=of_stock).passed

    error = slack(healthy)
    assert 0 < error < 1e-4
    assert judged(healthy, error).flipped == 0
    choices = judged(replay, error)
    assert (choices.flipped, choices.wrong) == (1, 1)
    assert judged(healthy, error, frozenset({("a", 2)})).wrong == len(healthy.seen)


def test_an_error_explains_a_choice_between_experts_that_score_alike() -> None:
    routing = Routing(num_experts=4, top_k=2, scoring="softmax", normed=True)
    scores = torch.tensor([3.0, 2.0, 1.99, 0.0], dtype=torch.float64)
    assert explained(scores, {0, 2}, routing, 0.006)
    assert not explained(scores, {0, 2}, routing, 0.004)
    assert not explained(scores, {0, 3}, routing, 0.5)
    assert not explained(scores, {0}, routing, 9.0)


def test_an_error_explains_a_choice_between_groups_that_rank_alike() -> None:
    routing = Routing(num_experts=6, top_k=2, scoring="sigmoid", normed=True, groups=3,
                      groups_kept=1)  # fmt: skip
    scores = torch.tensor([0.9, 0.1, 0.5, 0.49, 0.2, 0.1], dtype=torch.float64)
    assert explained(scores, {2, 3}, routing, 0.01)  # 0.99 against 1.0, each of two scores off
    assert not explained(scores, {2, 3}, routing, 0.002)
    assert not explained(scores, {4, 5}, routing, 0.1)
    assert not explained(scores, {0, 2}, routing, 0.1)  # of two groups, where one is kept
    two = replace(routing, groups_kept=2, top_k=1)
    assert not explained(scores, {2}, two, 0.1)  # the best group is kept, whatever the error
    assert explained(scores, {2}, two, 0.2)
