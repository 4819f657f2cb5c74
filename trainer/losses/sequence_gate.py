"""Sequence gate: c = w for responses whose mismatch S_i is at most τ, else 0. For study only.

S_i combines one estimate per token over the response (sum or mean; VeXact's text sums, verl takes
means, and a threshold of 0.001 only makes sense for means), of one of two ratios:

    r_corr = old/mu     trainer against rollout at the weights that sampled: the kernel term alone
    r_ppo  = logp/mu    learner against rollout: kernel term and weight lag together

k1 is |Σd| or |mean d| (signs cancel within a response), k3 is expm1(d) − d, never negative. With
aligned kernels r_corr is exactly 1 and nothing is rejected; r_ppo rejects lag itself.
Sources: arXiv 2512.23075; VeXact.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..loop.records import Batch
from .tokens import Coefficient, CoefficientLoss, k3, keep_where, log_ratio, over_response, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGate:
    """ratio: r_corr or r_ppo. estimate: k1 or k3. how: sum or mean. most: τ."""

    of: Literal["corr", "ppo"]
    estimate: Literal["k1", "k3"]
    how: Literal["sum", "mean"] = "mean"
    most: float = 0.001

    def __call__(self, batch: Batch, logp: Tensor) -> Coefficient:
        """c = w·1[S ≤ τ]."""
        return keep_where(self.keeps(batch, logp), ratio(batch, logp))

    def keeps(self, batch: Batch, logp: Tensor) -> Tensor:
        """bool [N]: whether each token's response passes."""
        source = logp if self.of == "ppo" else batch.old
        assert source is not None  # CoefficientLoss checks needs_old
        d = log_ratio(source, batch.mu)
        each = d if self.estimate == "k1" else k3(d)
        return over_response(each, batch, self.how).abs() <= self.most


def _loss(of: Literal["corr", "ppo"], estimate: Literal["k1", "k3"]) -> CoefficientLoss:
    return CoefficientLoss(
        name=f"sequence_gate_{of}_{estimate}",
        coefficient=SequenceGate(of=of, estimate=estimate),
        needs_old=of == "corr",
    )


loss_corr_k1, loss_corr_k3 = _loss("corr", "k1"), _loss("corr", "k3")
loss_ppo_k1, loss_ppo_k3 = _loss("ppo", "k1"), _loss("ppo", "k3")
