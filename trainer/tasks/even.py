"""`even`: the reward is the share of sampled tokens whose id is even. For tests, demos and studies.

It asks for no understanding, and a model that has learned it can do nothing: the point is that a
tiny model with random weights, which no real task could move, shows within a few hundred updates
whether training works. Prompts are eight random ids.
"""

import random
from dataclasses import dataclass

from ..loop.records import Prompt, Trajectory

NUM_IDS = 8
FIRST_ID = 3
"""Below are the ids that tiny models call padding, beginning and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Even:
    """A :class:`..loop.records.Task`. vocabulary: number of token ids."""

    vocabulary: int
    name: str = "even"

    def prompt(self, index: int, rng: random.Random) -> Prompt:
        """Eight random ids."""
        ids = tuple(rng.randrange(FIRST_ID, self.vocabulary) for _ in range(NUM_IDS))
        return Prompt(tokens=ids)

    def score(self, trajectory: Trajectory) -> float:
        """Share of even ids among the sampled tokens."""
        sampled = [token for turn in trajectory.responses for token in turn]
        return sum(token % 2 == 0 for token in sampled) / len(sampled)
