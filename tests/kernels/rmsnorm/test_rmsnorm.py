"""RMSNorm: bits of the definition, rows that depend on nothing else, gradients against fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zeromismatch.kernels import adversarial, bits
from zeromismatch.kernels.accumulation import Accumulators
from zeromismatch.kernels.contract import Contract, Implementation, implementations
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.reference import rmsnorm as definition
from zeromismatch.kernels.rmsnorm import cpu, rmsnorm, rmsnorm_backward, rmsnorm_residual

DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = (576, 1536, 40, 16, 7, 1)
EPS = 1e-5


def usable(
    dtype: torch.dtype, contracts: dict[torch.dtype, Contract] = cpu.CONTRACTS
) -> list[Implementation]:
    offered = implementations(contracts[dtype].id)
    return [each for each in offered if each.missing() is None]


def weight_of(width: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(width) * 1.5 + 0.5).to(dtype)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_gives_the_bits_of_the_definition(
    dtype: torch.dtype, width: int, unit_offset: bool
) -> None:
    x = adversarial.rows(24, width, seed=width, dtype=dtype)
    residual = adversarial.rows(24, width, seed=width + 1, dtype=dtype)
    weight = weight_of(width, dtype)
    wanted = definition.rmsnorm(x, weight, EPS, unit_offset)
    wanted_y, wanted_s = definition.rmsnorm(x, weight, EPS, unit_offset, residual)
    for each in usable(dtype):
        assert bits.equal(each.run(x, weight, EPS, unit_offset), wanted), each.name
        y, s = each.run(x, weight, EPS, unit_offset, residual)
        assert bits.equal(y, wanted_y), each.name
        assert bits.equal(s, wanted_s), each.name


def rows_that_change(norm: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Rows whose bits depend on the batch: other row counts, shuffled, NaN neighbours."""
    wanted = norm(x)
    changed = torch.zeros(len(x), dtype=torch.bool)
    for count in (1, 2, 3, 5, 17, 255, 256, 257):
        changed[:count] |= ~bits.equal_rows(norm(x[:count]), wanted[:count])
    order = torch.randperm(len(x))
    changed[order] |= ~bits.equal_rows(norm(x[order]), wanted[order])
    spoiled = torch.full_like(x, torch.nan)
    spoiled[::3] = x[::3]
    changed[::3] |= ~bits.equal_rows(norm(spoiled)[::3], wanted[::3])
    return int(changed.sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_nothing_but_itself(dtype: torch.dtype, threads: int) -> None:
    x = adversarial.rows(300, 576, seed=3, dtype=dtype, kind="unequal")
    weight = weight_of(576, dtype)
    assert rows_that_change(lambda rows: rmsnorm(rows, weight, EPS), x) == 0
    assert rows_that_change(lambda rows: rmsnorm_residual(rows, rows, weight, EPS)[0], x) == 0


def test_a_norm_whose_lanes_follow_the_row_count_is_red() -> None:
    """Replay of vllm #48271: the same rows through 1024 or 256 partial sums."""
    weight = weight_of(4096, torch.float32)

    def two_widths(x: Tensor) -> Tensor:
        lanes = 1024 if len(x) < 256 else 256
        partial = (x * x).view(len(x), -1, lanes).sum(1)
        while partial.shape[1] > 1:
            half = partial.shape[1] // 2
            partial = partial[:, :half] + partial[:, half:]
        return x * torch.rsqrt(partial / x.shape[1] + EPS) * weight

    x = adversarial.rows(300, 4096, seed=3, kind="unequal")
    assert rows_that_change(two_widths, x) > 0
    assert rows_that_change(lambda rows: rmsnorm(rows, weight, EPS), x) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_layouts_and_empty_batches(dtype: torch.dtype) -> None:
    x = torch.randn(6, 4, 40).to(dtype)
    weight = weight_of(40, dtype)
    wanted = rmsnorm(x.reshape(24, 40), weight, EPS).view(6, 4, 40)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert bits.equal(rmsnorm(x, weight, EPS), wanted)
    assert bits.equal(rmsnorm(strided, weight, EPS), wanted)
    assert bits.equal(rmsnorm(x[..., ::1][2], weight, EPS), wanted[2])
    assert rmsnorm(x[:0], weight, EPS).shape == (0, 4, 40)
    y, s = rmsnorm_residual(x[:0], x[:0], weight, EPS)
    assert y.shape == s.shape == (0, 4, 40)


def test_fused_residual_equals_an_addition_and_a_norm() -> None:
    for dtype in DTYPES:
        x, residual = (torch.randn(9, 576).to(dtype) for _ in range(2))
        weight = weight_of(576, dtype)
        y, s = rmsnorm_residual(x, residual, weight, EPS)
        assert bits.equal(s, x + residual)
        assert bits.equal(y, rmsnorm(x + residual, weight, EPS))


def norm_fp64(s: Tensor, weight: Tensor, unit_offset: bool) -> Tensor:
    scaled = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + EPS)
    return scaled * (1 + weight) if unit_offset else scaled * weight


def gradients(
    x: Tensor, residual: Tensor, weight: Tensor, unit_offset: bool, wide: bool
) -> list[Tensor]:
    inputs = (x, residual, weight)
    leaves = [(each.double() if wide else each.clone()).requires_grad_() for each in inputs]
    if wide:
        s = leaves[0] + leaves[1]
        y = norm_fp64(s, leaves[2], unit_offset)
    else:
        y, s = rmsnorm_residual(*leaves, EPS, unit_offset=unit_offset)
    generator = torch.Generator().manual_seed(7)
    for_y, for_s = (torch.randn(x.shape, generator=generator).to(y.dtype) for _ in range(2))
    return list(torch.autograd.grad((y, s), leaves, (for_y, for_s)))


