"""Small products for the model of Hopper's arithmetic: inputs from a seed, digests of outputs."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from zeromismatch.kernels import adversarial

SIZES = ((1, 8, 16), (3, 24, 40), (17, 40, 200), (33, 16, 1024), (5, 9, 1037))
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = (*adversarial.KINDS, "tiny")


def operands(kind: str, dtype: torch.dtype, size: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """x [M, K], weight [N, K], bias [N]; fp16 is scaled down so that nothing overflows."""
    m, n, k = size
    drawn = "wide" if kind == "tiny" else kind
    scale = 2.0**-6 if dtype == torch.float16 else 1.0
    x, weight = (
        adversarial.rows(rows, k, seed=seed, kind=drawn, scale=scale)
        for rows, seed in ((m, 31), (n, 32))
    )
    if kind == "tiny":  # products below fp32's normal numbers, or of subnormal fp16
        low = 2.0**-70 if dtype == torch.bfloat16 else 2.0**-10
        x, weight = x * low, weight * low
    bias = adversarial.rows(1, n, seed=33, kind="plain")[0]
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


Case = tuple[str, Tensor, Tensor, Tensor]


def _cases() -> Iterator[Case]:
    for name, dtype in DTYPES.items():
        for kind in KINDS:
            for size in SIZES:
                label = f"{name} {kind} {'x'.join(map(str, size))}"
                yield label, *operands(kind, dtype, size)


@pytest.fixture(scope="session")
def hopper_cases() -> list[Case]:
    """(name, x, weight, bias) of every small product."""
    return list(_cases())


@pytest.fixture(scope="session")
def hopper_operands() -> Callable[..., tuple[Tensor, ...]]:
    """The maker of one of them: kind, dtype, (M, N, K)."""
    return operands
