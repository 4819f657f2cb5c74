"""Convolutions and recurrences: an order is told from a wrong state, under stock and planted."""

from typing import Any

import pytest
import torch
from torch import Tensor

from zeromismatch.agent_tools.localize import Options, localize
from zeromismatch.agent_tools.records import Divergence
from zeromismatch.agent_tools.reduction.programs import program
from zeromismatch.agent_tools.scenarios import random_requests
from zeromismatch.agent_tools.sides import Side
from zeromismatch.kernels.errors import CapabilityError
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.trainer.engines.paged_batch import PagedBatch


@pytest.fixture(scope="module")
def nemotron() -> LoadedModel:
    return load_model("tiny:nemotron_h")


def find(model: LoadedModel, left: str, right: str, plan: str) -> dict[str, set[str]]:
    """Causes by operator class."""
    requests = random_requests(model, count=2, max_reply=6, seed=3)
    sides, options = (Side.parse(left), Side.parse(right)), Options(self_test=False)
    found: Divergence = localize(*sides, model, requests, plan=plan, options=options)
    causes: dict[str, set[str]] = {}
    for culprit in found.culprits:
        causes.setdefault(culprit.op_class, set()).add(culprit.cause.name)
    return causes


def test_stock_decode_is_another_order_of_the_recurrence(nemotron: LoadedModel) -> None:
    causes = find(nemotron, "transformers:decode", "transformers:alone", "stock")
    assert causes["recurrence_ssd"] == {"reduction order"}
    assert causes.get("convolution", set()) <= {"reduction order", "rounding point"}
    assert not any("unclassified" in names for names in causes.values()), causes


@pytest.mark.parametrize("method", ["recur", "convolve"])
def test_a_state_of_other_rows_is_a_wrong_state(
    nemotron: LoadedModel, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A decode row without its state, or with half of what its taps see."""
    op_class = {"recur": "recurrence_ssd", "convolve": "convolution"}[method]
    original = getattr(PagedBatch, method)

    def forgets(self: PagedBatch, layer: Any, *rows: Any) -> Tensor:
        output = original(self, layer, *rows)
        if len(output) > 1:
            return output
        return torch.zeros_like(output) if method == "recur" else output / 2

    monkeypatch.setattr(PagedBatch, method, forgets)
    causes = find(nemotron, "paged:decode", "packed:packed", "aligned")
    assert causes == {op_class: {"stale or wrong state"}}


@pytest.mark.parametrize("op_class", ["recurrence_ssd", "recurrence_kda", "convolution"])
def test_one_operators_repro_is_refused_with_the_way_to_a_whole_one(op_class: str) -> None:
    with pytest.raises(CapabilityError, match="zm repro DIVERGENCE --whole"):
        program(op_class, None)
