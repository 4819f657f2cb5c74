"""TIS and a sequence gate together: c = min(w, 2) for responses that pass, else 0. For study only.

The gate looks at r_corr (the kernel term) by k1 or k3, mean over the response at most 0.001; the
combination that VeXact reports as tracking its aligned reference best.
"""

from dataclasses import dataclass

from torch import Tensor

from ..loop.records import Batch
from .sequence_gate import SequenceGate
from .tokens import Coefficient, CoefficientLoss, keep_where, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedSequenceGate:
    """gate: which responses pass. most: C of the truncation."""

    gate: SequenceGate
    most: float = 2.0

    def __call__(self, batch: Batch, logp: Tensor) -> Coefficient:
        """c = min(w, C)·1[S ≤ τ]."""
        return keep_where(self.gate.keeps(batch, logp), ratio(batch, logp).clamp(max=self.most))


loss_k1 = CoefficientLoss(
    name="truncated_sequence_gate_k1",
    coefficient=TruncatedSequenceGate(gate=SequenceGate(of="corr", estimate="k1")),
    needs_old=True,
)
loss_k3 = CoefficientLoss(
    name="truncated_sequence_gate_k3",
    coefficient=TruncatedSequenceGate(gate=SequenceGate(of="corr", estimate="k3")),
    needs_old=True,
)
