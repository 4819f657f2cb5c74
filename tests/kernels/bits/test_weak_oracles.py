"""Checks that look like equality and are not: each passes on a fault that ours finds."""

import functools
import operator

import numpy
import pytest
import torch

from zeromismatch.kernels import bits


def ours_differ(left: torch.Tensor, right: torch.Tensor) -> bool:
    by_bits = not bits.equal(left, right)
    by_digest = bits.digest_tensor(left) != bits.digest_tensor(right)
    assert by_bits == by_digest
    return by_bits


@pytest.mark.parametrize(("left", "right"), [(-1e-9, -2e-8), (-110.0, -140.0)])
def test_difference_of_probabilities_misses_it(left: float, right: float) -> None:
    log_pi, log_mu = torch.tensor([left]), torch.tensor([right])
    assert (log_pi.exp() - log_mu.exp()).abs().item() == 0.0
    assert ours_differ(log_pi, log_mu)


def k3(difference: torch.Tensor) -> torch.Tensor:
    return torch.exp(difference) - difference - 1.0


def test_k3_in_fp32_is_zero_for_hundreds_of_differences() -> None:
    difference = torch.arange(1, 2000) * 2.0**-25
    with_torch = int((k3(difference.float()) == 0).sum())
    plain = numpy.arange(1, 2000, dtype=numpy.float32) * numpy.float32(2.0**-25)
    with_numpy = int((numpy.exp(plain) - plain - numpy.float32(1) == 0).sum())
    assert min(with_torch, with_numpy) > 200
    assert int((k3(difference.double()) == 0).sum()) == 0
    zero = torch.zeros_like(difference)
    assert not bits.equal_rows(difference, zero).any()
    assert (bits.digest_rows(difference) != bits.digest_rows(zero)).all()


def xor_hash(x: torch.Tensor) -> int:
    return functools.reduce(operator.xor, x.view(torch.int32).tolist())


def test_xor_hash_misses_order_and_pairs() -> None:
    for left, right in [([1.0, 2.0, 5.0, 5.0], [1.0, 2.0, 9.0, 9.0]), ([1.0, 2.0], [2.0, 1.0])]:
        a, b = torch.tensor(left), torch.tensor(right)
        assert xor_hash(a) == xor_hash(b)
        assert ours_differ(a, b)


def test_l1_norm_misses_sign_and_order() -> None:
    for left, right in [([1.0, -2.0], [1.0, 2.0]), ([1.0, 2.0], [2.0, 1.0])]:
        a, b = torch.tensor(left), torch.tensor(right)
        assert a.norm(p=1) == b.norm(p=1)
        assert ours_differ(a, b)


def test_torch_hash_tensor_misses_permuted_rows() -> None:
    up, down = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False)
    order = torch.randperm(16)
    assert torch.hash_tensor(up.weight) == torch.hash_tensor(up.weight[order])
    assert torch.hash_tensor(down.weight) == torch.hash_tensor(down.weight[:, order])
    assert ours_differ(up.weight, up.weight[order])
    assert ours_differ(down.weight, down.weight[:, order])


def test_allclose_misses_a_flipped_bit() -> None:
    a = torch.randn(100)
    b = a.clone()
    bits.int_view(b)[37] ^= 1
    assert torch.allclose(a, b)
    assert ours_differ(a, b)


def test_a_returned_verdict_never_fails() -> None:
    def check_parity() -> bool:  # the shape of a test in a public library: pytest ignores the False
        return bits.equal(torch.zeros(1), -torch.zeros(1))

    assert check_parity() is False
    with pytest.raises(AssertionError):
        assert bits.equal(torch.zeros(1), -torch.zeros(1))


def test_a_kernel_against_itself_never_fails() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1) + 1.0

    x = torch.randn(4, 9)
    assert torch.equal(wrong(x), wrong(x))
    assert ours_differ(wrong(x), x.sum(-1))
