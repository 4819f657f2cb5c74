"""fma32 rounds once. Compared with libm's fmaf, which the C standard defines that way."""

import ctypes
import ctypes.util

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.reference.fma import fma32

COUNT = 20_000


def libm_fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    return torch.tensor(
        [fmaf(*each) for each in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    )


def rounded_twice(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).float()


def any_finite() -> torch.Tensor:
    pattern = torch.randint(-(2**31), 2**31, (COUNT,)).to(torch.int32)
    values = pattern.view(torch.float32)
    return torch.where(torch.isfinite(values), values, 1.0)


def near_one() -> torch.Tensor:
    return torch.randn(COUNT) * torch.exp2(torch.randint(-30, 30, (COUNT,)).float())


@pytest.mark.parametrize("draw", [any_finite, near_one])
def test_fma32_equals_libm(draw):
    torch.manual_seed(0)
    a, b, c = draw(), draw(), draw()
    assert bits.equal(fma32(a, b, c), libm_fma(a, b, c))


def test_fma32_rounds_subnormal_results_once():
    torch.manual_seed(1)
    a, b = torch.randn(COUNT) * 2.0**-70, torch.randn(COUNT) * 2.0**-70
    c = torch.randn(COUNT) * 2.0**-140
    assert bits.equal(fma32(a, b, c), libm_fma(a, b, c))


def test_fma32_is_right_where_rounding_twice_is_wrong():
    x = 1.0 + 2.0**-23
    a, b = torch.tensor([x]), torch.tensor([2.0 - x]) * 2.0**-24  # a * b = 2**-24 - 2**-70
    c = torch.tensor([x])  # the sum lies just below a tie, but rounds to the tie in fp64
    assert fma32(a, b, c).item() == x == libm_fma(a, b, c).item()
    assert rounded_twice(a, b, c).item() != x


def test_fma32_passes_infinity_and_nan_on():
    infinity, nan = float("inf"), float("nan")
    a = torch.tensor([infinity, infinity, nan, 3e38, 0.0])
    b = torch.tensor([1.0, 0.0, 1.0, 10.0, infinity])
    result = fma32(a, b, torch.ones(5))
    assert result[0] == infinity
    assert result[3] == infinity
    assert result[[1, 2, 4]].isnan().all()
