"""One update: the same bits for every split, fp32 masters, and a stop at what is not finite."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import NonFiniteError
from zeromismatch.model_recipes.apply import find_sites
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import Plan, plan_from
from zeromismatch.trainer.engines.packed import PackedEngine
from zeromismatch.trainer.loop.learner import Learner
from zeromismatch.trainer.loop.records import Prompt, Trajectory
from zeromismatch.trainer.loop.run import Setup
from zeromismatch.trainer.loop.trajectories import batch_of, request_of
from zeromismatch.trainer.losses.catalogue import loss_named

LOSS = loss_named("reinforce_zero")
Fresh = Callable[[], LoadedModel]
SetupOf = Callable[..., Setup]


def responses(count: int, mu: float = -7.0) -> list[Trajectory]:
    """Groups of two, of unequal length, one of them with two turns."""
    rng = random.Random(7)
    made: list[Trajectory] = []
    for index in range(count):
        own = 3 + 5 * (index % 3)
        tokens = tuple(rng.randrange(3, 3011) for _ in range(4 + own))
        mask = [False] * 4 + [True] * own
        turns = ((4, 4 + own),)
        if index == 1:
            mask[6], turns = False, ((4, 6), (7, 4 + own))
        made.append(
            Trajectory(
                id=f"{index // 2}/{index % 2}", group=index // 2, prompt=Prompt(tokens=tokens[:4]),
                tokens=tokens, sampled_mask=tuple(mask), turns=turns,
                logprob_bits=tuple(torch.full((sum(mask),), mu).view(torch.int32).tolist()),
                versions=(0,) * sum(mask), temperature=1.0, reward=float(index % 2),
            )
        )  # fmt: skip
    return made


def exact(learner: Learner, group: list[Trajectory]) -> list[Trajectory]:
    """The same, recorded as this learner computes them (ratio 1)."""
    made: list[Trajectory] = []
    for one in group:
        logp = learner.engine.logprobs([request_of(one)]).detach()
        made.append(replace(one, logprob_bits=tuple(logp.view(torch.int32).tolist())))
    return made


def test_the_split_into_micro_batches_changes_no_bit_of_the_gradient(
    fresh: Fresh, plan: Plan, setup_of: SetupOf
) -> None:
    learner = Learner(fresh(), plan, setup_of().config, LOSS)
    group = exact(learner, responses(6))
    batch = batch_of(group, version=0, loss=LOSS)
    wanted: dict[str, torch.Tensor] = {}
    for max_rows in (None, 20, 33, 60):
        learner.config = setup_of(max_rows=max_rows).config
        learner.gradient(group, batch)
        got = {name: learner.accumulators.gradient(name) for name in learner.parameters}
        assert all(grad is not None and bool(grad.any()) for grad in got.values())
        wanted = wanted or {name: grad.clone() for name, grad in got.items() if grad is not None}
        for name, grad in wanted.items():
            again = got[name]
            assert again is not None
            assert bits.equal(grad, again), (max_rows, name)
    # red control: autograd's own sum depends on the split
    parts: list[dict[str, torch.Tensor]] = []
    for pieces in ([group], [group[:2], group[2:]]):
        for parameter in learner.parameters.values():
            parameter.grad = None
        for piece in pieces:
            learner.engine.logprobs([request_of(each) for each in piece]).sum().backward()
        parts.append(
            {n: p.grad.clone() for n, p in learner.parameters.items() if p.grad is not None}
        )
    assert any(not bits.equal(grad, parts[1][name]) for name, grad in parts[0].items())
    learner.close()


def test_a_step_is_adamw_on_the_hand_made_loss(fresh: Fresh, plan: Plan, setup_of: SetupOf) -> None:
    learner = Learner(fresh(), plan, setup_of(warmup=4).config, LOSS)
    group = exact(learner, responses(4))
    step = learner.step(group)
    assert step.learning_rate == 1e-3 / 4
    assert torch.equal(step.output.weights, torch.ones_like(step.logp))
    assert learner.version == 1
    model = fresh()
    engine = PackedEngine(model, plan)
    loss = torch.zeros(())
    for one in group:
        advantage = 0.5 if one.reward else -0.5
        logp = engine.logprobs([request_of(one)])
        loss = loss - advantage * logp.sum() / (len(group) * len(logp))
    loss.backward()
    optimiser = torch.optim.AdamW(
        model.module.parameters(), lr=1e-3 / 4, weight_decay=0.0, foreach=False
    )
    norm = math.sqrt(
        sum(
            float(p.grad.double().square().sum())
            for p in model.module.parameters()
            if p.grad is not None
        )
    )
    optimiser.step()
    assert step.gradient_norm == pytest.approx(norm, rel=1e-4)
    for (name, ours), theirs in zip(
        learner.parameters.items(), model.module.parameters(), strict=True
    ):
        moved = (ours - theirs).abs().max()
        assert moved <= 1e-3 / 4 * 2, name  # AdamW's first step is the sign, up to tiny gradients
        assert ((ours - theirs).abs() < 1e-6).float().mean() > 0.98, name
    learner.close()
    engine.close()


def test_the_gradients_norm_is_logged_before_a_limit_scales_it(
    fresh: Fresh, plan: Plan, setup_of: SetupOf
) -> None:
    free = Learner(fresh(), plan, setup_of().config, LOSS)
    group = exact(free, responses(2))
    norm = free.step(group).gradient_norm
    free.close()
    limited = Learner(fresh(), plan, setup_of(max_gradient_norm=norm / 7).config, LOSS)
    step = limited.step(group)
    limited.close()
    assert step.gradient_norm == norm
    name = "model.embed_tokens.weight"
    ours, theirs = (each.optimiser.state[each.masters[name]]["exp_avg"] for each in (limited, free))
    assert float(ours.norm() / theirs.norm()) == pytest.approx(1 / 7, rel=1e-5)


def test_state_comes_back_and_continues_bit_for_bit(
    fresh: Fresh, plan: Plan, setup_of: SetupOf
) -> None:
    one, other = (Learner(fresh(), plan, setup_of().config, LOSS) for _ in range(2))
    group = exact(one, responses(2))
    one.step(group)
    kept = {name: tensor.clone() for name, tensor in one.state().items()}
    one.step(group)
    other.load(kept, 1)
    other.step(group)
    assert (one.version, other.version) == (2, 2)
    for name, tensor in one.state().items():
        assert bits.equal(tensor, other.state()[name]), name
    for each in (one, other):
        each.close()


def test_a_bf16_model_learns_in_fp32(setup_of: SetupOf) -> None:
    model = load_model("tiny:qwen3", dtype="bfloat16")
    sites = find_sites(model.module)
    plan = plan_from("aligned", sites, model.dtype, model.device, model.identity)
    learner = Learner(model, plan, setup_of(learning_rate=1e-5).config, LOSS)
    group = exact(learner, responses(2))
    before = {name: tensor.clone() for name, tensor in learner.weights().items()}
    for _ in range(2):
        learner.step(group)
    name = "model.layers.0.mlp.up_proj.weight"
    master = learner.masters[name].detach()
    assert master.dtype == torch.float32
    assert not bits.equal(master, before[name].float())
    for each, tensor in learner.weights().items():
        assert bits.equal(tensor, learner.masters[each].detach().bfloat16())
    assert "master/" + name in learner.state()
    learner.close()


def test_numbers_that_are_not_finite_stop_before_the_optimiser_and_say_where(
    fresh: Fresh, plan: Plan, setup_of: SetupOf
) -> None:
    learner = Learner(fresh(), plan, setup_of().config, LOSS)
    before = {name: tensor.clone() for name, tensor in learner.weights().items()}
    with pytest.raises(NonFiniteError, match=r"ratio w.*action token 0 of response 0"):
        learner.step(responses(2, mu=-200.0))
    assert learner.version == 0
    assert all(bits.equal(before[name], t) for name, t in learner.weights().items())
    group = exact(learner, responses(2))
    with torch.no_grad():
        learner.parameters["model.norm.weight"][0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"learner's logprob is nan in response 0/0"):
        learner.step(group)
    assert learner.version == 0
    learner.close()
