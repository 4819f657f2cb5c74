"""GSPO: one ratio per response, s_i = exp(mean_t(logp − old)), clipped. For study only.

    L = −(1/B) Σ_i min(s_i·A_i, clip(s_i, 1 − 3e-4, 1 + 4e-4)·A_i)

∂s_i/∂logp_t = s_i/T_i, so c = s_i for every token of the response, or 0 where it is clipped
(counted as rejected). ``old`` are the trainer's logprobs under the weights that sampled. The paper
divides the advantage by the group's deviation; here it is ours. Source: arXiv 2507.18071.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..loop.records import Batch
from .clipped_ratio import inside
from .tokens import (
    Coefficient,
    CoefficientLoss,
    check_tokens,
    keep_where,
    log_ratio,
    over_response,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo:
    """below, above: ε₁ and ε₂."""

    below: float = 3e-4
    above: float = 4e-4

    def __call__(self, batch: Batch, logp: Tensor) -> Coefficient:
        """c = s, or 0 where clipped."""
        assert batch.old is not None  # CoefficientLoss checks needs_old
        s = over_response(log_ratio(logp, batch.old), batch, "mean").exp()
        check_tokens(s.to(torch.float32), "the ratio s of the response", batch)
        return keep_where(inside(s, batch.advantages[batch.response], self.below, self.above), s)


loss = CoefficientLoss(name="gspo", coefficient=Gspo(), needs_old=True)
