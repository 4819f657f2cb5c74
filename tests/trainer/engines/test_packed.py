"""The trainer's forward: same bits for any packing, differentiable, and nothing else."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import CapabilityError, UsageError
from zeromismatch.trainer.engines.base import Request, Sampling, Schedule, Slice, Step
from zeromismatch.trainer.engines.stock_attention import packed_stock_attention, stock_attention


@pytest.fixture
def packed(pairs: Any) -> Any:
    engine = pairs("aligned", "float32").packed
    engine.loaded.module.zero_grad()
    return engine


def test_packing_padding_and_order_change_no_bit(
    packed: Any, requests: Any, scenario: Any, bits_of: Any
) -> None:
    expected = bits_of(packed.run(scenario(packed.schedule("packed", requests), requests)))
    assert len(expected) == sum(len(r.tokens) - 1 for r in requests)
    whole = [Slice(request=r.id, start=0, stop=len(r.tokens)) for r in requests]
    for events in (
        packed.schedule("alone", requests).events,
        packed.schedule("mixed", requests).events,
        (Step(slices=tuple(reversed(whole)), padded_rows=5),),
    ):
        assert bits_of(packed.run(scenario(Schedule(events=events), requests))) == expected


@pytest.mark.parametrize("name", ["decode", "chunk:7", "prefix-hit", "preempt", "fuzz:0"])
def test_schedule_with_state_is_refused_with_the_engine_to_use(
    name: str, packed: Any, requests: Any, scenario: Any
) -> None:
    with pytest.raises(CapabilityError, match="use the paged engine"):
        packed.run(scenario(packed.schedule(name, requests), requests))


def test_logprobs_are_the_scores_of_sampled_tokens(
    packed: Any, requests: Any, scenario: Any, bits_of: Any
) -> None:
    scored = bits_of(packed.run(scenario(packed.schedule("alone", requests), requests)))
    order = packed.scored(requests)
    assert order == [(r.id, p) for r in requests for p in range(len(r.tokens)) if r.sampled_mask[p]]
    logprobs = packed.logprobs(requests)
    assert logprobs.requires_grad
    assert bits.int_view(logprobs).tolist() == [scored[token] for token in order]
    unmarked = (Request(id="x", tokens=(5, 6, 7)),)
    assert packed.scored(unmarked) == [("x", 1), ("x", 2)]


def test_micro_batches_change_no_logprob(packed: Any, requests: Any) -> None:
    with torch.no_grad():
        expected = packed.logprobs(requests)
        for max_rows in (70, 130, 1000):
            assert bits.equal(packed.logprobs(requests, max_rows=max_rows), expected)
    groups = packed.micro_batches(requests, max_rows=130)
    assert [[r.id for r in group] for group in groups] == [["r0", "r1"], ["r2", "r3"], ["r4"]]
    with pytest.raises(UsageError, match="max_rows of at least 70"):
        packed.logprobs(requests, max_rows=69)


def test_temperature_is_each_requests_own_unless_given(packed: Any) -> None:
    tokens = tuple(range(20, 60))
    warm = Request(id="w", tokens=tokens, sampling=Sampling(temperature=0.5))
    greedy = Request(id="g", tokens=tokens, sampling=Sampling(temperature=0.0))
    with torch.no_grad():
        own = packed.logprobs([warm, greedy]).chunk(2)
        at_half, at_one = packed.logprobs([warm], 0.5), packed.logprobs([warm], 1.0)
    assert bits.equal(own[0], at_half)
    assert bits.equal(own[1], at_one)
    assert not bits.equal(at_half, at_one)
    with pytest.raises(UsageError, match="above 0"):
        packed.logprobs([warm], 0.0)
    with pytest.raises(UsageError, match="no token can be scored"):
        packed.logprobs([Request(id="x", tokens=(4,))])


def gradients(packed: Any, requests: Any) -> dict[str, torch.Tensor]:
    module = packed.loaded.module
    module.zero_grad()
    packed.logprobs(requests).sum().backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    return found


def test_gradient_checkpointing_changes_no_bit(packed: Any, requests: Any) -> None:
    module = packed.loaded.module
    plain = gradients(packed, requests[:2])
    with torch.no_grad():
        logprobs = packed.logprobs(requests[:2])
    module.train()
    module.gradient_checkpointing_enable()
    try:
        again = gradients(packed, requests[:2])
        assert bits.equal(packed.logprobs(requests[:2]).detach(), logprobs)
    finally:
        module.gradient_checkpointing_disable()
        module.eval()
    assert plain.keys() == again.keys()
    assert all(bits.equal(plain[name], again[name]) for name in plain)


def test_gradient_agrees_with_untouched_autograd(packed: Any, requests: Any, tiny: Any) -> None:
    """Every parameter has a gradient, close to that of the stock model in fp64."""
    found = gradients(packed, requests[:1])
    module = tiny.module.double()
    ids = torch.tensor([requests[0].tokens])
    logits = module(ids, use_cache=False).logits[0, :-1]
    rows = torch.tensor(requests[0].sampled_mask[1:])
    logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[rows]
    logprobs.sum().backward()
    for name, parameter in module.named_parameters():
        scale = float(parameter.grad.abs().max())
        error = float((found[name].double() - parameter.grad).abs().max())
        assert error < 1e-4 * scale, name


def test_description_holds_what_may_change_bits(packed: Any) -> None:
    facts = packed.describe()
    assert facts["engine"] == "packed"
    assert facts["plan_digest"] == packed.instrument.plan.digest
    assert facts["weights_digest"] == packed.loaded.weights_root
    assert "attention.pages16.float32.cpu.v1" in facts["contracts"]
    assert facts["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 4}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])}],
    ids=str,
)
def test_stock_attention_of_packed_requests_is_that_of_each(options: dict[str, Any]) -> None:
    lengths = (5, 1, 9, 5, 2, 9, 5)
    start = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    rows = sum(lengths)
    q, k, v = (torch.randn(rows, heads, 8).requires_grad_() for heads in (4, 2, 2))
    together = packed_stock_attention(q, k, v, start, scale=0.3, **options)
    each = torch.cat([
        stock_attention(*(x[a:b] for x in (q, k, v)), scale=0.3, **options)
        for a, b in pairwise(start.tolist())
    ])  # fmt: skip
    assert bits.equal(together, each)
    g = torch.randn_like(each)
    for ours, theirs in zip(
        torch.autograd.grad(together, (q, k, v), g),
        torch.autograd.grad(each, (q, k, v), g),
        strict=True,
    ):
        assert bits.equal(ours + 0.0, theirs + 0.0)  # of either zero, the same one
