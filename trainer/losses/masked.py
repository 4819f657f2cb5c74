"""Masked importance sampling (IcePop): c = w where 0.5 ≤ w ≤ 5, else 0. For study only.

Source: arXiv 2510.18855 and 2512.01374. Masked tokens stay in T_i.
"""

from dataclasses import dataclass

from torch import Tensor

from ..loop.records import Batch
from .tokens import Coefficient, CoefficientLoss, keep_where, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """least, most: the ratios kept, both ends included."""

    least: float = 0.5
    most: float = 5.0

    def __call__(self, batch: Batch, logp: Tensor) -> Coefficient:
        """c = w·1[least ≤ w ≤ most]."""
        w = ratio(batch, logp)
        return keep_where((w >= self.least) & (w <= self.most), w)


loss = CoefficientLoss(name="masked", coefficient=Masked())
