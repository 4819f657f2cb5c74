"""Every loss by name. REINFORCE Zero trains; the others are for study and say so themselves.

loss_named("reinforce_zero")
"""

from ...kernels.errors import UsageError
from . import (
    clipped_ratio,
    flash_reinforce,
    gspo,
    masked,
    reinforce_zero,
    routing_replay,
    score_centering,
    sequence_gate,
    stock_kernels,
    synchronous,
    token_gate,
    truncated,
    truncated_sequence_gate,
)
from .tokens import CoefficientLoss

LOSSES: dict[str, CoefficientLoss] = {
    loss.name: loss
    for loss in (
        reinforce_zero.loss,
        synchronous.loss,
        stock_kernels.loss,
        truncated.loss,
        masked.loss,
        token_gate.loss,
        token_gate.loss_k3,
        sequence_gate.loss_corr_k1,
        sequence_gate.loss_corr_k3,
        sequence_gate.loss_ppo_k1,
        sequence_gate.loss_ppo_k3,
        truncated_sequence_gate.loss_k1,
        truncated_sequence_gate.loss_k3,
        clipped_ratio.recompute,
        clipped_ratio.bypass,
        score_centering.loss,
        gspo.loss,
        flash_reinforce.loss,
        routing_replay.loss,
    )
}


def loss_named(name: str) -> CoefficientLoss:
    """The loss of that name; UsageError lists the names."""
    if name not in LOSSES:
        raise UsageError(f"there is no loss {name!r}; choose one of {', '.join(LOSSES)}")
    return LOSSES[name]
