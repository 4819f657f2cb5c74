"""Advantages: reward minus a mean, in fp64; no division by a deviation, no whitening.

A_i = (R_i − R_first) − mean over the group of (R_j − R_first), i included. Subtracting the first
reward first makes a group of equal rewards exactly 0; the plain mean of three times 0.1 leaves
−1.4e-17. The sum of a group is ``math.fsum``, correctly rounded whatever the order.

    group_mean(tensor([1.0, 0.0, 0.1, 0.1]), tensor([0, 0, 1, 1]))     # [0.5, -0.5, 0.0, 0.0]
"""

import math

import torch
from torch import Tensor

from ...kernels.errors import NonFiniteError, UsageError


def group_mean(rewards: Tensor, group: Tensor) -> Tensor:
    """fp32 [B] from rewards fp64 [B] and groups int64 [B]: REINFORCE Zero's advantage.

    Every group must be whole. Raises NonFiniteError for a reward that is no finite number,
    UsageError for groups of unequal size (a part of a group has another mean).
    """
    if rewards.dtype != torch.float64 or rewards.dim() != 1 or rewards.shape != group.shape:
        raise UsageError(
            f"rewards are fp64 [B] and groups [B], not {rewards.dtype} {tuple(rewards.shape)} and "
            f"{tuple(group.shape)}; give one of each for every response"
        )
    values = rewards.tolist()
    members: dict[int, list[int]] = {}
    for index, name in enumerate(group.tolist()):
        if not math.isfinite(values[index]):
            raise NonFiniteError(
                f"the reward of response {index} (group {name}) is {values[index]}; a task returns "
                "finite numbers: correct its score"
            )
        members.setdefault(name, []).append(index)
    sizes = {name: len(indices) for name, indices in members.items()}
    if len(set(sizes.values())) > 1:
        raise UsageError(f"groups have unequal sizes {sizes}; wait until every group is whole")
    advantages = [0.0] * len(values)
    for indices in members.values():
        first = values[indices[0]]
        mean = math.fsum(values[index] - first for index in indices) / len(indices)
        for index in indices:
            advantages[index] = (values[index] - first) - mean
    return torch.tensor(advantages, dtype=torch.float64).to(torch.float32).to(rewards.device)


def batch_mean(rewards: Tensor, group: Tensor) -> Tensor:
    """fp32 [B]: against the mean of the whole update. For study (FlashREINFORCE)."""
    return group_mean(rewards, torch.zeros_like(group))
