"""One tiny model, its requests, and a divergence of stock kernels, shared by this folder."""

import pytest

from zeromismatch.agent_tools.faults.checking import fault_requests
from zeromismatch.agent_tools.localize import Options, localize
from zeromismatch.agent_tools.records import Divergence
from zeromismatch.agent_tools.sides import Runner, Side
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.trainer.engines.base import Request

SIDES = ("paged:decode", "packed:packed")


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return load_model("tiny:llama")


@pytest.fixture(scope="session")
def requests(model: LoadedModel) -> tuple[Request, ...]:
    return fault_requests(model)


def runners(
    model: LoadedModel, requests: tuple[Request, ...], sides: tuple[str, str], plan: str
) -> tuple[Runner, Runner]:
    left, right = (
        Runner(side=Side.parse(side), model=model, requests=requests, plan=plan) for side in sides
    )
    return left, right


@pytest.fixture(scope="session")
def stock(model: LoadedModel, requests: tuple[Request, ...]) -> tuple[Runner, Runner, Divergence]:
    """Stock kernels, decode against whole prefill: linear layers and attention differ."""
    left, right = runners(model, requests, SIDES, "stock")
    found = localize(
        left.side, right.side, model, requests, plan="stock", options=Options(self_test=False)
    )
    return left, right, found
