"""Facts of one small update, every number of which is written out."""

from dataclasses import replace

import pytest
import torch

from zeromismatch.trainer.loop.records import Audit, Batch, UpdateFacts
from zeromismatch.trainer.losses.catalogue import loss_named


def make_facts(version: int = 5, *, shift: float = 0.1, after: torch.Tensor | None = None):
    """Three responses of 1, 3 and 2 tokens; two of one group, and lags 0, 1 and 2."""
    loss = loss_named("reinforce_zero")
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1])
    mu = torch.tensor([-0.5, -1.0, -2.0, -0.25, -0.75, -1.5, -3.0])
    batch = Batch(
        version=version,
        mu=mu,
        versions=torch.tensor([5, 4, 4, 4, 3, 3, 5], dtype=torch.int32) + (version - 5),
        response=torch.tensor([0, 1, 1, 1, 2, 2, 3]),
        lengths=torch.tensor([1, 3, 2, 1]),
        rewards=rewards,
        group=group,
        advantages=loss.advantages(rewards, group),
        num_responses=4,
    )
    logp = mu + torch.tensor([0.0, 1.0, 1.0, 1.0, -2.0, -2.0, 0.0]) * shift
    return UpdateFacts(
        batch=batch,
        logp=logp,
        output=loss(batch, logp),
        audit=Audit(mu=mu[:3], logp=mu[:3].clone(), versions=batch.versions[:3]),
        gradient_norm=0.25,
        learning_rate=1e-3,
        cap=2,
        rollout_seconds=1.0,
        train_seconds=2.0,
        sync_seconds=0.5,
        wait_seconds=1.5,
        blocked_seconds=0.0,
        tokens=40,
        weights_root="ab" * 16,
        plan_digest="cd" * 16,
        after=after,
    )


@pytest.fixture
def facts() -> UpdateFacts:
    return make_facts()


def poisoned(facts: UpdateFacts, **changes: torch.Tensor) -> UpdateFacts:
    """The same facts with other tensors in the batch."""
    return replace(facts, batch=replace(facts.batch, **changes))
