"""Taps write digests from inside operators: eager and compiled code leave the same trace."""

import pytest
import torch
from torch import Tensor

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import CapabilityError
from zeromismatch.kernels.taps import Taps, tapped


@torch.library.custom_op("zeromismatch_test::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """An operator with a tap in its body, as the GPU operators have."""
    return tapped("doubled", x * 2)


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def block(x: Tensor) -> Tensor:
    return doubled(doubled(x) + 1.0)


def test_digests_are_those_of_the_outputs() -> None:
    x = torch.randn(5, 3, 7)
    taps = Taps(calls=2, rows=8, device="cpu")
    with taps.recording():
        y = block(x)
    found = taps.read()
    assert list(found) == ["doubled.0", "doubled.1"]
    assert bits.equal(found["doubled.0"], bits.digest_rows(x * 2))
    assert bits.equal(found["doubled.1"], bits.digest_rows(y))


def test_compiled_code_leaves_the_trace_of_eager_code() -> None:
    x = torch.randn(6, 40)
    taps = Taps(calls=4, rows=6, device="cpu")
    with taps.recording():
        block(x)
    eager = taps.read()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    compiled(x)
    with taps.recording():
        compiled(x)
    again = taps.read()
    assert again.keys() == eager.keys()
    assert all(bits.equal(again[name], eager[name]) for name in eager)
    with taps.recording():
        compiled(torch.where(torch.arange(40) == 3, x + 1e-6, x))  # one flipped column shows
    assert not bits.equal(taps.read()["doubled.0"], eager["doubled.0"])


def test_nothing_is_recorded_outside_and_too_little_room_is_an_error() -> None:
    taps = Taps(calls=1, rows=4, device="cpu")
    block(torch.randn(3, 2))
    assert taps.read() == {}
    with pytest.raises(CapabilityError, match="make Taps with more"), taps.recording():
        block(torch.randn(3, 2))
    with pytest.raises(CapabilityError, match="5 rows"), taps.recording():
        block(torch.randn(5, 2))
