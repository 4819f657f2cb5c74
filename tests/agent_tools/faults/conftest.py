"""The tiny models that faults are planted on, each built once."""

import functools
from collections.abc import Callable

import pytest

from zeromismatch.model_recipes.models import LoadedModel, load_model


@pytest.fixture(scope="session")
def models() -> Callable[[str], LoadedModel]:
    return functools.cache(load_model)


@pytest.fixture(scope="session")
def model(models: Callable[[str], LoadedModel]) -> LoadedModel:
    return models("tiny:llama")
