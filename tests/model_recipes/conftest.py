"""A tiny llama for this folder's tests, and forwards in the two ways engines run it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from zeromismatch.model_recipes import tiny

LENGTHS = (21, 40)


@pytest.fixture
def model() -> Any:
    """A fresh tiny:llama in fp32."""
    return tiny.build("tiny:llama", dtype=torch.float32)


@pytest.fixture
def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 3011, (length,), generator=generator) for length in LENGTHS]


def packed(sequences: list[Tensor]) -> dict[str, Any]:
    """Keyword arguments of one packed forward without an engine."""
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    return {
        "input_ids": torch.cat(sequences)[None],
        "position_ids": positions[None],
        "use_cache": False,
    }
