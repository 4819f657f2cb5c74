"""Rollout routing replay (R3): c = w, as REINFORCE Zero, with the rollout's choice of experts.

For study only. The learner sends each token to the experts that the rollout chose, so that a router
whose scores differ in their last bits flips no expert; every other difference stays. Source: Ma et
al. 2025 (arXiv 2510.11370).
"""

from .reinforce_zero import unclipped
from .tokens import CoefficientLoss

loss = CoefficientLoss(name="routing_replay", coefficient=unclipped, needs_routes=True)
