"""The norm that applies its weight in fp32: one rounding, the same bits for every batch."""

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

from zeromismatch.kernels import adversarial, bits
from zeromismatch.kernels.contract import Implementation, implementations
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.reference import rmsnorm_wide as definition
from zeromismatch.kernels.rmsnorm import rmsnorm, rmsnorm_wide, wide

DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5


def usable(contract: str) -> list[Implementation]:
    return [each for each in implementations(contract) if each.missing() is None]


def weight_of(width: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(width) * 1.5 + 0.5).to(dtype)


@pytest.mark.parametrize("width", [360, 40, 7, 1])
@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_gives_the_bits_of_the_definition(
    dtype: torch.dtype, weights: torch.dtype, width: int
) -> None:
    x, residual, ds = (adversarial.rows(24, width, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    weight, initial = weight_of(width, weights), torch.randn(width)
    wanted = definition.rmsnorm_wide(x, weight, EPS)
    both = definition.rmsnorm_wide(x, weight, EPS, residual)
    for each in usable(wide.CONTRACTS[dtype].id):
        assert bits.equal(each.run(x, weight, EPS), wanted), each.name
        assert all(map(bits.equal, each.run(x, weight, EPS, residual), both)), each.name
    for extra in ((None, None), (ds, initial)):
        arguments = (residual, x, weight, EPS, *extra)
        grads = definition.rmsnorm_wide_grad(*arguments)
        for each in usable(wide.GRADIENTS[dtype].id):
            assert all(map(bits.equal, each.run(*arguments), grads)), each.name


@pytest.mark.parametrize("weights", DTYPES)
def test_it_rounds_as_transformers_does_for_gpt_oss_and_llamas_norm_does_not(
    weights: torch.dtype,
) -> None:
    x = torch.randn(200, 360).bfloat16()
    norm = GptOssRMSNorm(360, EPS).to(weights)
    norm.weight.data = weight_of(360, weights)
    stock = norm(x)
    # The sums of squares differ in their last bits, which moves a rounding here and there.
    assert (rmsnorm_wide(x, norm.weight, EPS) == stock).float().mean() > 0.995
    assert (rmsnorm(x, norm.weight.bfloat16(), EPS) == stock).float().mean() < 0.9


def test_fp32_rows_have_the_bits_of_the_plain_norm() -> None:
    x, weight = torch.randn(9, 200), weight_of(200, torch.float32)
    assert bits.equal(rmsnorm_wide(x, weight, EPS), rmsnorm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_nothing_but_itself(dtype: torch.dtype, threads: int) -> None:
    x = adversarial.rows(300, 576, seed=3, dtype=dtype, kind="unequal")
    weight = weight_of(576, torch.float32)
    whole = rmsnorm_wide(x, weight, EPS)
    order = torch.randperm(300)
    assert bits.equal(rmsnorm_wide(x[order], weight, EPS), whole[order])
    for count in (1, 2, 17, 255):
        assert bits.equal(rmsnorm_wide(x[:count], weight, EPS), whole[:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_agree_with_fp64(dtype: torch.dtype) -> None:
    x, dy = (torch.randn(33, 200).to(dtype) for _ in range(2))
    leaves = [x.clone().requires_grad_(), weight_of(200, torch.float32).requires_grad_()]
    got = torch.autograd.grad(rmsnorm_wide(*leaves, EPS), leaves, dy)
    exact = [each.detach().double().requires_grad_() for each in leaves]
    unit = exact[0] * torch.rsqrt(exact[0].pow(2).mean(-1, keepdim=True) + EPS)
    wanted = torch.autograd.grad(unit * exact[1], exact, dy.double())
    for mine, right in zip(got, wanted, strict=True):
        worst = float((mine.double() - right).abs().max() / right.abs().max())
        assert worst < (1e-5 if dtype == torch.float32 else 1e-2)


def test_tensors_outside_the_contract_are_refused() -> None:
    for x, weight in [
        (torch.randn(3, 8), torch.ones(7)),
        (torch.randn(3, 8), torch.ones(8).bfloat16()),
    ]:
        with pytest.raises(ContractError, match="in x's dtype or float32"):
            rmsnorm_wide(x, weight, EPS)
    with pytest.raises(ContractError, match="no contract covers"):
        rmsnorm_wide(torch.randn(3, 8).half(), torch.ones(8).half(), EPS)
