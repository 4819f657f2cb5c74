"""What may be learned from, and that nothing is lost on the way."""

import json
from dataclasses import replace

import pytest
import torch

from zeromismatch.kernels.errors import NonFiniteError, UsageError
from zeromismatch.trainer.loop.records import Prompt, Trajectory
from zeromismatch.trainer.loop.trajectories import (
    admit,
    batch_of,
    from_json,
    mu_of,
    opened,
    part_of,
    to_json,
)
from zeromismatch.trainer.losses.catalogue import loss_named


def bits_of(*values: float) -> tuple[int, ...]:
    return tuple(torch.tensor(values).view(torch.int32).tolist())


def trajectory(group: int = 0, member: int = 0, reward: float = 1.0, turns: int = 2) -> Trajectory:
    """``turns`` turns of two and one tokens, two foreign tokens between them."""
    return Trajectory(
        id=f"{group}/{member}",
        group=group,
        prompt=Prompt(tokens=(1, 2), data={"answer": "x"}, stop_ids=(7,)),
        tokens=(1, 2, 5, 6, 3, 3, 7)[: 4 if turns == 1 else 7],
        sampled_mask=(False, False, True, True, False, False, True)[: 4 if turns == 1 else 7],
        turns=((2, 4), (6, 7))[:turns],
        logprob_bits=bits_of(-0.1, -2.0, -1e-30)[: 2 if turns == 1 else 3],
        versions=(3, 3, 4)[: 2 if turns == 1 else 3],
        temperature=0.7,
        reward=reward,
    )


def test_json_keeps_every_bit() -> None:
    one = trajectory()
    assert from_json(json.loads(json.dumps(to_json(one)))) == one


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sampled_mask": (False,) * 7}, UsageError, "response 0/0 is empty"),
        ({"reward": float("nan")}, NonFiniteError, "reward of 0/0|reward of response 0/0 is nan"),
        ({"reward": None}, NonFiniteError, "is None"),
        (
            {"logprob_bits": bits_of(-0.1, float("-inf"), -1.0)},
            NonFiniteError,
            "token 1 .version 3",
        ),
        ({"versions": (3,)}, UsageError, "3 sampled tokens, 3 logprobs and 1 versions"),
    ],
)
def test_what_may_not_be_learned_from_is_refused(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        admit(replace(trajectory(), **change), limit=7)


def test_a_response_past_the_models_positions_is_refused() -> None:
    assert admit(trajectory(), limit=7) == trajectory()
    with pytest.raises(UsageError, match=r"7 tokens and the model 6 positions"):
        admit(trajectory(), limit=6)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match=r"prompt of group 3 is empty"):
        opened(Prompt(tokens=()), group=3, member=0, temperature=1.0)


def test_lengths_count_action_tokens_of_all_turns_and_survive_the_split() -> None:
    group = [trajectory(member=0), trajectory(member=1, reward=0.0, turns=1)]
    batch = batch_of(group, version=5, loss=loss_named("reinforce_zero"))
    assert batch.lengths.tolist() == [3, 2]
    assert batch.response.tolist() == [0, 0, 0, 1, 1]
    assert batch.advantages.tolist() == [0.5, -0.5]
    part = part_of(batch, 1, 2)
    assert (part.num_responses, part.lengths.tolist(), part.response.tolist()) == (2, [2], [0, 0])
    assert part.mu.tolist() == mu_of(group[1:]).tolist()
