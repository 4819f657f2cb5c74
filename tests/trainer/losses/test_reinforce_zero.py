"""REINFORCE Zero's gradient: by hand in fp64, by finite differences, over ranks, exactly zero."""

import math
from dataclasses import replace

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import NonFiniteError, UsageError
from zeromismatch.trainer.loop.records import Batch
from zeromismatch.trainer.losses.advantage import group_mean
from zeromismatch.trainer.losses.catalogue import LOSSES, loss_named
from zeromismatch.trainer.losses.reinforce_zero import direct, loss

from .conftest import LENGTHS, LOGP, MU, REWARDS, make_batch


def as_fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def by_hand() -> list[float]:
    """−A·w/(B·T) written out with Python's fp64 numbers."""
    means = {0: (1.0 + 0.25) / 2, 1: (1.0 + 0.25) / 2, 2: 0.25, 3: 0.25}
    gradient, token = [], 0
    for response, length in enumerate(LENGTHS):
        advantage = REWARDS[response] - means[response]
        for _ in range(length):
            w = math.exp(as_fp32(LOGP[token]) - as_fp32(MU[token]))
            gradient.append(-advantage * w / (4 * length))
            token += 1
    return gradient


def test_the_gradient_is_the_fp64_one_rounded_once(logp: torch.Tensor):
    output = loss(make_batch(advantages=group_mean), logp)
    output.loss.backward()
    expected = torch.tensor(by_hand(), dtype=torch.float64).to(torch.float32)
    assert logp.grad is not None
    assert bits.equal(logp.grad, expected)
    assert not output.rejected.any()


def test_finite_differences_of_the_direct_form_meet_the_gradient(logp: torch.Tensor):
    batch = make_batch(advantages=group_mean)
    loss(batch, logp).loss.backward()
    assert logp.grad is not None
    step = 1e-6
    for token in range(len(LOGP)):
        ends = []
        for sign in (1, -1):
            moved = logp.detach().double()
            moved[token] += sign * step
            ends.append(float(direct(batch, moved)))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx(float(logp.grad[token]), rel=1e-6, abs=1e-9)


def test_a_one_token_response_weighs_as_much_as_a_long_one():
    batch = make_batch(advantages=group_mean)
    logp = batch.mu.clone().requires_grad_()
    loss(batch, logp).loss.backward()
    assert logp.grad is not None
    sums = torch.zeros(4, dtype=torch.float64).index_add_(0, batch.response, logp.grad.double())
    expected = torch.tensor([-0.375, 0.375, 0.25, -0.25], dtype=torch.float64) / 4
    torch.testing.assert_close(sums, expected, rtol=1e-7, atol=0)  # fp64 reference


def test_tokens_of_all_turns_share_one_mean():
    """Turns of 3 and 2 action tokens: 1/T is 1/5 for each, not 1/3 and 1/2."""
    batch = make_batch(advantages=group_mean)
    logp = batch.mu.clone().requires_grad_()
    loss(batch, logp).loss.backward()
    assert logp.grad is not None
    two_turns = logp.grad[batch.response == 1]
    assert set(two_turns.tolist()) == {as_fp32(0.375 / (4 * 5))}


def test_equal_rewards_give_exactly_zero(logp: torch.Tensor):
    batch = make_batch((0.1, 0.1, 0.3, 0.3), advantages=group_mean)
    loss(batch, logp).loss.backward()
    assert logp.grad is not None
    assert torch.count_nonzero(logp.grad) == 0
    thirds = group_mean(torch.tensor([0.1] * 3, dtype=torch.float64), torch.zeros(3))
    assert torch.count_nonzero(thirds) == 0
    assert 0.1 - sum([0.1] * 3) / 3 != 0  # what a plain mean leaves


def test_at_equal_logprobs_it_is_plain_reinforce_bit_for_bit():
    batch = make_batch(advantages=group_mean)
    gradients = []
    for name in ("reinforce_zero", "synchronous", "stock_kernels", "truncated", "masked"):
        logp = batch.mu.clone().requires_grad_()
        output = loss_named(name)(batch, logp)
        output.loss.backward()
        assert logp.grad is not None
        gradients.append(logp.grad)
        assert set(output.weights.tolist()) == {1.0}
    assert all(bits.equal(gradients[0], other) for other in gradients[1:])


@pytest.mark.parametrize("split", [1, 2, 3])
def test_ranks_that_share_the_responses_give_the_same_bits(logp: torch.Tensor, split: int):
    batch = make_batch(advantages=group_mean)
    whole = loss(batch, logp)
    whole.loss.backward()
    pieces = []
    for rows in (range(split), range(split, 4)):
        part, tokens = shard(batch, list(rows))
        own = logp.detach()[tokens].clone().requires_grad_()
        output = loss(part, own)
        output.loss.backward()
        assert own.grad is not None
        pieces.append(own.grad)
    assert logp.grad is not None
    assert bits.equal(torch.cat(pieces), logp.grad)


def shard(batch: Batch, rows: list[int]) -> tuple[Batch, torch.Tensor]:
    """One rank's responses; B stays the update's."""
    tokens = torch.isin(batch.response, torch.tensor(rows))
    return replace(
        batch,
        mu=batch.mu[tokens],
        versions=batch.versions[tokens],
        response=batch.response[tokens] - rows[0],
        lengths=batch.lengths[rows],
        rewards=batch.rewards[rows],
        group=batch.group[rows],
        advantages=batch.advantages[rows],
    ), tokens


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stops_the_update_with_its_place(logp: torch.Tensor, value: float):
    batch = make_batch(advantages=group_mean)
    broken = logp.detach().clone()
    broken[4] = value
    with pytest.raises(NonFiniteError, match="action token 3 of response 1") as error:
        loss(batch, broken.requires_grad_())
    assert "stops before the optimiser" in str(error.value)


def test_a_ratio_beyond_fp32_stops_the_update():
    batch = make_batch(mu=(-200.0, *MU[1:]), advantages=group_mean)
    with pytest.raises(NonFiniteError, match=r"exp\(logp − mu\)"):
        loss(batch, torch.tensor(LOGP))


def test_a_reward_that_is_no_number_is_refused_by_name():
    rewards = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    with pytest.raises(NonFiniteError, match=r"response 1 \(group 5\)"):
        group_mean(rewards, torch.tensor([5, 5]))


def test_a_group_with_a_member_missing_is_refused():
    rewards = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    with pytest.raises(UsageError, match="unequal sizes"):
        group_mean(rewards, torch.tensor([5, 5, 6]))


def test_an_empty_batch_is_refused(logp: torch.Tensor):
    with pytest.raises(UsageError, match="at least one"):
        loss(make_batch((), (), (), advantages=group_mean), logp[:0])


def test_names_are_unique_and_an_unknown_one_lists_them():
    assert len(LOSSES) == 19
    with pytest.raises(UsageError, match="reinforce_zero, synchronous"):
        loss_named("ppo")
