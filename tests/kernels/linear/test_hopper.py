"""The CPU model of Hopper's arithmetic gives the digests that an H200 confirmed.

``hopper_digests.json`` names the outputs of the products in ``conftest.py``; ``test_hopper_gpu.py``
compares the same outputs with every kernel of class L on a GPU.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.reference import hopper
from zeromismatch.kernels.reference.fma import fma32

GOLDEN = Path(__file__).with_name("hopper_digests.json")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_model_gives_the_confirmed_digests(dtype: str, hopper_cases: list[Any]) -> None:
    found = {
        name: bits.digest_tensor(hopper.linear(x, weight, bias, torch.float32))
        for name, x, weight, bias in hopper_cases
        if name.startswith(dtype)
    }
    confirmed = json.loads(GOLDEN.read_text())
    assert found == {name: each for name, each in confirmed.items() if name.startswith(dtype)}


@pytest.mark.parametrize(("name", "value"), [("STEP", 8), ("STEP", 32), ("FRACTION", 24)])
def test_other_parameters_give_other_bits(
    name: str, value: int, hopper_operands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = hopper_operands("cancelling", torch.bfloat16, (17, 40, 200))
    expected = hopper.linear(x, weight, bias, torch.float32)
    monkeypatch.setattr(hopper, name, value)
    assert not bits.equal(hopper.linear(x, weight, bias, torch.float32), expected)


def test_one_product_is_exact_and_zeros_add_nothing() -> None:
    x, weight = (
        torch.randn(6, 1, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for seed in (1, 2)
    )
    exact = hopper.chain(x, weight.t())
    assert bits.equal(exact, fma32(x.float(), weight.t().float(), torch.zeros(6, 6)))
    padded = [torch.cat((each, torch.zeros(6, 40).bfloat16()), dim=1) for each in (x, weight)]
    assert bits.equal(hopper.chain(padded[0], padded[1].t()), exact)


def test_subnormal_results_are_cut_to_fp32s_grid() -> None:
    x = torch.tensor([[2.0**-70 * 1.0078125]]).bfloat16()
    weight = torch.tensor([[2.0**-78 * 1.9921875]]).bfloat16()
    product = x.double() * weight.double()
    grid = torch.floor(product * 2.0**149) * 2.0**-149
    assert bits.equal(hopper.chain(x, weight.t()), grid.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    x = torch.ones(2, 16, dtype=dtype)
    with pytest.raises(ContractError, match="bf16 and fp16"):
        hopper.linear(x, x)


def test_numbers_that_are_not_finite_are_refused() -> None:
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    bad = x.clone()
    bad[1, 3] = float("nan")
    with pytest.raises(ContractError, match="finite"):
        hopper.linear(x, bad)
