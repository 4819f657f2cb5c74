"""The fused head and logprob: the bits of the two functions, without all rows' logits at once."""

import pytest
import torch

from zeromismatch.kernels import adversarial, bits
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.linear import grad_bias, grad_input, grad_weight
from zeromismatch.kernels.logprob import fused, lm_head, lm_head_logprob, logprob

DTYPES = [torch.float32, torch.bfloat16]
ROWS, VOCABULARY, WIDTH = 45, 131, 50


def tensors(dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    h = adversarial.rows(ROWS, WIDTH, seed=1, dtype=dtype, kind="plain")
    weight = adversarial.rows(VOCABULARY, WIDTH, seed=2, dtype=dtype, kind="plain")
    bias = adversarial.rows(1, VOCABULARY, seed=3, dtype=dtype, kind="plain")[0]
    targets = adversarial.integers((ROWS,), VOCABULARY, seed=4)
    return h, weight, bias, targets, torch.rand(ROWS, generator=generator) + 0.3


@pytest.fixture(params=[1, 16, 45])
def block_of_rows(request, monkeypatch):
    """Row blocks are schedule: small ones here, so that a few rows need many."""
    monkeypatch.setattr(fused, "MOST_ROWS", request.param)
    monkeypatch.setattr(fused, "LEAST_ROWS", 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("block_of_rows")
def test_fused_equals_head_then_logprob(dtype):
    h, weight, bias, targets, temperature = tensors(dtype)
    for given in (None, bias):
        apart = logprob(lm_head(h, weight, given), targets, temperature)
        assert bits.equal(lm_head_logprob(h, weight, targets, given, temperature), apart)
    plain = logprob(lm_head(h, weight), targets)
    assert bits.equal(lm_head_logprob(h, weight, targets), plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("block_of_rows")
def test_fused_gradients_are_single_chains_over_all_tokens(dtype):
    h, weight, bias, targets, temperature = tensors(dtype)
    grad = torch.randn(ROWS, generator=torch.Generator().manual_seed(2))
    leaves = [each.clone().requires_grad_() for each in (h, weight, bias)]
    lp = lm_head_logprob(leaves[0], leaves[1], targets, leaves[2], temperature)
    found = torch.autograd.grad(lp, leaves, grad)
    logits = lm_head(h, weight, bias).requires_grad_()
    (d_logits,) = torch.autograd.grad(logprob(logits, targets, temperature), logits, grad)
    assert bits.equal(found[0], grad_input(d_logits, weight))
    assert bits.equal(found[1], grad_weight(d_logits, h, out_dtype=dtype))
    assert bits.equal(found[2], grad_bias(d_logits, out_dtype=dtype))


@pytest.mark.parametrize("kept_floats", [0, 20 * VOCABULARY, 1 << 22])
def test_logits_that_were_kept_and_those_computed_again_give_one_gradient(kept_floats, monkeypatch):
    monkeypatch.setattr(fused, "MOST_ROWS", 16)
    h, weight, bias, targets, temperature = tensors()
    grad = torch.randn(ROWS, generator=torch.Generator().manual_seed(2))

    def gradients(kept):
        monkeypatch.setattr(fused, "KEPT_FLOATS", kept)
        leaves = [each.clone().requires_grad_() for each in (h, weight, bias)]
        lp = lm_head_logprob(leaves[0], leaves[1], targets, leaves[2], temperature)
        first = torch.autograd.grad(lp, leaves, grad, retain_graph=True)
        return first, torch.autograd.grad(lp, leaves, grad)

    wanted, _ = gradients(0)
    for found in gradients(kept_floats):  # the second pass finds what was kept overwritten
        assert all(bits.equal(own, other) for own, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_gradients_agree_with_an_independent_fp64_graph(dtype):
    h, weight, bias, targets, temperature = tensors(dtype)
    grad = torch.randn(ROWS, generator=torch.Generator().manual_seed(2))
    ours = [each.clone().requires_grad_() for each in (h, weight, bias)]
    exact = [each.double().requires_grad_() for each in (h, weight, bias)]
    lp = lm_head_logprob(ours[0], ours[1], targets, ours[2], temperature)
    logits = (exact[0] @ exact[1].t() + exact[2]) / temperature.double()[:, None]
    independent = torch.log_softmax(logits, dim=1).gather(1, targets[:, None])[:, 0]
    found = torch.autograd.grad(lp, ours, grad)
    expected = torch.autograd.grad(independent, exact, grad.double())
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    for left, right in zip(found, expected, strict=True):
        assert (left.double() - right).norm() <= rtol * right.norm()


def test_rows_do_not_depend_on_the_batch():
    h, weight, bias, targets, temperature = tensors()
    whole = lm_head_logprob(h, weight, targets, bias, temperature)
    for rows in (1, 2, 3, 7, 13, 14, 15, 29):
        some = lm_head_logprob(h[:rows], weight, targets[:rows], bias, temperature[:rows])
        assert bits.equal(some, whole[:rows])


def test_only_wanted_gradients_are_made_and_nothing_is_needed_without_rows():
    h, weight, _, targets, _ = tensors()
    h.requires_grad_()
    lm_head_logprob(h, weight, targets).sum().backward()
    assert h.grad is not None
    assert weight.grad is None
    empty = torch.empty(0, WIDTH, requires_grad=True)
    lp = lm_head_logprob(empty, weight.requires_grad_(), targets[:0])
    lp.sum().backward()
    assert lp.shape == (0,)
    assert bits.equal(weight.grad, torch.zeros(VOCABULARY, WIDTH))


def test_tied_table_receives_both_gradients():
    h, weight, _, targets, _ = tensors()
    weight.requires_grad_()
    (lm_head_logprob(h, weight, targets).sum() + weight[:3].sum()).backward()
    (head_alone,) = torch.autograd.grad(lm_head_logprob(h, weight, targets).sum(), weight)
    expected = head_alone.clone()
    expected[:3] += 1.0
    assert bits.equal(weight.grad, expected)


def test_leading_axes_are_refused():
    h, weight, _, targets, _ = tensors()
    with pytest.raises(ContractError, match="flatten"):
        lm_head_logprob(h[None], weight, targets)
