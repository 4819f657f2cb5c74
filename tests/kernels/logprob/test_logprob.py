"""Log-probabilities: defined bits, the temperature before the softmax, no NaN hidden."""

import math

import pytest
import torch

from zeromismatch.kernels import adversarial, bits
from zeromismatch.kernels.contract import implementations
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.logprob import lm_head, logprob
from zeromismatch.kernels.reference import logprob as reference

INFINITY = float("inf")


def usable(name: str) -> list:
    return [each for each in implementations(f"{name}.float32.cpu.v1") if each.missing() is None]


def rows(count: int, vocabulary: int, kind: str = "unequal"):
    logits = adversarial.rows(count, vocabulary, seed=count, kind=kind)
    targets = adversarial.integers((count,), vocabulary, seed=vocabulary)
    temperature = torch.rand(count, generator=torch.Generator().manual_seed(5)) * 2 + 0.05
    return logits, targets, temperature


def exact(logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    log_softmax = torch.log_softmax(logits.double() / temperature.double()[:, None], dim=1)
    return log_softmax.gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("kind", adversarial.KINDS)
@pytest.mark.parametrize("vocabulary", [1, 2, 15, 16, 17, 100, 1003])
def test_every_variant_has_the_bits_of_the_reference(vocabulary, kind):
    logits, targets, temperature = rows(9, vocabulary, kind)
    grad = adversarial.rows(1, 9, seed=3)[0]
    expected = reference.logprob(logits, targets, temperature)
    d_logits = reference.grad_logits(logits, targets, temperature, *expected[1:], grad)
    for each in usable("logprob.lanes16"):
        found = each.run(logits, targets, temperature)
        assert all(bits.equal(*pair) for pair in zip(found, expected, strict=True)), each.name
    for each in usable("logprob_grad.lanes16"):
        found = each.run(logits, targets, temperature, *expected[1:], grad)
        assert bits.equal(found, d_logits), each.name
        in_place = logits.clone()
        each.run(in_place, targets, temperature, *expected[1:], grad, in_place)
        assert bits.equal(in_place, d_logits), each.name


def test_the_logarithm_is_right_to_half_an_ulp():
    torch.manual_seed(0)
    s = torch.cat(
        (1.0 + torch.rand(20_000), torch.rand(20_000) * 200_000 + 1.0, torch.tensor([1.0]))
    )
    assert bits.equal(reference.log32(s), torch.log(s.double()).float())


def test_logprob_is_accurate():
    logits, targets, temperature = rows(64, 2000, "plain")
    error = logprob(logits, targets, temperature).double() - exact(logits, targets, temperature)
    stock = torch.log_softmax(logits / temperature[:, None], dim=1).gather(1, targets[:, None])[
        :, 0
    ]
    stock_error = stock.double() - exact(logits, targets, temperature)
    assert error.abs().max() <= 2 * stock_error.abs().max()


def test_no_logprob_is_positive_and_they_sum_to_one():
    for kind in adversarial.KINDS:
        logits, _, _ = rows(1, 300, kind)
        every = logprob(logits.expand(300, 300), torch.arange(300), 0.7)
        assert (every <= 0).all()
        assert abs(every.double().exp().sum().item() - 1) < 1e-5
    alone = logprob(torch.tensor([[3.5]]), torch.tensor([0]))
    assert bits.equal(alone, torch.zeros(1))


def test_temperature_divides_the_logits_not_the_logprob():
    logits = adversarial.rows(1, 32_000, seed=0, kind="plain") * 3
    target = logits.argmax(dim=1)
    raw, tempered = logprob(logits, target), logprob(logits, target, 0.6)
    assert (raw - tempered).abs() > 0.5  # a ratio far from 1 if one side forgets the temperature
    assert (raw / 0.6 - tempered).abs() > 0.5  # and dividing afterwards is no remedy
    assert (tempered.double() - exact(logits, target, torch.tensor([0.6]))).abs() < 1e-5


def test_one_temperature_per_row_equals_rows_alone():
    logits, targets, temperature = rows(12, 500)
    together = logprob(logits, targets, temperature)
    for row in range(12):
        one = slice(row, row + 1)
        assert bits.equal(
            logprob(logits[one], targets[one], temperature[row].item()), together[one]
        )


def test_several_candidates_of_one_position_are_rows_of_their_own():
    logits, _, _ = rows(3, 50)
    candidates = torch.tensor([[4, 9], [4, 9], [0, 49]])
    flat = logprob(logits.repeat_interleave(2, dim=0), candidates.view(-1)).view(3, 2)
    for k in range(2):
        assert bits.equal(flat[:, k].contiguous(), logprob(logits, candidates[:, k]))
    with pytest.raises(ContractError, match="one row each"):
        logprob(logits, candidates)


@pytest.mark.parametrize("place", [0, 14, 15, 16, 40, 99])
def test_a_nan_logit_makes_its_row_nan_and_no_other(place):
    logits, targets, temperature = rows(5, 100)
    healthy = logprob(logits, targets, temperature)
    logits[2, place] = float("nan")
    for each in usable("logprob.lanes16"):
        found = each.run(logits, targets, temperature)[0]
        assert found[2].isnan()
        assert bits.equal(found[[0, 1, 3, 4]], healthy[[0, 1, 3, 4]])


def test_masked_tokens_count_for_nothing():
    logits, targets, _ = rows(4, 40)
    padded = torch.full((4, 75), -INFINITY)
    padded[:, :40] = logits
    padded.requires_grad_()
    lp = logprob(padded, targets)
    assert bits.equal(lp.detach(), logprob(logits, targets))
    lp.sum().backward()
    assert bits.equal(padded.grad[:, 40:].contiguous(), torch.zeros(4, 35))
    assert logprob(padded.detach(), torch.full((4,), 74)).eq(-INFINITY).all()
    assert logprob(torch.full((1, 8), -INFINITY), torch.tensor([0])).isnan().all()


def test_the_gradient_agrees_with_an_independent_fp64_graph():
    logits, targets, temperature = rows(20, 300, "plain")
    grad = torch.randn(20, generator=torch.Generator().manual_seed(1))
    ours, independent = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logprob(ours, targets, temperature).backward(grad)
    exact(independent, targets, temperature).backward(grad.double())
    assert (ours.grad.double() - independent.grad).norm() <= 1e-5 * independent.grad.norm()


def test_rows_and_threads_do_not_matter():
    logits, targets, temperature = rows(37, 777)
    whole = logprob(logits, targets, temperature)
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert bits.equal(logprob(logits, targets, temperature), whole)
    finally:
        torch.set_num_threads(before)
    order = torch.randperm(37)
    assert bits.equal(logprob(logits[order], targets[order], temperature[order]), whole[order])
    strided = torch.stack((logits, logits), dim=2)[:, :, 0]
    assert bits.equal(logprob(strided, targets, temperature), whole)
    assert logprob(logits[:0], targets[:0]).shape == (0,)


def test_the_head_keeps_its_fp32_accumulator():
    h = adversarial.rows(6, 48, seed=1, dtype=torch.bfloat16)
    weight = adversarial.rows(70, 48, seed=2, dtype=torch.bfloat16)
    logits = lm_head(h, weight)
    assert logits.dtype == torch.float32
    assert bits.equal(logits, lm_head(h.float(), weight.float()))
    assert bits.equal(logits, reference.lm_head(h, weight))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, INFINITY, 1e-60])
def test_a_temperature_that_is_not_finite_and_positive_is_refused(temperature):
    logits, targets, _ = rows(3, 20)
    for given in (temperature, torch.tensor([1.0, temperature, 1.0])):
        with pytest.raises(ContractError, match="finite and positive"):
            logprob(logits, targets, given)


def test_unusable_tensors_are_refused_with_the_next_step():
    logits, targets, temperature = rows(3, 20)
    for arguments, words in [
        ((logits.bfloat16(), targets), "lm_head"),
        ((logits[0], targets), "lm_head"),
        ((logits, targets.to(torch.int32)), "int64"),
        ((logits, targets + 20), "outside the vocabulary"),
        ((logits, targets - 100), "outside the vocabulary"),
        ((logits, targets, temperature[:2]), "one value per row"),
        ((logits, targets, temperature.double()), "one value per row"),
        ((logits, targets, temperature.clone().requires_grad_()), "detach"),
    ]:
        with pytest.raises(ContractError, match=words):
            logprob(*arguments)
