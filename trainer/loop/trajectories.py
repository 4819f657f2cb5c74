"""Trajectories on their way: from a generated run, to a request, to JSON and back, to a batch.

    trajectory = opened(prompt, group=3, member=0, temperature=1.0)
    trajectory = extended(trajectory, run)          # one model turn more
    batch = batch_of(trajectories, version=7, loss=loss)

:func:`admit` refuses what may not be learned from: an empty response, a reward or logprob that is
not finite, a response longer than the model's positions. Logprobs travel as int32, so no bit is
lost on the way.
"""

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.errors import NonFiniteError, UsageError
from ..engines.base import Request, Run, Sampling
from .records import Batch, Head, Loss, Prompt, Trajectory


def seed_of(*parts: object) -> int:
    """31 bits that depend on all parts and on nothing else."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1


def opened(prompt: Prompt, *, group: int, member: int, temperature: float) -> Trajectory:
    """A response that has not begun."""
    if not prompt.tokens:
        raise UsageError(f"the prompt of group {group} is empty; give it at least one token")
    return Trajectory(
        id=f"{group}/{member}",
        group=group,
        prompt=prompt,
        tokens=tuple(prompt.tokens),
        sampled_mask=(False,) * len(prompt.tokens),
        turns=(),
        logprob_bits=(),
        versions=(),
        temperature=temperature,
    )


def request_of(
    trajectory: Trajectory, *, seed: int = 0, max_new_tokens: int = 0, id: str | None = None
) -> Request:
    """What an engine needs: to score it, or (``max_new_tokens``) to go on with it.

    Scoring obeys recorded routes, where there are any.
    """
    return Request(
        id=id or trajectory.id,
        tokens=trajectory.tokens,
        sampled_mask=trajectory.sampled_mask,
        turns=trajectory.turns,
        sampling=Sampling(
            temperature=trajectory.temperature,
            seed=seed,
            max_new_tokens=max_new_tokens,
            stop_ids=trajectory.prompt.stop_ids,
        ),
        forced={} if max_new_tokens else trajectory.routes,
    )


def extended(trajectories: Sequence[Trajectory], run: Run) -> list[Trajectory]:
    """Each trajectory with the turn that ``run`` sampled for it, logprobs and versions included."""
    bits: dict[str, list[int]] = {}
    versions: dict[str, list[int]] = {}
    for sample in run.samples:
        bits.setdefault(sample.request, []).append(sample.logprob_bits)
        versions.setdefault(sample.request, []).append(sample.version)
    after = {request.id: request for request in run.requests}
    return [
        replace(
            each,
            tokens=after[each.id].tokens,
            sampled_mask=after[each.id].sampled_mask,
            turns=after[each.id].turns,
            logprob_bits=(*each.logprob_bits, *bits[each.id]),
            versions=(*each.versions, *versions[each.id]),
        )
        for each in trajectories
    ]


def answered(trajectory: Trajectory, tokens: Sequence[int]) -> Trajectory:
    """The trajectory with what the task said, which nobody sampled."""
    return replace(
        trajectory,
        tokens=(*trajectory.tokens, *tokens),
        sampled_mask=(*trajectory.sampled_mask, *(False,) * len(tokens)),
    )


def admit(trajectory: Trajectory, *, limit: int) -> Trajectory:
    """The trajectory, if it may be learned from. limit: positions of the model."""
    name = f"response {trajectory.id}"
    sampled = sum(trajectory.sampled_mask)
    if not sampled:
        raise UsageError(f"{name} is empty: no token of it was sampled; give it room for one")
    if len(trajectory.tokens) > limit:
        raise UsageError(
            f"{name} has {len(trajectory.tokens)} tokens and the model {limit} positions; lower "
            "max_new_tokens or max_turns, or shorten the prompts"
        )
    if not len(trajectory.logprob_bits) == len(trajectory.versions) == sampled:
        raise UsageError(
            f"{name} has {sampled} sampled tokens, {len(trajectory.logprob_bits)} logprobs and "
            f"{len(trajectory.versions)} versions; record one of each per sampled token"
        )
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        raise NonFiniteError(
            f"the reward of {name} is {trajectory.reward}; make the task return a finite number"
        )
    bad = [at for at, value in enumerate(mu_of([trajectory]).tolist()) if not math.isfinite(value)]
    if bad:
        raise NonFiniteError(
            f"{name} has logprob {mu_of([trajectory])[bad[0]].item()} at its action token {bad[0]} "
            f"(version {trajectory.versions[bad[0]]}); look at that version's weights"
        )
    return trajectory


def dealt(trajectories: Sequence[Trajectory], *, seed: str) -> list[Trajectory]:
    """The trajectories with their rewards dealt out at random, for that control."""
    rewards = [each.reward for each in trajectories]
    random.Random(seed).shuffle(rewards)
    return [
        replace(each, reward=reward) for each, reward in zip(trajectories, rewards, strict=True)
    ]


def mu_of(trajectories: Sequence[Trajectory]) -> Tensor:
    """fp32 [N]: the recorded logprobs, in order."""
    values = [value for each in trajectories for value in each.logprob_bits]
    return torch.tensor(values, dtype=torch.int32).view(torch.float32)


def versions_of(trajectories: Sequence[Trajectory]) -> Tensor:
    """int32 [N]: the version that drew each action token."""
    return torch.tensor(
        [version for each in trajectories for version in each.versions], dtype=torch.int32
    )


def batch_of(trajectories: Sequence[Trajectory], *, version: int, loss: Loss) -> Batch:
    """The batch of one whole update."""
    lengths = torch.tensor([len(each.logprob_bits) for each in trajectories])
    rewards = torch.tensor([each.reward for each in trajectories], dtype=torch.float64)
    group = torch.tensor([each.group for each in trajectories])
    return Batch(
        version=version,
        mu=mu_of(trajectories),
        versions=versions_of(trajectories),
        response=torch.repeat_interleave(torch.arange(len(trajectories)), lengths),
        lengths=lengths,
        rewards=rewards,
        group=group,
        advantages=loss.advantages(rewards, group),
        num_responses=len(trajectories),
        head=head_of(trajectories),
    )


def head_of(trajectories: Sequence[Trajectory]) -> Head | None:
    """Ids [N, H] and recorded logprobs of all action tokens; None where none was recorded.

    The learner's logprobs are NaN until it fills them in.
    """
    held = [entry for each in trajectories for entry in each.head]
    if not held:
        return None
    mu = torch.tensor([values for _, values in held], dtype=torch.int32).view(torch.float32)
    ids = torch.tensor([row for row, _ in held])
    return Head(ids=ids, mu=mu, logp=torch.full_like(mu, float("nan")))


def part_of(batch: Batch, first: int, last: int) -> Batch:
    """Responses ``[first, last)`` as a micro-batch; ``num_responses`` stays the update's."""
    ends = [0, *batch.lengths.cumsum(0).tolist()]
    tokens, rows = slice(ends[first], ends[last]), slice(first, last)
    return replace(
        batch,
        mu=batch.mu[tokens],
        versions=batch.versions[tokens],
        response=batch.response[tokens] - first,
        lengths=batch.lengths[rows],
        rewards=batch.rewards[rows],
        group=batch.group[rows],
        advantages=batch.advantages[rows],
        old=None if batch.old is None else batch.old[tokens],
        head=None
        if batch.head is None
        else Head(
            ids=batch.head.ids[tokens], mu=batch.head.mu[tokens], logp=batch.head.logp[tokens]
        ),
    )


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Plain values; the same trajectory comes back from :func:`from_json`."""
    values = {each.name: getattr(trajectory, each.name) for each in fields(trajectory)}
    prompt = trajectory.prompt
    values["prompt"] = {each.name: getattr(prompt, each.name) for each in fields(prompt)}
    return values


def from_json(values: Mapping[str, Any]) -> Trajectory:
    """What :func:`to_json` made, after JSON has turned tuples into lists."""
    prompt = values["prompt"]
    return Trajectory(
        id=values["id"],
        group=values["group"],
        prompt=Prompt(
            tokens=tuple(prompt["tokens"]),
            data=prompt["data"],
            stop_ids=tuple(prompt["stop_ids"]),
            max_new_tokens=prompt["max_new_tokens"],
        ),
        tokens=tuple(values["tokens"]),
        sampled_mask=tuple(values["sampled_mask"]),
        turns=tuple((start, stop) for start, stop in values["turns"]),
        logprob_bits=tuple(values["logprob_bits"]),
        versions=tuple(values["versions"]),
        temperature=values["temperature"],
        reward=values["reward"],
        head=tuple((tuple(ids), tuple(bits)) for ids, bits in values["head"]),
        routes={
            site: tuple(tuple(chosen) for chosen in choices)
            for site, choices in values["routes"].items()
        },
    )
