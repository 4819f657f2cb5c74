"""REINFORCE Zero: c = w, the token's ratio π/μ, unclipped; nothing is truncated or rejected.

    L  = −(1/B) Σ_i (1/T_i) Σ_t A_i·w_it                    direct
    L' = −(1/B) Σ_i (1/T_i) Σ_t sg(w_it)·A_i·logp_it        detached, with the same gradient

since ∇w = w·∇logp. T_i counts the action tokens of the whole response, all turns. A is the reward
minus the mean of its group. At lag 0 with aligned kernels w is exactly 1, and the update is plain
REINFORCE bit for bit. Source: Hu et al. 2026.
"""

from torch import Tensor

from ..loop.records import Batch
from .tokens import Coefficient, CoefficientLoss, accepted, ratio


def unclipped(batch: Batch, logp: Tensor) -> Coefficient:
    """c = w."""
    return accepted(ratio(batch, logp))


def direct(batch: Batch, logp: Tensor) -> Tensor:
    """L itself, differentiable, fp64: for checks by finite differences, which L' would mislead."""
    w = (logp.double() - batch.mu.double()).exp()
    scale = batch.advantages.double() / (batch.num_responses * batch.lengths)
    return -(scale[batch.response] * w).sum()


loss = CoefficientLoss(name="reinforce_zero", coefficient=unclipped)
