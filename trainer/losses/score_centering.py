"""Score Centering: subtract what the gradient would be on average if the reward said nothing.

For study only. Under samples from μ the expected score Σ_v q_v·f(p_v/q_v)·∇log p_v is 0 only where
both engines agree and f is right; the recorded head H of the rollout's distribution allows to
subtract it, with the tail taken as proportional (q ≈ r·p outside H):

    −A·[sg f(w)·log p_y − Σ_{v∈H} sg(q_v·f(p_v/q_v) − a·p_v)·log p_v]
    r = (1 − Q_H)/(1 − P_H),   a = r·f(1/r)

f = 1 (no importance weight) is the published form and the default; with f(x) = x the correction is
exactly 0 and REINFORCE Zero is left. Where the head holds all but 2⁻²⁰ of either distribution,
the tail carries nothing and r is taken as 1. Source: arXiv 2609.20807.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..loop.records import Batch
from .tokens import Coefficient, CoefficientLoss, ratio

LEAST_TAIL = 2.0**-20


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCentering:
    """weight: f, ``one`` or ``ratio``."""

    weight: Literal["one", "ratio"] = "one"

    def __call__(self, batch: Batch, logp: Tensor) -> Coefficient:
        """c = f(w), and −(q·f(p/q) − a·p) for the head's tokens."""
        assert batch.head is not None  # CoefficientLoss checks needs_head
        q, p = batch.head.mu.double().exp(), batch.head.logp.detach().double().exp()
        tail_q, tail_p = 1 - q.sum(dim=1), 1 - p.sum(dim=1)
        bare = (tail_q <= LEAST_TAIL) | (tail_p <= LEAST_TAIL)
        tail_ratio = torch.where(bare, torch.ones_like(tail_q), tail_q / tail_p)
        w = ratio(batch, logp)
        if self.weight == "ratio":  # q·(p/q) − 1·p
            c, head = w, torch.zeros_like(p)
        else:
            c, head = torch.ones_like(w), q - tail_ratio[:, None] * p
        return Coefficient(c=c, rejected=torch.zeros_like(w, dtype=torch.bool), head=-head)


loss = CoefficientLoss(name="score_centering", coefficient=ScoreCentering(), needs_head=True)
