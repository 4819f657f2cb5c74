"""Truncated importance sampling (TIS): c = min(w, C), C = 2. For study only.

Bounds the weight of a token, so its gradient is biased wherever w passes C. Nothing is rejected.
Source: Yao et al. 2025.
"""

from dataclasses import dataclass

from torch import Tensor

from ..loop.records import Batch
from .tokens import Coefficient, CoefficientLoss, accepted, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncated:
    """most: C."""

    most: float = 2.0

    def __call__(self, batch: Batch, logp: Tensor) -> Coefficient:
        """c = min(w, C)."""
        return accepted(ratio(batch, logp).clamp(max=self.most))


loss = CoefficientLoss(name="truncated", coefficient=Truncated())
