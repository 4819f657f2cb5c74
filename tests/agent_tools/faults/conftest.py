"""One tiny model, shared by the tests of this folder."""

import pytest

from zeromismatch.model_recipes.models import LoadedModel, load_model


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return load_model("tiny:llama")
