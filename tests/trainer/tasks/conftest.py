"""Trajectories made by hand, as a worker would hand them to a task."""

from collections.abc import Sequence

from zeromismatch.trainer.loop.records import Prompt, Trajectory


def responded(prompt: Prompt, *turns: Sequence[int], replies: Sequence[Sequence[int]] = ()):
    """A response of these model turns, with what the task said between them."""
    tokens, mask, spans = list(prompt.tokens), [False] * len(prompt.tokens), []
    for index, turn in enumerate(turns):
        spans.append((len(tokens), len(tokens) + len(turn)))
        tokens += turn
        mask += [True] * len(turn)
        if index < len(replies):
            tokens += replies[index]
            mask += [False] * len(replies[index])
    sampled = sum(mask)
    return Trajectory(
        id="0/0",
        group=0,
        prompt=prompt,
        tokens=tuple(tokens),
        sampled_mask=tuple(mask),
        turns=tuple(spans),
        logprob_bits=(0,) * sampled,
        versions=(0,) * sampled,
        temperature=1.0,
    )
