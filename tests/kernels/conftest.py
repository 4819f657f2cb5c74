"""Shared by operator tests: a test that takes ``threads`` runs at several thread counts."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=(1, 2, 3))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
