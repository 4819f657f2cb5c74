"""Publication in place: everything arrives, or the old version serves on."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import (
    BudgetError,
    CapabilityError,
    MisalignedError,
    NonFiniteError,
    UsageError,
)
from zeromismatch.trainer.publication.in_place import LiveWeights


def weights(value: float) -> dict[str, Tensor]:
    return {
        "a.weight": torch.full((5, 7), value),
        "b.weight": torch.full((3,), value, dtype=torch.bfloat16),
    }


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return weights(1.0)


@pytest.fixture
def live(tensors: dict[str, Tensor]) -> LiveWeights:
    return LiveWeights(tensors, cleared=lambda: True)


def test_what_was_offered_is_what_serves(live: LiveWeights, tensors: dict[str, Tensor]) -> None:
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    offer = live.stage(weights(2.0), version=3)
    assert bits.equal(tensors["a.weight"], weights(1.0)["a.weight"])  # staging changes nothing
    done = live.install(offer)
    assert all(bits.equal(tensors[name], new) for name, new in weights(2.0).items())
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == places
    assert (live.version, live.root) == (3, offer.publish.digest)
    assert (done.tensors, done.nbytes) == (2, 5 * 7 * 4 + 3 * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("a.weight"), "needs 'a.weight'"),
        (lambda w: w.update({"c.weight": torch.ones(1)}), "no tensor 'c.weight'"),
        (lambda w: w.update({"a.weight": torch.ones(7, 5)}), "the reader's is"),
        (lambda w: w.update({"a.weight": torch.ones(5, 7).double()}), "convert it"),
    ],
)
def test_partial_and_foreign_weights_are_refused(live: LiveWeights, change, message) -> None:
    new = weights(2.0)
    change(new)
    with pytest.raises(UsageError, match=message):
        live.stage(new, version=1)


def test_numbers_that_are_none_are_refused_by_name(live: LiveWeights) -> None:
    new = weights(2.0)
    new["a.weight"][4, 6] = float("nan")
    with pytest.raises(NonFiniteError, match=r"a\.weight"):
        live.stage(new, version=1)


def test_old_and_repeated_versions_are_refused(live: LiveWeights) -> None:
    offer = live.stage(weights(2.0), version=1)
    live.install(offer)
    with pytest.raises(UsageError, match="does not exceed"):
        live.stage(weights(3.0), version=1)
    with pytest.raises(UsageError, match="stage it again"):
        live.install(offer)


def unchanged(live: LiveWeights, tensors: dict[str, Tensor], root: str) -> None:
    assert all(bits.equal(tensors[name], old) for name, old in weights(1.0).items())
    assert (live.version, live.root) == (0, root)


def test_a_tensor_that_changes_on_the_way_leaves_the_old_version(
    live: LiveWeights, tensors: dict[str, Tensor]
) -> None:
    root, new = live.root, weights(2.0)
    offer = live.stage(new, version=1)
    bits.int_view(new["a.weight"]).view(-1)[3] ^= 1  # after it was digested
    with pytest.raises(MisalignedError, match=r"1 tensor\(s\) arrived as something else.*a.weight"):
        live.install(offer)
    unchanged(live, tensors, root)


def test_time_that_runs_out_leaves_the_old_version(
    live: LiveWeights, tensors: dict[str, Tensor]
) -> None:
    root = live.root
    with pytest.raises(BudgetError, match="the old version serves on"):
        live.install(live.stage(weights(2.0), version=1), seconds=0.0)
    unchanged(live, tensors, root)
    live.install(live.stage(weights(2.0), version=1))  # and it can be tried again
    assert live.version == 1


def test_caches_that_stay_leave_the_old_version(tensors: dict[str, Tensor]) -> None:
    answers: Iterator[bool] = iter([False, True])
    live = LiveWeights(tensors, cleared=lambda: next(answers))
    root = live.root
    with pytest.raises(CapabilityError, match="kept caches"):
        live.install(live.stage(weights(2.0), version=1))
    unchanged(live, tensors, root)


def test_a_tensor_that_moved_is_named(live: LiveWeights, tensors: dict[str, Tensor]) -> None:
    assert live.moved(tensors) == []
    moved = tensors | {"b.weight": tensors["b.weight"].clone()}
    assert live.moved(moved) == ["b.weight"]
