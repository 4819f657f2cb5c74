"""How far a gradient may be from fp64: by classes, by weights, and on the whole."""

import math

import pytest
import torch

from zeromismatch.agent_tools.gates.allowance import Error, errors_of, pooled, too_far

LAYERS = 30
STOCK = {f"layers.{n}.{kind}.weight": Error(0.05, 1.0) for n in range(LAYERS) for kind in "ab"}
STOCK["layers.9.a.weight"] = Error(0.4, 1.0)
BOUND = 8.0


def judged(**changed: Error) -> list[str]:
    """What is beyond when these weights (``a9`` for layer 9's a) differ from stock's."""
    renamed = {f"layers.{name[1:]}.{name[0]}.weight": error for name, error in changed.items()}
    return too_far(STOCK | renamed, STOCK, BOUND)[0]


def test_chance_is_allowed() -> None:
    assert judged() == []
    assert judged(a9=Error(0.8, 1.0)) == []  # twice stock's largest, where stock is as far
    assert judged(b3=Error(0.2, 1.0)) == []  # four times what is usual, in one weight


def test_a_weight_is_held_to_its_like_and_not_to_the_largest_error_of_all() -> None:
    assert judged(b3=Error(0.39, 1.0)) == ["layers.3.b.weight"]
    assert judged(b3=Error(math.inf, 1.0)).count("layers.3.b.weight") == 1


def test_a_class_is_beyond_where_each_of_its_weights_would_pass() -> None:
    wrong = {f"b{n}": Error(0.15, 1.0) for n in range(LAYERS)}
    assert len(judged(**wrong)) == LAYERS
    fine = {f"b{n}": Error(0.09, 1.0) for n in range(LAYERS)}
    assert judged(**fine) == []


def test_a_class_of_few_numbers_is_one_draw_and_held_as_a_weight_is() -> None:
    for count, beyond in ((2, 0), (3, LAYERS)):  # 60 numbers, and 90
        wrong = {f"b{n}": Error(0.15, 1.0, count) for n in range(LAYERS)}
        assert len(judged(**wrong)) == beyond, count


def test_everything_is_beyond_where_the_mean_is_and_no_contract_is_exceeded() -> None:
    assert len(too_far({n: Error(0.12, 1.0) for n in STOCK}, STOCK, BOUND)[0]) == 2 * LAYERS
    assert too_far(STOCK, STOCK, 0.1)[0] == ["layers.9.a.weight"]


def test_errors_are_norms_and_a_missing_gradient_is_infinitely_far() -> None:
    exact = {"x": torch.tensor([3.0, 4.0]), "y": torch.ones(4)}
    errors = errors_of({"x": torch.tensor([3.0, 3.0])}, exact)
    assert errors["x"] == Error(1.0, 5.0, 2)
    assert errors["y"].relative == math.inf
    assert pooled([Error(3.0, 5.0), Error(4.0, 12.0)]) == pytest.approx(5 / 13)
