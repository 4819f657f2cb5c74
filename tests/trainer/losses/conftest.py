"""Small batches of action tokens whose every number is written out."""

from collections.abc import Callable

import pytest
import torch

from zeromismatch.trainer.loop.records import Batch, Head

LENGTHS = (1, 5, 3, 2)
MU = (-0.7, -0.2, -3.1, -0.01, -1.5, -2.2, -0.4, -0.9, -5.0, -0.3, -1.1)
LOGP = (-0.9, -0.2, -1.2, -0.012, -1.45, -3.9, -0.41, -0.9, -4.2, -0.35, -1.0)
OLD = (-0.7, -0.21, -3.1, -0.0101, -1.5, -2.2, -0.4, -0.9, -4.9, -0.3, -1.1)
REWARDS = (1.0, 0.25, 0.0, 0.5)
GROUPS = (7, 7, 3, 3)


def make_batch(
    rewards: tuple[float, ...] = REWARDS,
    mu: tuple[float, ...] = MU,
    lengths: tuple[int, ...] = LENGTHS,
    *,
    advantages: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    head: Head | None = None,
) -> Batch:
    """Four responses of 1, 5, 3 and 2 action tokens in two groups."""
    reward = torch.tensor(rewards, dtype=torch.float64)
    group = torch.tensor(GROUPS[: len(rewards)])
    return Batch(
        version=9,
        mu=torch.tensor(mu),
        versions=torch.full((len(mu),), 7, dtype=torch.int32),
        response=torch.tensor(
            [row for row, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64
        ),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        rewards=reward,
        group=group,
        advantages=advantages(reward, group),
        num_responses=len(rewards),
        old=torch.tensor(OLD) if len(mu) == len(OLD) else None,
        head=head,
    )


@pytest.fixture
def logp() -> torch.Tensor:
    return torch.tensor(LOGP, requires_grad=True)
