"""What must hold: settings that give a loss what it asks for, tokens within the cap, and memory."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from textwrap import shorten

import torch

from ...kernels.errors import CapabilityError, MisalignedError
from ..losses.tokens import CoefficientLoss
from .config import TrainConfig
from .records import Trajectory

PHRASES = (
    "allocate memory", "out of memory", "alloc_failed", "free memory on device",
    "no available memory for",
)  # fmt: skip
"""Of the messages with which torch, CUDA's libraries and vLLM say that there is not enough."""
MOST_TOLD = 200
"""Characters of them: torch lists every process of a GPU, and the remedy comes after that."""
ROLLOUT_REMEDY = (
    "free memory of that device or, with vLLM, lower cache_gib, which changes no bit; then resume"
)


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
def named_memory(what: str, remedy: str) -> Generator[None]:
    """CapabilityError where the device has no memory for ``what``; nothing was applied or lost."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        text = str(error)
        if not isinstance(error, torch.OutOfMemoryError) and not any(
            phrase in text.lower() for phrase in PHRASES
        ):
            raise
        told = shorten(text, width=MOST_TOLD, placeholder=" …")
        raise CapabilityError(f"no memory for {what} ({told}); {remedy}") from error


def rows_of(config: TrainConfig) -> str:
    """A micro-batch, for :func:`named_memory`."""
    return f"a micro-batch of at most {config.max_rows} tokens"


def fewer_rows(config: TrainConfig) -> str:
    """What to do where there is no memory for one."""
    if config.ranks > 1:
        return "resume on a device with more, or start again with a lower max_rows"
    return "resume with a lower max_rows, which changes no bit"
