"""The rollout's head of the vocabulary: recorded as the operator gives it, learned from exactly."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.model_recipes.models import LoadedModel
from zeromismatch.trainer.diagnostics.journal import Journal
from zeromismatch.trainer.engines.packed import PackedEngine
from zeromismatch.trainer.loop.heads import SIZE
from zeromismatch.trainer.loop.run import Setup, train
from zeromismatch.trainer.loop.trajectories import batch_of, from_json, mu_of, request_of, to_json
from zeromismatch.trainer.loop.versions import Versions
from zeromismatch.trainer.loop.worker import RolloutWorker, WorkerSpec
from zeromismatch.trainer.losses.catalogue import loss_named


@pytest.fixture
def drawn(setup_of: Callable[..., Setup], fresh: Callable[[], LoadedModel], tmp_path: Path):
    """One group of a worker that records heads, over two requests of three tokens."""
    setup = setup_of(loss="score_centering")
    spec = WorkerSpec(
        model=setup.model,
        dtype="float32",
        model_seed=0,
        plan=setup.plan,
        task=setup.task,
        config=setup.config,
        versions=tmp_path,
    )
    model = fresh()
    worker = RolloutWorker(spec, model)
    Versions(tmp_path)
    group = worker.generate((0,), version=0).groups[0]
    worker.close()
    return group, setup


def test_heads_are_the_likeliest_tokens_with_the_bits_of_the_trainer(drawn, fresh):
    group, setup = drawn
    batch = batch_of(group, version=0, loss=loss_named("score_centering"))
    assert batch.head is not None
    assert batch.head.ids.shape == (6, SIZE)
    engine = PackedEngine(fresh(), setup.plan)
    requests = [request_of(each) for each in group]
    with torch.no_grad():
        logp, beside = engine.logprobs_beside(requests, batch.head.ids)
        assert bits.equal(logp, engine.logprobs(requests))
    assert bits.equal(logp, batch.mu)
    assert bits.equal(beside, batch.head.mu)
    assert (batch.head.mu.diff(dim=1) <= 0).all()
    assert (batch.head.mu.double().exp().sum(dim=1) <= 1).all()
    engine.close()


def test_the_drawn_token_has_one_logprob_wherever_it_stands(drawn):
    group, _ = drawn
    found = 0
    for each in group:
        tokens = [token for turn in each.responses for token in turn]
        for token, (ids, kept), own in zip(tokens, each.head, each.logprob_bits, strict=True):
            if token in ids:
                assert kept[ids.index(token)] == own
                found += 1
    assert found
    assert mu_of(group).numel() == sum(len(each.head) for each in group)


def test_heads_travel_as_json(drawn):
    group, _ = drawn
    assert all(from_json(to_json(each)) == each for each in group)


def test_score_centering_trains_in_the_loop(
    setup_of: Callable[..., Setup], fresh: Callable[[], LoadedModel], tmp_path: Path
):
    roots = {}
    for loss in ("score_centering", "synchronous"):
        setup = setup_of(loss=loss, lag=1, updates=3, max_rows=24)
        folder = tmp_path / loss
        with Journal(folder, tensorboard=False) as journal:
            outcome = train(setup, folder / "run", sink=journal.write, model=fresh())
        assert outcome.version == 3
        roots[loss] = outcome.weights_root
    assert roots["score_centering"] != roots["synchronous"]  # the same c, but for the head
