"""Routing replay: the choices that the rollout recorded, and a learner that obeys them."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import CapabilityError
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import aligned_plan, stock_plan
from zeromismatch.trainer.engines.packed import PackedEngine
from zeromismatch.trainer.loop.config import TrainConfig
from zeromismatch.trainer.loop.records import Prompt, Trajectory
from zeromismatch.trainer.loop.run import Setup, train
from zeromismatch.trainer.loop.trajectories import from_json, mu_of, request_of, to_json
from zeromismatch.trainer.loop.versions import Versions
from zeromismatch.trainer.loop.worker import RolloutWorker, WorkerSpec

from .conftest import SMALL

MODEL = "tiny:qwen3_moe"
PROMPT = 20


@dataclass(frozen=True)
class Long:
    """Prompts longer than a cache page, so that a group's members share their prefix."""

    name: str = "long"

    def prompt(self, index: int, rng: random.Random) -> Prompt:
        return Prompt(tokens=tuple(rng.randrange(3, 400) for _ in range(PROMPT)))

    def score(self, trajectory: Trajectory) -> float:
        return float(trajectory.tokens[-1] % 2)


@pytest.fixture(scope="module")
def experts() -> LoadedModel:
    return load_model(MODEL)


@pytest.fixture
def group(experts: LoadedModel, tmp_path: Path) -> tuple[Trajectory, ...]:
    """One group of a worker that records routes; the model is free again afterwards."""
    config = TrainConfig.model_validate(SMALL | {"loss": "routing_replay"})
    spec = WorkerSpec(
        model=MODEL, dtype="float32", model_seed=0, plan=aligned_plan("float32", "cpu"),
        task=Long(), config=config, versions=tmp_path,
    )  # fmt: skip
    Versions(tmp_path)
    worker = RolloutWorker(spec, experts)
    try:
        return worker.generate((0,), version=0).groups[0]
    finally:
        worker.close()


def test_the_learner_goes_where_the_rollout_went(
    group: tuple[Trajectory, ...], experts: LoadedModel
):
    engine = PackedEngine(experts, aligned_plan("float32", "cpu"))
    try:
        routers = set(engine.instrument.routings)
        assert all(set(each.routes) == routers for each in group)
        assert all(len(c) == len(e.tokens) for e in group for c in e.routes.values())
        with torch.no_grad():
            obeyed = engine.logprobs([request_of(each) for each in group])
            flipped = engine.logprobs([request_of(_flipped(each)) for each in group])
    finally:
        engine.close()
    assert bits.equal(obeyed, mu_of(group))
    assert not bits.equal(flipped, mu_of(group))


def _flipped(trajectory: Trajectory) -> Trajectory:
    """Another expert for the first token at the first router."""
    site = min(trajectory.routes)
    first, *others = trajectory.routes[site]
    other = next(expert for expert in range(16) if expert not in first)
    return replace(trajectory, routes={**trajectory.routes, site: ((*first[:-1], other), *others)})


def test_routes_come_back_from_json(group: tuple[Trajectory, ...]):
    assert [from_json(to_json(each)) for each in group] == list(group)


def test_a_run_with_stock_kernels_and_replayed_routes(experts: LoadedModel, tmp_path: Path):
    config = TrainConfig.model_validate(
        SMALL | {"loss": "routing_replay", "updates": 2, "lag": 1, "require_zero": False}
    )
    setup = Setup(model=MODEL, plan=stock_plan(), task=Long(), config=config)
    assert train(setup, tmp_path / "run", model=load_model(MODEL)).version == 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"partial": "recorded", "mode": "free"}, "forbidden"),
        ({"ranks": 2}, "ranks 1"),
    ],
)
def test_what_replay_cannot_promise_is_refused(setup_of, tmp_path: Path, settings, reason):
    setup = setup_of(loss="routing_replay", **settings)
    with pytest.raises(CapabilityError, match=reason):
        train(setup, tmp_path / "run")


def test_a_model_without_experts_is_refused(setup_of, fresh, tmp_path: Path):
    with pytest.raises(CapabilityError, match="no router"):
        train(setup_of(loss="routing_replay"), tmp_path / "run", model=fresh())
