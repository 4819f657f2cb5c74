"""Sampling: one definition, the right distribution, and the same token in every batch."""

import math

import pytest
import torch

from zeromismatch.kernels.contract import implementations
from zeromismatch.kernels.errors import ContractError, NonFiniteError, UsageError
from zeromismatch.kernels.reference import sampling as definition
from zeromismatch.kernels.sampling import CONTRACT, sample


def inputs(rows: int, vocabulary: int, temperature: float = 1.0) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(rows, vocabulary) * 3,
        torch.randint(-(2**62), 2**62, (rows,)),
        torch.randint(0, 5000, (rows,)),
        torch.full((rows,), temperature),
    )


@pytest.mark.parametrize("name", ["core-avx512", "core-avx2", "core-portable"])
@pytest.mark.parametrize("vocabulary", [1, 2, 15, 255, 256, 257, 1000, 5003])
def test_every_variant_equals_the_definition(name: str, vocabulary: int) -> None:
    candidate = next(each for each in implementations(CONTRACT.id) if each.name == name)
    if candidate.missing() is not None:
        pytest.skip(str(candidate.missing()))
    logits, seeds, positions, _ = inputs(23, vocabulary)
    temperature = torch.linspace(0, 2, 23)
    expected = definition.sample(logits, seeds, positions, temperature)
    assert torch.equal(candidate.run(logits, seeds, positions, temperature), expected)


def test_logarithm_is_accurate_to_one_ulp() -> None:
    x = torch.cat((torch.rand(50_000), 1 - torch.rand(500) * 1e-7, torch.rand(500) * 40)).double()
    x = torch.cat(
        (x, 1 - torch.rand(500).double() * 1e-13, torch.rand(500).double() * 1e-15 + 1e-17)
    )
    truth = x.log()
    ulp = torch.nextafter(truth.abs(), torch.tensor(math.inf).double()) - truth.abs()
    assert float(((definition.log(x) - truth).abs() / ulp).max()) <= 1.0


def test_noise_is_gumbel() -> None:
    noise = definition.noise(torch.arange(40), torch.arange(40) * 7, 5000).flatten()
    assert abs(float(noise.mean()) - 0.5772156649) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    below_zero = float((noise < 0).double().mean())
    assert abs(below_zero - math.exp(-1)) < 0.005


@pytest.mark.parametrize(("temperature", "vary"), [(1.0, "seed"), (0.7, "position"), (2.5, "both")])
def test_distribution_is_softmax(temperature: float, vary: str) -> None:
    draws, logits = 20_000, torch.tensor([0.0, 1.0, -1.5, 2.2, 0.3, -0.7, 1.9, -3.0])
    index = torch.arange(draws)
    seeds = index if vary != "position" else torch.full((draws,), 11)
    positions = index if vary != "seed" else torch.full((draws,), 5)
    tokens = sample(logits.expand(draws, -1), seeds, positions, torch.full((draws,), temperature))
    expected = torch.softmax(logits.double() / temperature, 0) * draws
    counts = torch.bincount(tokens, minlength=8).double()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001; seeds are fixed


def test_successive_positions_are_independent() -> None:
    draws = 40_000
    tokens = sample(
        torch.zeros(draws, 4), torch.full((draws,), 3), torch.arange(draws), torch.ones(draws)
    )
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16).double()
    expected = (draws - 1) / 16
    assert (
        float(((pairs - expected) ** 2 / expected).sum()) < 37.7
    )  # 15 degrees of freedom, p = 0.001


def test_a_row_draws_the_same_token_in_any_batch() -> None:
    logits, seeds, positions, temperature = inputs(64, 3000, 0.8)
    together = sample(logits, seeds, positions, temperature)
    order = torch.randperm(64)
    shuffled = sample(logits[order], seeds[order], positions[order], temperature[order])
    assert torch.equal(shuffled, together[order])
    for row in range(0, 64, 7):
        one = slice(row, row + 1)
        alone = sample(logits[one], seeds[one], positions[one], temperature[one])
        assert alone.tolist() == together[one].tolist()


def test_seed_position_and_token_id_all_matter() -> None:
    logits = torch.zeros(1, 2000).expand(50, -1)
    index, same, warm = torch.arange(50), torch.zeros(50, dtype=torch.int64), torch.ones(50)
    assert sample(logits, index, same, warm).unique().numel() > 40
    assert sample(logits, same, index, warm).unique().numel() > 40
    assert sample(logits, same, same, warm).unique().numel() == 1


def test_temperature_zero_is_greedy_with_the_lowest_id_on_ties() -> None:
    logits = torch.tensor(
        [[1.0, 3.0, 3.0, 2.0], [-0.0, 0.0, -1.0, -2.0], [-math.inf, -5.0, -5.0, -9.0]]
    )
    ids = torch.arange(3)
    assert sample(logits, ids, ids, torch.zeros(3)).tolist() == [1, 0, 1]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.zeros(500, 10)
    logits[:, [0, 3, 9]] = -math.inf
    tokens = sample(logits, torch.arange(500), torch.arange(500), torch.ones(500))
    assert set(tokens.tolist()) == {1, 2, 4, 5, 6, 7, 8}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("value", "message"),
    [(math.nan, "row 2 hold NaN"), (math.inf, r"row 2 hold \+inf")],
)
def test_a_row_that_is_not_finite_is_named(value: float, message: str, temperature: float) -> None:
    logits, seeds, positions, temperatures = inputs(5, 700, temperature)
    logits[2, 600] = value
    with pytest.raises(NonFiniteError, match=message):
        sample(logits, seeds, positions, temperatures)


def test_rows_without_a_choice_are_named() -> None:
    logits, seeds, positions, temperature = inputs(3, 20)
    logits[1] = -math.inf
    with pytest.raises(NonFiniteError, match="row 1 are all -inf"):
        sample(logits, seeds, positions, temperature)
    logits[1] = 5.0
    temperature[1] = 1e-38
    with pytest.raises(NonFiniteError, match="row 1 overflow"):
        sample(logits, seeds, positions, temperature)


def test_unusable_arguments_are_refused() -> None:
    logits, seeds, positions, temperature = inputs(3, 20)
    with pytest.raises(ContractError, match="fp32 CPU logits"):
        sample(logits.bfloat16(), seeds, positions, temperature)
    with pytest.raises(ContractError, match="seeds must be"):
        sample(logits, seeds.int(), positions, temperature)
    with pytest.raises(ContractError, match="positions must be"):
        sample(logits, seeds, positions[:2], temperature)
    with pytest.raises(ContractError, match="no columns"):
        sample(logits[:, :0], seeds, positions, temperature)
    for bad in (-0.5, math.nan, math.inf):
        with pytest.raises(UsageError, match="at least 0"):
            sample(logits, seeds, positions, torch.full((3,), bad))


def test_zero_rows_and_strided_logits_work() -> None:
    logits, seeds, positions, temperature = inputs(4, 30)
    assert sample(logits[:0], seeds[:0], positions[:0], temperature[:0]).shape == (0,)
    strided = logits.t().contiguous().t()
    expected = sample(logits, seeds, positions, temperature)
    assert torch.equal(sample(strided, seeds, positions, temperature), expected)
