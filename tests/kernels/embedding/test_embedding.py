"""Embedding copies rows; its gradient adds tokens in their order, in fp32, whatever the split."""

import itertools

import pytest
import torch

from zeromismatch.kernels import adversarial, bits
from zeromismatch.kernels.contract import implementations
from zeromismatch.kernels.embedding import embedding, grad_weight
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.reference import embedding as reference

DTYPES = [torch.float32, torch.bfloat16]
VOCABULARY, WIDTH, TOKENS = 23, 37, 200


def tensors(dtype: torch.dtype = torch.float32):
    table = adversarial.rows(VOCABULARY, WIDTH, seed=1, dtype=dtype)
    grad = adversarial.rows(TOKENS, WIDTH, seed=2, dtype=dtype)
    return table, adversarial.integers((TOKENS,), VOCABULARY, seed=3), grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_has_the_bits_of_the_reference(dtype):
    table, ids, grad = tensors(dtype)
    initial = adversarial.rows(VOCABULARY, WIDTH, seed=4)
    name = str(dtype).removeprefix("torch.")
    for each in implementations(f"embedding.gather.{name}.cpu.v1"):
        if each.missing() is None:
            assert bits.equal(each.run(ids, table), reference.embedding(ids, table))
    for each in implementations(f"embedding_grad.scatter.{name}.cpu.v1"):
        if each.missing() is None:
            for given in ((), (initial,)):
                found = each.run(grad, ids, VOCABULARY, *given)
                assert bits.equal(found, reference.grad_weight(grad, ids, VOCABULARY, *given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_right_and_rounded_once(dtype):
    table, ids, grad = tensors(dtype)
    table.requires_grad_()
    exact = table.detach().double().requires_grad_()
    embedding(ids.view(8, 25), table).backward(grad.view(8, 25, WIDTH))
    exact[ids].backward(grad.double())
    assert bits.equal(table.grad, reference.grad_weight(grad, ids, VOCABULARY).to(dtype))
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    assert (table.grad.double() - exact.grad).norm() <= rtol * exact.grad.norm()


@pytest.mark.parametrize("cuts", [(0, 200), (0, 1, 200), (0, 64, 128, 200)])
def test_a_sum_continued_over_micro_batches_equals_the_whole_batch(cuts):
    _, ids, grad = tensors()
    total = torch.zeros(VOCABULARY, WIDTH)
    for start, stop in itertools.pairwise(cuts):
        grad_weight(grad[start:stop], ids[start:stop], VOCABULARY, accumulate_into=total)
    assert bits.equal(total, grad_weight(grad, ids, VOCABULARY))


def test_the_order_of_tokens_matters_so_the_data_shows_it():
    _, ids, grad = tensors()
    backwards = grad_weight(grad.flip(0), ids.flip(0), VOCABULARY)
    assert not bits.equal(backwards, grad_weight(grad, ids, VOCABULARY))


def test_bits_do_not_depend_on_the_thread_count():
    _, ids, grad = tensors()
    wide_grad = grad.repeat(4, 12)
    wide_ids = ids.repeat(4)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(grad_weight(wide_grad, wide_ids, VOCABULARY))
    finally:
        torch.set_num_threads(before)
    assert bits.equal(results[0], results[1])
    assert bits.equal(results[0], results[2])


def test_shapes_dtypes_and_strides_of_ids():
    table, ids, _ = tensors()
    expected = table[ids]
    assert bits.equal(embedding(ids.to(torch.int32), table), expected)
    assert bits.equal(embedding(ids.view(20, 10).t(), table), table[ids.view(20, 10).t()])
    assert bits.equal(embedding(ids, table.t().contiguous().t()), expected)
    assert embedding(ids[3], table).shape == (WIDTH,)
    assert embedding(ids[:0], table).shape == (0, WIDTH)


def test_unusable_tensors_are_refused_with_the_next_step():
    table, ids, grad = tensors()
    for arguments, words in [
        ((torch.tensor([VOCABULARY]), table), "tokenizer"),
        ((torch.tensor([-1]), table), "tokenizer"),
        ((ids.float(), table), "int64"),
        ((ids, table.half()), "convert"),
        ((ids.to("meta"), table), "move both"),
    ]:
        with pytest.raises(ContractError, match=words):
            embedding(*arguments)
    with pytest.raises(ContractError, match=r"torch\.zeros"):
        grad_weight(grad, ids, VOCABULARY, accumulate_into=torch.zeros(WIDTH, VOCABULARY))
