"""Equality, first difference, ulp distances, non-finite values."""

import json
import math

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import ContractError, NonFiniteError


def nan(payload: int) -> torch.Tensor:
    return torch.tensor([0x7FC00000 | payload], dtype=torch.int32).view(torch.float32)


def test_equality_is_on_bits() -> None:
    assert bits.equal(torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]))
    assert not bits.equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not bits.equal(nan(0), nan(1))
    a = torch.randn(4, 3, 2)
    b = a.clone()
    b[2, 1, 0] = -b[2, 1, 0]
    assert bits.equal_rows(a, b).tolist() == [True, True, False, True]
    assert bits.equal_rows(a[:0], b[:0]).tolist() == []


def test_comparing_unlike_tensors_is_refused() -> None:
    with pytest.raises(ContractError, match="one dtype and shape"):
        bits.equal(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ContractError, match="one dtype and shape"):
        bits.equal(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))


def test_first_difference_names_place_bits_and_distance() -> None:
    a = torch.ones(3, 4, 5)
    b = a.clone()
    b[1, 2, 3] = torch.nextafter(b[1, 2, 3], torch.tensor(2.0))
    b[2, 0, 0] = 7.0
    found = bits.first_difference(a, b)
    assert found is not None
    assert found.coordinate == (1, 2, 3)
    assert (found.left_bits, found.right_bits, found.ulp) == ("3f800000", "3f800001", 1)
    assert (found.differing, found.elements) == (2, 60)
    assert "[1, 2, 3]" in str(found)
    assert bits.first_difference(a, a.clone()) is None


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64],
    ids=str,
)
def test_first_difference_of_other_dtypes(dtype: torch.dtype) -> None:
    a = torch.ones(2, 3, dtype=dtype)
    b = a.clone()
    b[1, 1] = 2
    found = bits.first_difference(a, b)
    assert found is not None
    assert found.coordinate[:2] == (1, 1)
    assert (found.left, found.right) == (1.0, 2.0)


def test_difference_of_non_finite_values_is_valid_json() -> None:
    found = bits.first_difference(torch.tensor([math.nan]), torch.tensor([-math.inf]))
    assert found is not None
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert json.loads(text)["right"] == "-inf"


def test_ulp_distance_counts_representable_values() -> None:
    a = torch.tensor([1.0, 0.0, -1.0, 1e-45, 2.0])
    b = torch.tensor([1.0, -0.0, 1.0, -1e-45, 1.0])
    one = 0x3F800000
    assert bits.ulp_distance(a, b).tolist() == [0, 1, 2 * one + 1, 3, 0x800000]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_ulp_distance_is_one_for_neighbours(dtype: torch.dtype) -> None:
    a = torch.randn(200).to(dtype)
    view = bits.int_view(a).clone()
    b = (view + 1).view(dtype)
    assert bits.ulp_distance(a, b).unique().tolist() == [1]


def test_ulp_distance_beyond_int64_is_clamped() -> None:
    far = bits.ulp_distance(torch.tensor([-1e308]).double(), torch.tensor([1e308]).double())
    assert far.tolist() == [2**63 - 1]


def test_ulp_histogram_counts_every_element_once() -> None:
    a = torch.tensor([1.0, 1.0, 1.0, 1.0, math.nan, math.inf, math.nan])
    b = torch.tensor([1.0, 1.0, 1.0, 1.0, math.nan, 1.0, 1.0])
    view = bits.int_view(b)
    view[1] += 1
    view[2] += 3
    view[3] += 4
    assert bits.ulp_histogram(a, b) == {"nonfinite": 2, "0": 2, "1": 1, "2-3": 1, "4-7": 1}


def test_nonfinite_gives_the_first_coordinate() -> None:
    x = torch.zeros(3, 4)
    assert bits.nonfinite(x) is None
    assert bits.nonfinite(torch.arange(4)) is None
    x[2, 3] = math.nan
    x[1, 2] = -math.inf
    assert bits.nonfinite(x) == (1, 2)
    assert bits.nonfinite(x.bfloat16()) == (1, 2)
    assert bits.nonfinite(torch.zeros(0)) is None
    assert bits.nonfinite(torch.tensor(math.inf)) == ()
    with pytest.raises(NonFiniteError, match=r"model\.norm holds -inf at \[1, 2\]"):
        bits.check_finite(x, "model.norm")


def test_gradients_do_not_disturb() -> None:
    a = torch.randn(3, 4, requires_grad=True)
    assert bits.equal(a, a.detach())
    assert bits.digest_rows(a).shape == (3, 2)
    assert bits.first_difference(a, a * 2) is not None
