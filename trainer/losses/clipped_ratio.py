"""The clipped surrogate of PPO with its denominator recomputed or bypassed. For study only.

    L = −(1/B) Σ_i (1/T_i) Σ_t min(r·A, clip(r, 1 − ε, 1 + ε)·A),   ε = 0.2

recompute: r = π/old, where the trainer computes the sampled tokens' logprobs again under the
weights that sampled; what the rollout really sampled from is ignored. bypass: r = π/μ. Both
clip, so a token whose r has left the interval in its advantage's direction gets no gradient; those
count as rejected. Source: VeXact, section 4.1 (with our advantage: no deviation, no whitening).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..loop.records import Batch
from .tokens import Coefficient, CoefficientLoss, check_tokens, keep_where, log_ratio


def inside(r: Tensor, advantages: Tensor, below: float, above: float) -> Tensor:
    """bool: where min(r·A, clip(r)·A) follows r. Where A is 0 there is no gradient anyway: True."""
    return ~(((advantages > 0) & (r > 1 + above)) | ((advantages < 0) & (r < 1 - below)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedRatio:
    """against: old (recompute) or mu (bypass). epsilon: half the width of the interval."""

    against: Literal["old", "mu"]
    epsilon: float = 0.2

    def __call__(self, batch: Batch, logp: Tensor) -> Coefficient:
        """c = r, or 0 where clipped."""
        denominator = batch.mu if self.against == "mu" else batch.old
        assert denominator is not None  # CoefficientLoss checks needs_old
        r = log_ratio(logp, denominator).exp()
        check_tokens(r.to(torch.float32), f"the ratio exp(logp − {self.against})", batch)
        advantages = batch.advantages[batch.response]
        return keep_where(inside(r, advantages, self.epsilon, self.epsilon), r)


recompute = CoefficientLoss(
    name="recompute", coefficient=ClippedRatio(against="old"), needs_old=True
)
bypass = CoefficientLoss(name="bypass", coefficient=ClippedRatio(against="mu"))
