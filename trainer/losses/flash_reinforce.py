"""FlashREINFORCE's gate: c = w for responses whose mean binary KL is at most 0.005. For study only.

    b = q·log(q/p) + (1 − q)·log((1 − q)/(1 − p)),   q = e^mu, p = e^logp, mean over the response

Its advantage is the reward minus the mean of the whole update, since it takes one sample per
prompt; run it with the same number of responses as its neighbours. Where p is 1 and q is not, b is
infinite and the response is rejected. Source: labs-molt, pull request 116.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..loop.records import Batch
from .advantage import batch_mean
from .tokens import Coefficient, CoefficientLoss, keep_where, over_response, ratio


def binary_kl(mu: Tensor, logp: Tensor) -> Tensor:
    """b per token, fp64 ≥ 0, from logprobs at most 0; 0·log 0 is 0."""
    mu, logp = mu.double().clamp(max=0), logp.double().clamp(max=0)
    sampled = mu.exp() * (mu - logp)
    others_mu, others_pi = -torch.expm1(mu), -torch.expm1(logp)
    others = others_mu * (others_mu.log() - others_pi.log())
    return sampled + torch.where(others_mu == 0, torch.zeros_like(others), others)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashReinforce:
    """most: the largest mean of b that passes."""

    most: float = 0.005

    def __call__(self, batch: Batch, logp: Tensor) -> Coefficient:
        """c = w·1[mean b ≤ most]."""
        mean = over_response(binary_kl(batch.mu, logp), batch, "mean")
        return keep_where(mean <= self.most, ratio(batch, logp))


loss = CoefficientLoss(name="flash_reinforce", coefficient=FlashReinforce(), baseline=batch_mean)
