"""Rotary: an exact table, a rotation equal to torch's in fp32, gradients by the opposite angle."""

import numpy
import pytest
import torch
from torch import Tensor

from zeromismatch.kernels import adversarial, bits
from zeromismatch.kernels.contract import implementations
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.reference import rotary as definition
from zeromismatch.kernels.rotary import apply_rotary, cpu, rotary_table

DTYPES = (torch.float32, torch.bfloat16)


def frequencies(width: int, base: float = 10_000.0) -> Tensor:
    return 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)


def positions(count: int) -> Tensor:
    return torch.cat((torch.arange(count // 2), torch.randint(0, 1_000_000, (count - count // 2,))))


def test_the_table_is_fp64_rounded_once() -> None:
    inv_freq, where = frequencies(64), positions(2000)
    cos, sin = rotary_table(inv_freq, where, 1.2)
    angle = (where.double()[:, None] * inv_freq).numpy()
    for got, exact in ((cos, numpy.cos(angle)), (sin, numpy.sin(angle))):
        wanted = torch.from_numpy((exact * 1.2).astype(numpy.float32))
        assert bits.equal(got[:, :32].contiguous(), wanted)
        assert bits.equal(got[:, 32:].contiguous(), wanted)


@pytest.mark.parametrize("planted", ["bf16 frequencies", "fp32 phases"])
def test_the_table_check_sees_coarser_tables(planted: str) -> None:
    """Replay of transformers #25681 and #29496: wrong far from position 0."""
    inv_freq, where = frequencies(64), torch.tensor([1, 5, 40_000])
    if planted == "bf16 frequencies":
        angle = where.double()[:, None] * inv_freq.bfloat16().double()
    else:
        angle = (where.float()[:, None] * inv_freq.float()).double()
    cos, _ = rotary_table(inv_freq, where)
    assert not bits.equal(angle.cos().float(), cos[:, :32].contiguous())


def test_every_variant_gives_the_table_of_the_definition(threads: int) -> None:
    inv_freq, where = frequencies(40), positions(700)
    wanted = definition.rotary_table(inv_freq, where, 0.7)
    for each in implementations(cpu.TABLE[torch.float32].id):
        if each.missing() is None:
            got = each.run(inv_freq, where, 0.7)
            assert all(bits.equal(*pair) for pair in zip(got, wanted, strict=True)), each.name


def test_a_position_has_the_same_entries_in_every_batch() -> None:
    inv_freq, where = frequencies(64), positions(100)
    cos, sin = rotary_table(inv_freq, where)
    order = torch.randperm(100)
    shuffled = rotary_table(inv_freq, where[order])
    assert bits.equal(shuffled[0], cos[order])
    alone = [rotary_table(inv_freq, where[t : t + 1])[1] for t in range(100)]
    assert bits.equal(torch.cat(alone), sin)
    assert rotary_table(inv_freq, where[:0])[0].shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head", "width"), [(64, 64), (80, 80), (40, 10), (96, 32), (2, 2)])
def test_every_variant_gives_the_bits_of_the_definition(
    dtype: torch.dtype, head: int, width: int
) -> None:
    cos, sin = (adversarial.rows(30, width, seed=seed) for seed in (1, 2))
    x = adversarial.rows(90, head, seed=3, dtype=dtype).view(30, 3, head)
    wanted = definition.apply_rotary(x, cos, sin)
    for each in implementations(cpu.ROTARY[dtype].id):
        if each.missing() is None:
            assert bits.equal(each.run(x, cos, sin), wanted), each.name


def torch_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]


def test_fp32_equals_torch_bit_for_bit() -> None:
    cos, sin = rotary_table(frequencies(64), torch.arange(50))
    x = torch.randn(50, 9, 64)
    assert bits.equal(apply_rotary(x, cos, sin), torch_rotary(x, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_depends_on_nothing_but_itself(dtype: torch.dtype, threads: int) -> None:
    cos, sin = rotary_table(frequencies(64), positions(300))
    x = torch.randn(300, 3, 64).to(dtype)
    wanted = apply_rotary(x, cos, sin)
    order = torch.randperm(300)
    assert bits.equal(apply_rotary(x[order], cos[order], sin[order]), wanted[order])
    for count in (0, 1, 7, 257):
        assert bits.equal(apply_rotary(x[:count], cos[:count], sin[:count]), wanted[:count])
    one_head = apply_rotary(x[:, 1:2], cos, sin)
    assert bits.equal(one_head, wanted[:, 1:2].contiguous())


def test_gradients_agree_with_fp64_also_for_tables_with_unequal_halves() -> None:
    cos, sin, dy = torch.randn(20, 32), torch.randn(20, 32), torch.randn(20, 3, 32)
    x = torch.randn(20, 3, 32, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    (got,) = torch.autograd.grad(apply_rotary(x, cos, sin), x, dy)
    exact = torch_rotary(wide, cos.double(), sin.double())
    (wanted,) = torch.autograd.grad(exact, wide, dy.double())
    assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < 1e-6


def test_the_gradient_is_the_rotation_by_the_opposite_angle() -> None:
    cos, sin = rotary_table(frequencies(64), torch.arange(30))
    x = torch.randn(30, 2, 64, requires_grad=True)
    dy = torch.randn(30, 2, 64)
    (got,) = torch.autograd.grad(apply_rotary(x, cos, sin), x, dy)
    assert bits.equal(got, apply_rotary(dy, cos, -sin))


def test_tensors_outside_the_contract_are_refused() -> None:
    cos, sin = rotary_table(frequencies(16), torch.arange(4))
    x = torch.randn(4, 2, 16)
    with pytest.raises(ContractError, match="R even and at most D"):
        apply_rotary(x[..., :8], cos, sin)
    with pytest.raises(ContractError, match="keep them in fp32"):
        apply_rotary(x, cos.bfloat16(), sin.bfloat16())
    with pytest.raises(ContractError, match="compute it in fp64"):
        rotary_table(frequencies(16).float(), torch.arange(4))
    with pytest.raises(ContractError, match="one integer CPU vector"):
        rotary_table(frequencies(16), torch.arange(4.0))
    with pytest.raises(ContractError, match="beyond 2"):
        rotary_table(frequencies(16), torch.tensor([10_000_000]))
