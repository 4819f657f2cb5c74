"""What every test gets: NaN in uninitialised memory, fixed seeds, no stray GPU tests.

``torch.empty`` and its kin are filled with NaN (integers with their largest value), so that
reading what nobody wrote shows at once. torch's own ``fill_uninitialized_memory`` acts only in
deterministic mode, which would also swap the stock kernels that some tests measure; hence the
patch. The fill runs with torch-function modes off, so that an audit of executed operators never
sees it.

Two pytest workers on a small machine would each start a thread per core, so workers default to one.
"""

import os
import random
from collections.abc import Callable
from functools import wraps

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy
import pytest
import torch

EMPTY_FUNCTIONS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or with the largest value where the dtype has no NaN."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if tensor.device.type == "meta" or tensor.numel() == 0:
            return tensor
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def poisoned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same allocation function, its result poisoned."""

    @wraps(function)
    def allocate(*args: object, **kwargs: object) -> torch.Tensor:
        return poison(function(*args, **kwargs))

    return allocate


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in EMPTY_FUNCTIONS:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
