"""A stream of secret sizes and data, and the table of who makes cases for which operator.

    @maker("rmsnorm")
    def _rmsnorm(draw: Draw, num_rows: int) -> Case: ...

The makers are in :mod:`.inputs` (dense layers) and :mod:`.inputs_moe` (experts).
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels import adversarial
from ...kernels.contract import Contract
from ...kernels.trial import Case

AREA = 12_288
"""Elements of an output: rows times columns, about."""

Maker = Callable[["Draw", int], Case]
MAKERS: dict[str, Maker] = {}


class Draw:
    """A contract's dtype and device, and a stream of secret sizes and data."""

    def __init__(self, contract: Contract, seed: int) -> None:
        self.contract = contract
        self.random = random.Random(seed)
        self.dtype: torch.dtype = getattr(torch, contract.dtype)
        self.device = "cpu" if contract.device == "cpu" else "cuda"

    def size(self, low: int, high: int, num_rows: int = 1) -> int:
        """A size between low and high, smaller where there are many rows."""
        high = max(low, min(high, AREA // num_rows))
        return self.random.randint(low, high)

    def rows(
        self, num_rows: int, width: int, *, scale: float = 1.0, kind: str | None = None
    ) -> Tensor:
        """Adversarial ``[num_rows, width]`` in the contract's dtype."""
        return adversarial.rows(
            num_rows, width, seed=self.random.getrandbits(60), dtype=self.dtype,
            device=self.device, scale=scale, kind=kind,
        )  # fmt: skip

    def vector(self, width: int, *, scale: float = 1.0) -> Tensor:
        """Plain ``[width]``."""
        return self.rows(1, width, scale=scale, kind="plain")[0]

    def integers(self, num: int, high: int) -> Tensor:
        """int64 in ``[0, high)``."""
        seed = self.random.getrandbits(60)
        return adversarial.integers((num,), high, seed=seed, device=self.device)

    def uniform(self, num: int, low: float, high: float) -> Tensor:
        """fp32 ``[num]``, whatever the contract's dtype."""
        generator = torch.Generator().manual_seed(self.random.getrandbits(60))
        return (torch.rand(num, generator=generator) * (high - low) + low).to(self.device)

    def maybe(self, value: Any) -> Any:
        """The value, or None, at random."""
        return value if self.random.random() < 0.5 else None


def maker(*names: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        for name in names:
            MAKERS[name] = maker
        return maker

    return register


def case_of(what: str, *arguments: Any, rows: tuple[int, ...] = ()) -> Case:
    return Case(label=what, arguments=arguments, rows=rows)
