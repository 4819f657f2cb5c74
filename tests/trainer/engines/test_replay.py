"""Routing replay: recorded choices are obeyed, and refused where they do not fit."""

from dataclasses import replace

import pytest

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import CapabilityError, MisalignedError
from zeromismatch.model_recipes.models import load_model
from zeromismatch.trainer.engines.base import Request, Sampling, Scenario
from zeromismatch.trainer.engines.build import make_engine
from zeromismatch.trainer.engines.replay import ChoiceRecorder
from zeromismatch.trainer.engines.schedules import build_schedule

SITES = tuple(f"model.layers.{layer}.mlp.gate#experts" for layer in range(2))


@pytest.fixture(scope="module")
def engines():
    loaded = load_model("tiny:qwen3_moe", dtype="float32")
    packed = make_engine("packed", loaded, "aligned")
    return packed, make_engine("paged", loaded, "aligned", instrument=packed.instrument)


@pytest.fixture(scope="module")
def requests():
    return tuple(
        Request(
            id=f"r{index}",
            tokens=tuple(range(5 + index, 5 + index + length)),
            sampled_mask=(False,) * 3 + (True,) * (length - 3),
            sampling=Sampling(seed=index),
        )
        for index, length in enumerate((11, 19))
    )


@pytest.fixture(scope="module")
def recorder(engines, requests):
    _, paged = engines
    recorder = ChoiceRecorder()
    schedule = build_schedule("mixed", requests, paged.state_specs())
    paged.run(
        Scenario(model="tiny:qwen3_moe", plan="aligned", requests=requests, schedule=schedule),
        recorder,
    )
    return recorder


def test_replaying_a_rollouts_own_choice_changes_nothing(engines, requests, recorder):
    packed, _ = engines
    again = [replace(request, forced=recorder.forced(request)) for request in requests]
    assert set(again[0].forced) == set(SITES)
    assert bits.equal(packed.logprobs(again), packed.logprobs(requests))
    assert bits.equal(packed.logprobs(requests), packed.logprobs(requests))  # not sticky


def test_another_choice_is_obeyed(engines, requests, recorder):
    packed, _ = engines
    forced = recorder.forced(requests[0])
    rows = [list(row) for row in forced[SITES[0]]]
    spare = next(expert for expert in range(16) if expert not in rows[4])
    rows[4][-1] = spare
    other = replace(requests[0], forced=forced | {SITES[0]: tuple(map(tuple, rows))})
    mine, theirs = packed.logprobs([other]), packed.logprobs([requests[0]])
    assert bits.equal(mine[:2], theirs[:2])  # positions 3 and 4 are predicted by rows 2 and 3
    assert not bits.equal(mine[2:], theirs[2:])


def test_a_record_that_does_not_fit_is_refused(engines, requests, recorder):
    packed, _ = engines
    forced = recorder.forced(requests[0])
    rows = forced[SITES[0]]
    bad = {
        "one row short": rows[:-1],
        "out of range": (*rows[:-1], (0, 1, 2, 16)),
        "twice": (*rows[:-1], (0, 1, 2, 2)),
        "too few": (*rows[:-1], (0, 1, 2)),
    }
    for choices in bad.values():
        with pytest.raises(MisalignedError, match="record"):
            packed.logprobs([replace(requests[0], forced={SITES[0]: choices})])
    with pytest.raises(CapabilityError, match="makes choices at"):
        packed.logprobs([replace(requests[0], forced={"model.layers.9.mlp.gate#experts": rows})])
    mixture = [replace(requests[0], forced=forced), requests[1]]
    with pytest.raises(CapabilityError, match="run them apart"):
        packed.logprobs(mixture)


def test_a_request_that_was_not_recorded_whole_is_refused(requests, recorder):
    longer = replace(requests[0], tokens=(*requests[0].tokens, 7), sampled_mask=())
    with pytest.raises(MisalignedError, match="position 11"):
        recorder.forced(longer)
