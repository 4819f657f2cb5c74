"""What must hold: settings that give a loss what it asks for, tokens within the cap, and memory."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

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


@contextmanager
def named_memory(update: int, config: TrainConfig) -> Generator[None]:
    """CapabilityError where there is no memory for a micro-batch; nothing was applied."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in text:
            raise
        remedy = "resume with a lower max_rows, which changes no bit"
        if config.ranks > 1:
            remedy = "resume on a device with more, or start again with a lower max_rows"
        raise CapabilityError(
            f"update {update}: no memory for a micro-batch of at most {config.max_rows} tokens "
            f"({text.splitlines()[0]}); {remedy}"
        ) from error