def worst(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("width", WIDTHS[:-1])
def test_gradients_agree_with_fp64(width: int, unit_offset: bool) -> None:
    x, residual = torch.randn(33, width), torch.randn(33, width)
    weight = weight_of(width, torch.float32)
    got = gradients(x, residual, weight, unit_offset, wide=False)
    wanted = gradients(x, residual, weight, unit_offset, wide=True)
    tolerance = cpu.CONTRACTS[torch.float32].gradient_rtol
    assert max(map(worst, got, wanted)) < tolerance


def test_bf16_gradients_are_within_storage_rounding() -> None:
    x, residual = (torch.randn(9, 576).bfloat16() for _ in range(2))
    weight = weight_of(576, torch.bfloat16)
    got = gradients(x, residual, weight, False, wide=False)
    wanted = gradients(x, residual, weight, False, wide=True)
    assert all(each.dtype == torch.bfloat16 for each in got)
    assert max(map(worst, got, wanted)) < 2e-2


@pytest.mark.parametrize("ones", [False, True])
def test_the_gradient_check_sees_a_weight_used_twice_unless_weights_are_one(ones: bool) -> None:
    """Replay of Megatron-LM PR 6859: dX with the weight twice in the variance term."""
    x = torch.randn(8, 40)
    weight = torch.ones(40) if ones else weight_of(40, torch.float32)
    dy = torch.randn(8, 40)
    r = definition.inverse_rms(x, EPS)[:, None]
    g = dy * weight
    faulty = r * (g - x * ((g * weight * x).sum(-1, keepdim=True) * r * r / 40))
    leaf = x.double().requires_grad_()
    (wanted,) = torch.autograd.grad(norm_fp64(leaf, weight.double(), False), leaf, dy.double())
    passes = worst(faulty, wanted) < cpu.CONTRACTS[torch.float32].gradient_rtol
    assert passes == ones
    assert worst(rmsnorm_backward(dy, x, weight, EPS)[0], wanted) < 1e-5


def test_unit_offset_is_another_function() -> None:
    x, weight = torch.randn(5, 40), weight_of(40, torch.float32)
    plain, offset = rmsnorm(x, weight, EPS), rmsnorm(x, weight, EPS, unit_offset=True)
    assert not bits.equal_rows(plain, offset).any()
    assert worst(offset, norm_fp64(x.double(), weight.double(), True)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_dx_rows_are_independent_and_dw_continues_over_micro_batches(
    dtype: torch.dtype, threads: int
) -> None:
    s, dy = (adversarial.rows(300, 200, seed=seed, dtype=dtype) for seed in (1, 2))
    weight = weight_of(200, dtype)
    dx, dw = rmsnorm_backward(dy, s, weight, EPS)
    chain = torch.zeros(200)
    for rows in (slice(0, 1), slice(1, 130), slice(130, 300)):
        part, _ = rmsnorm_backward(dy[rows], s[rows], weight, EPS, accumulate_into=chain)
        assert bits.equal(part, dx[rows])
    assert bits.equal(chain, dw)


def test_heads_before_tokens_continue_over_micro_batches_too() -> None:
    x, up = (torch.randn(1, 3, 9, 16).transpose(1, 2).contiguous().transpose(1, 2) for _ in "xu")
    weight = torch.randn(16, requires_grad=True)
    whole = rmsnorm(x, weight, 1e-6)
    tokens_first = rmsnorm(x.transpose(1, 2).contiguous(), weight, 1e-6)
    assert bits.equal(whole.transpose(1, 2).contiguous(), tokens_first)
    (wanted,) = torch.autograd.grad(whole, weight, up)
    sums = Accumulators({"w": weight})
    for part in (slice(0, 4), slice(4, 9)):
        with sums.micro_batch():
            rmsnorm(x[:, :, part], weight, 1e-6).backward(up[:, :, part])
    assert bits.equal(sums.gradient("w"), wanted)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("width", [37, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_gives_the_gradient_of_the_definition(
    dtype: torch.dtype, width: int, unit_offset: bool
) -> None:
    s, dy, ds = (adversarial.rows(40, width, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    weight = weight_of(width, dtype)
    for extra in ((None, None), (ds, torch.randn(width))):
        arguments = (dy, s, weight, EPS, unit_offset, *extra)
        wanted = definition.rmsnorm_grad(*arguments)
        for each in usable(dtype, cpu.GRADIENTS):
            assert all(map(bits.equal, each.run(*arguments), wanted)), each.name


def test_tensors_outside_the_contract_are_refused() -> None:
    x = torch.randn(3, 8)
    for bad in (torch.ones(7), torch.ones(8).bfloat16(), torch.ones(1, 8)):
        with pytest.raises(ContractError, match="pass one weight per column"):
            rmsnorm(x, bad, EPS)
    with pytest.raises(ContractError, match="no contract covers"):
        rmsnorm(x.half(), torch.ones(8).half(), EPS)
    with pytest.raises(ContractError, match="same shape and dtype"):
        rmsnorm_residual(x, x[:2], torch.ones(8), EPS)
