"""Plain on-policy REINFORCE: c = 1. For study only.

Right where the learner's weights sampled every token and both engines give the same bits (lag 0,
aligned); then it equals REINFORCE Zero bit for bit. At any lag above 0 it ignores that the samples
are old, which `zm study` shows.
"""

import torch
from torch import Tensor

from ..loop.records import Batch
from .tokens import Coefficient, CoefficientLoss, accepted


def unweighted(batch: Batch, logp: Tensor) -> Coefficient:
    """c = 1."""
    return accepted(torch.ones_like(logp, dtype=torch.float64))


loss = CoefficientLoss(name="synchronous", coefficient=unweighted)
