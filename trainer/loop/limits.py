"""What must hold: settings that give a loss what it asks for, and tokens within the cap."""

from collections.abc import Sequence

from ...kernels.errors import CapabilityError, MisalignedError
from ..losses.tokens import CoefficientLoss
from .config import TrainConfig
from .records import Trajectory


def check_loss(loss: CoefficientLoss, config: TrainConfig) -> None:
    """Raise CapabilityError where ``config`` cannot give ``loss`` what it works on."""
    if (loss.needs_head or loss.needs_routes) and config.ranks > 1:
        raise CapabilityError(
            f"loss {loss.name} works on more than the rollout's tokens and logprobs, which a "
            "learner on several ranks does not take; use ranks 1"
        )
    if (loss.needs_head or loss.needs_routes) and config.rollout != "paged":
        raise CapabilityError(
            f"loss {loss.name} watches the rollout engine at work, which {config.rollout} does "
            "not allow; use rollout paged"
        )
    if loss.needs_routes and config.partial == "recorded":
        raise CapabilityError(
            f"loss {loss.name} replays one choice per token, and a response that goes on under "
            "a newer version can hold two; set `partial: forbidden`"
        )


def check_lag(update: int, trajectories: Sequence[Trajectory], cap: int) -> None:
    """Raise MisalignedError for a token older than the cap."""
    oldest = min(version for each in trajectories for version in each.versions)
    if update - oldest > cap:
        raise MisalignedError(
            f"update {update} holds a token of version {oldest}, older than the cap of {cap}; "
            "please report this: the work buffer should not allow it"
        )
