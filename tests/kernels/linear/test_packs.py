"""Packed weights never outlive the numbers they were made from."""

import gc

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.linear import forget, forget_all, kept_bytes, linear, packs
from zeromismatch.kernels.reference import linear as reference


@pytest.fixture(autouse=True)
def nothing_kept():
    forget_all()
    yield
    forget_all()


def is_fresh(x: torch.Tensor, weight: torch.Tensor) -> bool:
    with torch.no_grad():
        return bits.equal(linear(x, weight), reference.linear(x, weight.detach()))


def test_a_second_call_uses_the_kept_panels(monkeypatch):
    x, weight = torch.randn(2, 8), torch.randn(5, 8)
    linear(x, weight)
    monkeypatch.setattr(packs, "_pack", None)
    linear(x, weight)
    linear(x, weight.detach())
    with pytest.raises(TypeError):
        linear(x, weight.clone())


def test_an_optimizer_step_changes_the_result():
    x, weight = torch.randn(3, 8), torch.nn.Parameter(torch.randn(5, 8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert is_fresh(x, weight)
    weight.grad = torch.randn(5, 8)
    optimizer.step()
    assert is_fresh(x, weight)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2.0),
        lambda w: w[1:].zero_(),
        lambda w: w.detach().add_(1.0),
        lambda w: w.copy_(torch.ones(5, 8)),
        lambda w: setattr(w, "data", torch.ones(5, 8)),
    ],
)
def test_in_place_updates_are_seen(write):
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert is_fresh(x, weight)
    write(weight)
    assert is_fresh(x, weight)


def test_a_write_that_torch_does_not_count_needs_forget():
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert is_fresh(x, weight)
    weight.data.mul_(2.0)
    forget(weight)
    assert is_fresh(x, weight)


def test_memory_allocated_again_at_the_same_address_is_another_weight():
    x, addresses = torch.randn(3, 16), set()
    for _ in range(50):
        weight = torch.randn(48, 16)
        addresses.add(weight.data_ptr())
        assert is_fresh(x, weight)
        del weight
    assert len(addresses) < 50  # the allocator did reuse memory


def test_kept_memory_is_bounded_by_living_weights():
    x, weight = torch.randn(3, 64), torch.randn(48, 64)
    linear(x, weight)
    alive = kept_bytes()
    assert alive == weight.nbytes
    for _ in range(20):
        linear(x, torch.randn(48, 64))
        weight.add_(1.0)
        linear(x, weight)
    gc.collect()
    assert kept_bytes() == alive
    del weight
    gc.collect()
    assert kept_bytes() == 0


def test_views_of_one_storage_are_told_apart():
    x, fused = torch.randn(3, 8), torch.randn(12, 8)
    for part in (fused[:4], fused[4:8], fused[4:12], fused[::2], fused):
        assert is_fresh(x, part)
    square = torch.randn(8, 8)
    assert is_fresh(x, square)
    assert is_fresh(x, square.t())


def test_a_weight_in_training_leaves_nothing_behind_and_trusts_nothing():
    x, weight = torch.randn(3, 8), torch.randn(5, 8, requires_grad=True)
    assert is_fresh(x, weight)
    weight.data.mul_(2.0)  # as FSDP2's all-gather does: new numbers, the same version
    assert bits.equal(linear(x, weight).detach(), reference.linear(x, weight.detach()))
    assert kept_bytes() == 0


def test_memory_of_panels_is_used_again_in_training_and_never_shared():
    x = torch.randn(3, 8)
    large, small = (torch.randn(rows, 8, requires_grad=True) for rows in (40, 5))
    linear(x, large)
    spare = packs._TRAINING.spare
    assert spare is not None
    for weight in (small, large, small):
        found = linear(x, weight).detach()
        assert bits.equal(found, reference.linear(x, weight.detach()))
        assert packs._TRAINING.spare is spare
    with packs.scoped(large, trains=True), packs.scoped(small, trains=True):
        outer, inner = (packs.panels_of(weight) for weight in (large, small))
        assert outer.untyped_storage().data_ptr() != inner.untyped_storage().data_ptr()
    kept = torch.randn(5, 8)
    assert is_fresh(x, kept)
    assert packs.panels_of(kept)._base is None  # kept panels hold no more than they need


def test_inference_tensors_count_no_versions_and_are_never_kept():
    with torch.inference_mode():
        x, weight = torch.randn(3, 8), torch.randn(5, 8)
        assert is_fresh(x, weight)
        weight.mul_(2.0)
        assert is_fresh(x, weight)
    assert kept_bytes() == 0


def test_a_normal_weight_is_kept_inside_inference_mode():
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    with torch.inference_mode():
        linear(x, weight)
    assert kept_bytes() > 0
    weight.mul_(2.0)
    assert is_fresh(x, weight)
