"""Gradients of a linear layer: chains as well, right against fp64, equal for micro-batches."""

import itertools

import pytest
import torch

from zeromismatch.kernels import adversarial, bits
from zeromismatch.kernels.contract import get_contract, implementations
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.linear import contract_id, grad_bias, grad_input, grad_weight, linear
from zeromismatch.kernels.reference import linear as reference

DTYPES = [torch.float32, torch.bfloat16]


def tensors(rows: int, outputs: int, inputs: int, dtype: torch.dtype = torch.float32):
    grad = adversarial.rows(rows, outputs, seed=1, dtype=dtype)
    x = adversarial.rows(rows, inputs, seed=2, dtype=dtype)
    weight = adversarial.rows(outputs, inputs, seed=3, dtype=dtype)
    return grad, x, weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1, 1), (5, 19, 33), (37, 140, 17), (200, 18, 5)])
def test_every_variant_has_the_bits_of_the_reference(size, dtype):
    grad, x, weight = tensors(*size, dtype)
    initial = adversarial.rows(size[1], size[2], seed=4)
    calls = {
        "linear_grad_input": (grad, weight),
        "linear_grad_weight": (grad, x, initial),
        "linear_grad_bias": (grad, initial[:, 0].contiguous()),
    }
    for op, arguments in calls.items():
        expected = getattr(reference, op.removeprefix("linear_"))(*arguments)
        for each in implementations(contract_id(op, dtype)):
            if each.missing() is None:
                assert bits.equal(each.run(*arguments), expected), (op, each.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_autograd_agrees_with_an_independent_fp64_graph(dtype):
    torch.manual_seed(0)
    given = [torch.randn(*shape).to(dtype) for shape in ((4, 9, 33), (21, 33), (21,))]
    ours = [each.clone().requires_grad_() for each in given]
    exact = [each.double().requires_grad_() for each in given]
    grad = torch.randn(4, 9, 21).to(dtype)
    found = torch.autograd.grad(linear(*ours), ours, grad)
    y = torch.einsum("abk,nk->abn", exact[0], exact[1]) + exact[2]
    expected = torch.autograd.grad(y, exact, grad.double())
    rtol = get_contract(contract_id("linear", dtype)).gradient_rtol
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == dtype
        assert (left.double() - right).norm() <= rtol * right.norm()


def test_autograd_returns_the_chains():
    grad, x, weight = tensors(30, 18, 21)
    bias = torch.randn(18)
    for each in (x, weight, bias):
        each.requires_grad_()
    linear(x, weight, bias).backward(grad)
    assert bits.equal(x.grad, reference.grad_input(grad, weight.detach()))
    assert bits.equal(weight.grad, reference.grad_weight(grad, x.detach()))
    assert bits.equal(bias.grad, reference.grad_bias(grad))


def test_rows_of_the_input_gradient_do_not_depend_on_the_batch():
    grad, _, weight = tensors(70, 300, 50)
    whole = grad_input(grad, weight)
    for rows in (1, 2, 3, 13, 14, 15, 29, 64):
        assert bits.equal(grad_input(grad[:rows], weight), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [(0, 300), (0, 1, 300), (0, 128, 256, 300), (0, 7, 8, 200, 300)])
def test_a_chain_continued_over_micro_batches_equals_the_whole_batch(cuts, dtype):
    grad, x, _ = tensors(300, 20, 37, dtype)
    d_weight, d_bias = torch.zeros(20, 37), torch.zeros(20)
    for start, stop in itertools.pairwise(cuts):
        micro = grad[start:stop], x[start:stop]
        assert grad_weight(*micro, accumulate_into=d_weight) is d_weight
        grad_bias(micro[0], accumulate_into=d_bias)
    assert bits.equal(d_weight, grad_weight(grad, x))
    assert bits.equal(d_bias, grad_bias(grad))


def test_adding_gradients_of_micro_batches_is_not_the_whole_batch():
    grad, x, _ = tensors(64, 20, 37)
    added = grad_weight(grad[:32], x[:32]) + grad_weight(grad[32:], x[32:])
    assert not bits.equal(added, grad_weight(grad, x))


def test_backward_repeats_its_bits_under_every_thread_count():
    grad, x, weight = tensors(90, 130, 70)
    expected = grad_weight(grad, x), grad_input(grad, weight)
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert bits.equal(grad_weight(grad, x), expected[0])
            assert bits.equal(grad_input(grad, weight), expected[1])
    finally:
        torch.set_num_threads(before)


def test_only_wanted_gradients_are_made():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(5, 8)
    linear(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_no_tokens_give_zero_gradients():
    x, weight = torch.randn(0, 8), torch.randn(5, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    assert weight.grad is not None
    assert bits.equal(weight.grad, torch.zeros(5, 8))


def test_a_foreign_accumulator_is_refused():
    grad, x, _ = tensors(6, 4, 8)
    for accumulator in (
        torch.zeros(4, 7),
        torch.zeros(4, 8, dtype=torch.bfloat16),
        torch.zeros(8, 4).t(),
    ):
        with pytest.raises(ContractError, match=r"torch\.zeros"):
            grad_weight(grad, x, accumulate_into=accumulator)
