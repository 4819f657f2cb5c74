"""Two ranks over gloo: the forward of one, sums in a fixed order, and checkpoints that continue."""

from pathlib import Path
from typing import Any

import pytest

from zeromismatch.kernels import bits
from zeromismatch.model_recipes.apply import find_sites
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.plan import plan_from
from zeromismatch.trainer.loop.config import TrainConfig
from zeromismatch.trainer.loop.run import Setup, train
from zeromismatch.trainer.tasks.even import Even

SMALL = {
    "recipe": "-", "task": "even", "groups": 2, "group_size": 2, "max_new_tokens": 3,
    "learning_rate": 1e-3, "checkpoint_every": 2, "wait_seconds": 800.0, "lag": 1,
}  # fmt: skip


def config(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate(SMALL | changes)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_compute_the_bits_of_one_and_resume_bit_for_bit(tmp_path: Path) -> None:
    model = load_model("tiny:qwen3")
    plan = plan_from("aligned", find_sites(model.module), model.dtype, model.device, model.identity)

    def run(folder: str, resume: bool = False, **changes: object) -> tuple[Any, list[Any]]:
        facts: list[Any] = []
        setup = Setup(
            model="tiny:qwen3", plan=plan, task=Even(vocabulary=3011), config=config(**changes)
        )
        return train(setup, tmp_path / folder, resume=resume, sink=facts.append), facts

    two, facts = run("two", updates=3, ranks=2)
    one, alone = run("one", updates=1)
    # update 0: the same weights, so the same bits, on one rank and on two, and as the rollout
    assert bits.equal(facts[0].logp, alone[0].logp)
    for fact in facts:
        assert bits.equal(fact.audit.mu, fact.audit.logp)
    assert facts[0].gradient_norm == pytest.approx(alone[0].gradient_norm, rel=1e-5)
    assert one.weights_root == alone[0].weights_root
    # stopped at 2 and resumed: the third update has the bits of the uninterrupted run
    run("again", updates=2, ranks=2)
    assert any((tmp_path / "again" / "checkpoints" / "00000002").glob("*.distcp"))
    resumed, after = run("again", resume=True, updates=3, ranks=2)
    assert resumed.resumed_at == 2
    assert resumed.weights_root == two.weights_root
    assert bits.equal(after[0].logp, facts[2].logp)
