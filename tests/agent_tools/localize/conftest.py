"""One tiny model and a few short requests, shared by the tests of this folder."""

import pytest

from zeromismatch.agent_tools.scenarios import random_requests
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.trainer.engines.base import Request


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return load_model("tiny:llama")


@pytest.fixture(scope="session")
def requests(model: LoadedModel) -> tuple[Request, ...]:
    """Four requests of 24 to 55 tokens; two share a prefix of more than a page."""
    return random_requests(model, count=4, max_reply=8, seed=3)
