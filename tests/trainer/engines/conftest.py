"""Requests that cross at least three pages, and engines around the tiny Llama."""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from zeromismatch.model_recipes.models import DTypeName, LoadedModel, load_model
from zeromismatch.trainer.engines.base import Request, Run, Scenario, Schedule
from zeromismatch.trainer.engines.build import make_engine
from zeromismatch.trainer.engines.packed import PackedEngine
from zeromismatch.trainer.engines.paged import PagedEngine


class Pair(NamedTuple):
    """Trainer and rollout over one model with one plan."""

    packed: PackedEngine
    paged: PagedEngine


@pytest.fixture(scope="session")
def requests() -> tuple[Request, ...]:
    """Five requests of 50 to 70 tokens, four with a common prefix of 35; the last 12 sampled."""
    rng = random.Random(1)
    prefix = [rng.randrange(3, 3000) for _ in range(35)]
    made: list[Request] = []
    for index, length in enumerate((52, 70, 61, 66, 50)):
        tokens = prefix if index != 1 else []
        tokens = [*tokens, *(rng.randrange(3, 3000) for _ in range(length - len(tokens)))]
        mask = (False,) * (length - 12) + (True,) * 12
        made.append(Request(id=f"r{index}", tokens=tuple(tokens), sampled_mask=mask))
    return tuple(made)


@pytest.fixture(scope="session")
def pairs() -> Iterator[Callable[[str, DTypeName], Pair]]:
    """``pairs(plan, dtype)``: engines that share one model, built once."""
    built: dict[tuple[str, str], Pair] = {}

    def get(plan: str, dtype: DTypeName) -> Pair:
        if (plan, dtype) not in built:
            loaded = load_model("tiny:llama", dtype=dtype)
            packed = make_engine("packed", loaded, plan)
            assert isinstance(packed, PackedEngine)
            paged = make_engine("paged", loaded, plan, instrument=packed.instrument)
            assert isinstance(paged, PagedEngine)
            built[plan, dtype] = Pair(packed, paged)
        return built[plan, dtype]

    yield get
    for pair in built.values():
        pair.packed.close()


@pytest.fixture
def tiny() -> LoadedModel:
    """A model of one's own, to publish to or to break."""
    return load_model("tiny:llama")


@pytest.fixture(scope="session")
def scenario() -> Callable[[Schedule, tuple[Request, ...]], Scenario]:
    """``scenario(schedule, requests)``."""
    return lambda schedule, requests: Scenario(
        model="tiny:llama", plan="", requests=requests, schedule=schedule
    )


@pytest.fixture(scope="session")
def bits_of() -> Callable[[Run], dict[tuple[str, int], int]]:
    """``bits_of(run)``: logprob bits by (request, position)."""
    return lambda run: {(s.request, s.position): s.logprob_bits for s in run.samples}
