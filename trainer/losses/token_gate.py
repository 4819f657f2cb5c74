"""Token gate: c = w where the token's own mismatch κ is at most τ, else 0. For study only.

κ is |d| or k3 = expm1(d) − d with d = logp − mu. The statistic and threshold behind the published
comparison are not known to us; |d| ≤ 0.1 here is our choice.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..loop.records import Batch
from .tokens import Coefficient, CoefficientLoss, k3, keep_where, log_ratio, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGate:
    """statistic: κ. most: τ."""

    statistic: Literal["absolute", "k3"] = "absolute"
    most: float = 0.1

    def __call__(self, batch: Batch, logp: Tensor) -> Coefficient:
        """c = w·1[κ ≤ τ]."""
        d = log_ratio(logp, batch.mu)
        kappa = d.abs() if self.statistic == "absolute" else k3(d)
        return keep_where(kappa <= self.most, ratio(batch, logp))


loss = CoefficientLoss(name="token_gate", coefficient=TokenGate())
loss_k3 = CoefficientLoss(name="token_gate_k3", coefficient=TokenGate(statistic="k3", most=0.005))
