"""What ``generate`` samples replays bit for bit, whatever batching and memory did on the way."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from zeromismatch.kernels.errors import ScheduleError, UsageError
from zeromismatch.kernels.sampling import sample
from zeromismatch.trainer.engines.base import Policy, Request, Run, Sampling, Step
from zeromismatch.trainer.engines.legal import legal
from zeromismatch.trainer.engines.paged import replay

POLICIES = {
    "roomy": Policy(),
    "tight": Policy(max_step_tokens=40, num_pages=13),
    "no prefix cache": Policy(max_step_tokens=64, prefix_cache=False),
    "one by one": Policy(max_running=1),
}


@pytest.fixture(scope="module")
def prompts(requests: tuple[Request, ...]) -> tuple[Request, ...]:
    temperatures = (1.0, 0.7, 0.0, 1.3, 1.0)
    return tuple(
        Request(
            id=request.id,
            tokens=request.tokens[:-8],
            sampling=Sampling(temperature=temperature, seed=seed, max_new_tokens=14),
        )
        for seed, (request, temperature) in enumerate(zip(requests, temperatures, strict=True))
    )


@pytest.fixture(scope="module")
def rollouts(pairs: Any, prompts: tuple[Request, ...]) -> dict[str, Run]:
    paged = pairs("aligned", "float32").paged
    return {name: paged.generate(prompts, policy) for name, policy in POLICIES.items()}


@pytest.mark.parametrize("name", POLICIES)
def test_executed_schedule_replays_with_identical_bits(
    name: str, rollouts: dict[str, Run], pairs: Any
) -> None:
    run, paged = rollouts[name], pairs("aligned", "float32").paged
    assert not legal(run.executed, paged.state_specs(), run.requests)
    again = paged.run(replay(run))
    assert again.executed == run.executed
    assert set(run.samples) <= set(again.samples)
    assert len(run.samples) == 5 * 14


def test_tokens_and_bits_do_not_depend_on_batching(rollouts: dict[str, Run]) -> None:
    first, *others = rollouts.values()
    for other in others:
        assert other.requests == first.requests
        assert other.samples == first.samples
    events = {
        name: Counter(type(event).__name__ for event in run.executed.events)
        for name, run in rollouts.items()
    }
    assert events["roomy"]["Hit"] == 3
    assert events["no prefix cache"]["Hit"] == 0
    assert events["tight"]["Preempt"] == events["tight"]["Resume"] > 0
    assert events["tight"]["Evict"] > 0
    sizes = [len(s.slices) for s in rollouts["roomy"].executed.events if isinstance(s, Step)]
    assert max(sizes) == 5


def test_sampled_logprob_equals_the_trainers_score(
    rollouts: dict[str, Run], pairs: Any, scenario: Any, bits_of: Any
) -> None:
    run, packed = rollouts["tight"], pairs("aligned", "float32").packed
    scored = bits_of(packed.run(scenario(packed.schedule("packed", run.requests), run.requests)))
    sampled = bits_of(run)
    assert {token: scored[token] for token in sampled} == sampled
    logprobs = packed.logprobs(run.requests).tolist()
    assert len(logprobs) == len(sampled)


def test_each_token_is_the_draw_of_its_seed_and_position_from_the_trainers_logits(
    rollouts: dict[str, Run], pairs: Any
) -> None:
    packed = pairs("aligned", "float32").packed
    for request in rollouts["roomy"].requests:
        start, stop = request.turns[-1]
        step = packed.schedule("alone", [request]).events[0]
        with torch.no_grad():
            hidden = packed._hidden(step, {request.id: request})[start - 1 : stop - 1]
            logits = packed.instrument.head_logits(hidden)
        count = stop - start
        seeds = torch.full((count,), request.sampling.seed)
        warmth = torch.full((count,), request.sampling.temperature)
        drawn = sample(logits, seeds, torch.arange(start, stop), warmth)
        assert tuple(drawn.tolist()) == request.tokens[start:stop]


def test_requests_come_back_with_their_reply_marked(
    rollouts: dict[str, Run], prompts: tuple[Request, ...]
) -> None:
    for before, after in zip(prompts, rollouts["roomy"].requests, strict=True):
        known = len(before.tokens)
        assert after.tokens[:known] == before.tokens
        assert after.sampled_mask == (False,) * known + (True,) * 14
        assert after.turns == ((known, known + 14),)
    versions = {(s.version, s.temperature) for s in rollouts["roomy"].samples}
    assert versions == {(0, 1.0), (0, 0.7), (0, 1.3)}  # greedy is scored at 1


def test_bfloat16_rollout_replays_and_stock_does_not(pairs: Any, prompts: Any) -> None:
    policy = POLICIES["tight"]
    aligned, stock = pairs("aligned", "bfloat16").paged, pairs("stock", "float32").paged
    run = aligned.generate(prompts, policy)
    assert set(run.samples) <= set(aligned.run(replay(run)).samples)
    run = stock.generate(prompts, policy)
    assert not set(run.samples) <= set(stock.run(replay(run)).samples)


def test_seed_decides_and_stop_tokens_end(pairs: Any, prompts: Any, rollouts: Any) -> None:
    paged = pairs("aligned", "float32").paged
    request, reply = prompts[0], rollouts["roomy"].requests[0].tokens[len(prompts[0].tokens) :]
    other = replace(request, sampling=replace(request.sampling, seed=99))
    assert paged.generate([other]).requests[0].tokens[len(request.tokens) :] != reply
    stopping = replace(request, sampling=replace(request.sampling, stop_ids=(reply[5],)))
    stopped = paged.generate([stopping]).requests[0].tokens[len(request.tokens) :]
    assert stopped == reply[: reply.index(reply[5]) + 1]


def test_rollout_can_be_continued(pairs: Any, prompts: Any, rollouts: dict[str, Run]) -> None:
    """A reply sampled in two parts is the reply sampled in one."""
    paged = pairs("aligned", "float32").paged
    half = replace(prompts[0], sampling=replace(prompts[0].sampling, max_new_tokens=7))
    first = paged.generate([half]).requests[0]
    second = paged.generate([first]).requests[0]
    whole = rollouts["roomy"].requests[0]
    assert second.tokens == whole.tokens
    assert second.sampled_mask == whole.sampled_mask


@pytest.mark.parametrize(
    ("sampling", "policy", "error", "message"),
    [
        ({"max_new_tokens": 0}, {}, UsageError, "nothing to sample"),
        ({"temperature": -1.0}, {}, UsageError, "temperature -1.0"),
        ({"temperature": float("nan")}, {}, UsageError, "temperature nan"),
        ({"max_new_tokens": 2048}, {}, ScheduleError, "limit is 2048"),
        ({}, {"num_pages": 0}, UsageError, "num_pages 0"),
        ({}, {"max_step_tokens": 0}, UsageError, "max_step_tokens 0"),
        ({}, {"max_running": 0}, UsageError, "max_running 0"),
        ({}, {"num_pages": 3}, UsageError, "'r0' can never fit: it needs 4 cache pages"),
    ],
)
def test_impossible_generation_is_refused(
    sampling: Any, policy: Any, error: Any, message: str, pairs: Any, prompts: Any
) -> None:
    request = replace(prompts[0], sampling=replace(prompts[0].sampling, **sampling))
    with pytest.raises(error, match=message):
        pairs("aligned", "float32").paged.generate([request], Policy(**policy))
    with pytest.raises(UsageError, match="no requests"):
        pairs("aligned", "float32").paged.generate([])
    with pytest.raises(UsageError, match="share an id"):
        pairs("aligned", "float32").paged.generate([prompts[0], prompts[0]])
