"""Each comparison recipe against its formula, written out per token in fp64."""

import math
from collections.abc import Callable

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.errors import UsageError
from zeromismatch.trainer.loop.records import Batch, Head
from zeromismatch.trainer.loop.trajectories import part_of
from zeromismatch.trainer.losses.advantage import batch_mean, group_mean
from zeromismatch.trainer.losses.catalogue import LOSSES, loss_named
from zeromismatch.trainer.losses.flash_reinforce import binary_kl
from zeromismatch.trainer.losses.score_centering import ScoreCentering
from zeromismatch.trainer.losses.sequence_gate import SequenceGate
from zeromismatch.trainer.losses.tokens import CoefficientLoss, k3

from .conftest import LENGTHS, LOGP, MU, OLD, make_batch

TOKENS = tuple(float(torch.tensor(value)) for value in LOGP)
ROLLOUT = tuple(float(torch.tensor(value)) for value in MU)
TRAINER = tuple(float(torch.tensor(value)) for value in OLD)
OWNER = tuple(index for index, length in enumerate(LENGTHS) for _ in range(length))
ADVANTAGES = (0.375, -0.375, -0.25, 0.25)
W = tuple(math.exp(p - q) for p, q in zip(TOKENS, ROLLOUT, strict=True))


def mean_of(values: list[float], token: int) -> float:
    own = [value for value, owner in zip(values, OWNER, strict=True) if owner == OWNER[token]]
    return sum(own) / len(own)


def k3_of(left: tuple[float, ...], right: tuple[float, ...]) -> list[float]:
    return [math.expm1(p - q) - (p - q) for p, q in zip(left, right, strict=True)]


def k1_of(left: tuple[float, ...], right: tuple[float, ...]) -> list[float]:
    return [p - q for p, q in zip(left, right, strict=True)]


def binary(token: int) -> float:
    q, p = math.exp(ROLLOUT[token]), math.exp(TOKENS[token])
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def clipped(r: float, advantage: float, below: float, above: float) -> float:
    """Slope of min(r·A, clip(r)·A) in log r, over A."""
    if (advantage > 0 and r > 1 + above) or (advantage < 0 and r < 1 - below):
        return 0.0
    return r


def gspo(token: int) -> float:
    s = math.exp(mean_of(k1_of(TOKENS, TRAINER), token))
    return clipped(s, ADVANTAGES[OWNER[token]], 3e-4, 4e-4)


BY_HAND: dict[str, Callable[[int], float]] = {
    "synchronous": lambda t: 1.0,
    "stock_kernels": lambda t: W[t],
    "truncated": lambda t: min(W[t], 2.0),
    "masked": lambda t: W[t] if 0.5 <= W[t] <= 5 else 0.0,
    "token_gate": lambda t: W[t] if abs(TOKENS[t] - ROLLOUT[t]) <= 0.1 else 0.0,
    "token_gate_k3": lambda t: W[t] if k3_of(TOKENS, ROLLOUT)[t] <= 0.005 else 0.0,
    "sequence_gate_corr_k1": lambda t: (
        W[t] if abs(mean_of(k1_of(TRAINER, ROLLOUT), t)) <= 0.001 else 0.0
    ),
    "sequence_gate_corr_k3": lambda t: (
        W[t] if mean_of(k3_of(TRAINER, ROLLOUT), t) <= 0.001 else 0.0
    ),
    "sequence_gate_ppo_k1": lambda t: (
        W[t] if abs(mean_of(k1_of(TOKENS, ROLLOUT), t)) <= 0.001 else 0.0
    ),
    "sequence_gate_ppo_k3": lambda t: W[t] if mean_of(k3_of(TOKENS, ROLLOUT), t) <= 0.001 else 0.0,
    "truncated_sequence_gate_k1": lambda t: (
        min(W[t], 2.0) if abs(mean_of(k1_of(TRAINER, ROLLOUT), t)) <= 0.001 else 0.0
    ),
    "truncated_sequence_gate_k3": lambda t: (
        min(W[t], 2.0) if mean_of(k3_of(TRAINER, ROLLOUT), t) <= 0.001 else 0.0
    ),
    "recompute": lambda t: clipped(
        math.exp(TOKENS[t] - TRAINER[t]), ADVANTAGES[OWNER[t]], 0.2, 0.2
    ),
    "bypass": lambda t: clipped(W[t], ADVANTAGES[OWNER[t]], 0.2, 0.2),
    "gspo": gspo,
    "flash_reinforce": lambda t: (
        W[t] if mean_of([binary(u) for u in range(len(OWNER))], t) <= 0.005 else 0.0
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_gradient_is_the_formula_in_fp64(name: str, logp: torch.Tensor):
    loss = loss_named(name)
    batch = make_batch(advantages=loss.advantages)
    output = loss(batch, logp)
    output.loss.backward()
    means = (0.4375,) * 4 if name == "flash_reinforce" else (0.625, 0.625, 0.25, 0.25)
    for token, owner in enumerate(OWNER):
        advantage = (1.0, 0.25, 0.0, 0.5)[owner] - means[owner]
        c = BY_HAND[name](token)
        expected = -advantage * c / (4 * LENGTHS[owner])
        assert float(logp.grad[token]) == pytest.approx(expected, rel=1e-6, abs=0), token
        assert bool(output.rejected[token]) == (c == 0.0), token


@pytest.mark.parametrize(
    "name", [name for name in BY_HAND if name not in ("synchronous", "stock_kernels", "truncated")]
)
def test_the_small_case_lies_on_both_sides_of_each_gate(name: str, logp: torch.Tensor):
    loss = loss_named(name)
    rejected = loss(make_batch(advantages=loss.advantages), logp).rejected
    assert rejected.any()
    if name.startswith("sequence_gate_ppo"):  # every response has moved by more than that
        wide = SequenceGate(of="ppo", estimate="k3", most=1.0)
        assert wide.keeps(make_batch(advantages=group_mean), logp).all()
    else:
        assert not rejected.all()


def surrogate(batch: Batch, logp: torch.Tensor, name: str) -> torch.Tensor:
    """The published objectives themselves, for autograd in fp64."""
    advantages = batch.advantages.double()
    old = batch.mu if name == "bypass" else batch.old
    assert old is not None
    d = logp - old.double()
    if name == "gspo":
        total = torch.zeros(4, dtype=torch.float64).index_add(0, batch.response, d)
        s = (total / batch.lengths).exp()
        return -torch.minimum(s * advantages, s.clamp(1 - 3e-4, 1 + 4e-4) * advantages).mean()
    r, own = d.exp(), advantages[batch.response]
    value = torch.minimum(r * own, r.clamp(0.8, 1.2) * own) / batch.lengths[batch.response]
    return -value.sum() / 4


@pytest.mark.parametrize("name", ["recompute", "bypass", "gspo"])
def test_autograd_of_the_published_objective_in_fp64_agrees(name: str, logp: torch.Tensor):
    batch = make_batch(advantages=group_mean)
    loss_named(name)(batch, logp).loss.backward()
    exact = logp.detach().double().requires_grad_()
    surrogate(batch, exact, name).backward()
    torch.testing.assert_close(logp.grad.double(), exact.grad, rtol=1e-6, atol=0)


def head_case(weight: str, probabilities: int) -> tuple[CoefficientLoss, Batch, torch.Tensor]:
    """Two responses of one token in one group; a vocabulary of 4, of which the head holds some."""
    q = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.4, 0.4, 0.1, 0.1]], dtype=torch.float64)
    p = torch.tensor([[0.3, 0.5, 0.12, 0.08], [0.5, 0.25, 0.15, 0.1]], dtype=torch.float64)
    logits = p.log().float().requires_grad_()
    kept = torch.arange(probabilities).repeat(2, 1)
    everywhere = logits.log_softmax(dim=1)
    head = Head(ids=kept, mu=q.log().float().gather(1, kept), logp=everywhere.gather(1, kept))
    drawn = torch.tensor([0, 1])
    batch = make_batch(
        (1.0, 0.0),
        tuple(q.log()[[0, 1], drawn].tolist()),
        (1, 1),
        advantages=group_mean,
        head=head,
    )
    loss = CoefficientLoss(
        name="score_centering",
        coefficient=ScoreCentering(weight=weight),  # type: ignore[arg-type]
        needs_head=True,
    )
    loss(batch, everywhere[[0, 1], drawn]).loss.backward()
    return loss, batch, logits


@pytest.mark.parametrize("weight", ["one", "ratio"])
@pytest.mark.parametrize("size", [2, 4])
def test_score_centering_in_fp64_subtracts_the_expected_score(weight: str, size: int):
    _, _, logits = head_case(weight, size)
    q = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.4, 0.4, 0.1, 0.1]], dtype=torch.float64)
    exact = logits.detach().double().requires_grad_()
    logp = exact.log_softmax(dim=1)
    p = logp.detach().exp()
    total = torch.zeros((), dtype=torch.float64)
    for row, (drawn, advantage) in enumerate([(0, 0.5), (1, -0.5)]):
        f = 1.0 if weight == "one" else float(p[row, drawn] / q[row, drawn])
        tail = 1.0 if size == 4 else float(q[row, 2:].sum() / p[row, 2:].sum())
        a = tail if weight == "one" else 1.0
        correction = torch.zeros((), dtype=torch.float64)
        for v in range(size):
            ratio = 1.0 if weight == "one" else float(p[row, v] / q[row, v])
            correction = correction + (q[row, v] * ratio - a * p[row, v]) * logp[row, v]
        total = total - advantage * (f * logp[row, drawn] - correction) / 2
    total.backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=2e-5, atol=2e-7)


def test_score_centering_with_the_whole_vocabulary_leaves_no_drift_in_fp64():
    """Averaged over what the rollout draws, the centred gradient of a constant reward is 0."""
    q = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    logits = torch.tensor([0.3, 0.5, 0.12, 0.08], dtype=torch.float64).log()
    average = torch.zeros(4, dtype=torch.float64)
    for drawn in range(4):
        leaf = logits.clone().float().requires_grad_()
        logp = leaf.log_softmax(dim=0)
        head = Head(ids=torch.arange(4)[None], mu=q.log().float()[None], logp=logp[None])
        batch = make_batch((1.0,), (float(q[drawn].log()),), (1,), advantages=constant, head=head)
        loss_named("score_centering")(batch, logp[drawn : drawn + 1]).loss.backward()
        average += q[drawn] * leaf.grad.double()
    torch.testing.assert_close(average, torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-6)


def constant(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    return rewards.float()


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_a_sequence_gate_says_which_way_it_combines(how: str, logp: torch.Tensor):
    gate = SequenceGate(of="ppo", estimate="k3", how=how, most=0.006)  # type: ignore[arg-type]
    keeps = gate.keeps(make_batch(advantages=group_mean), logp.detach())
    first, last = keeps[0].item(), keeps[-1].item()
    assert last == (how == "mean")  # 0.0013 + 0.0052 over two tokens
    assert not first


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.needs_old])
def test_a_loss_without_the_trainers_old_logprobs_is_refused(name: str):
    batch = make_batch((1.0, 0.0), (-1.0, -2.0), (1, 1), advantages=group_mean)
    with pytest.raises(UsageError, match="needs `old`"):
        loss_named(name)(batch, torch.tensor([-1.0, -2.0]))


def test_aligned_kernels_make_the_corrections_for_mismatch_idle():
    """old = mu in every bit: gates on the kernel term reject nothing at any lag."""
    batch = make_batch(mu=OLD, advantages=group_mean)
    for name in ("sequence_gate_corr_k1", "sequence_gate_corr_k3"):
        assert not loss_named(name)(batch, torch.tensor(LOGP)).rejected.any()


def test_k3_in_fp64_is_right_where_fp32_is_not():
    d = torch.tensor([1e-4, 1e-6, 0.0, -1e-4], dtype=torch.float64)
    expected = [5.0001667e-9, 5.0000017e-13, 0.0, 4.9998333e-9]
    assert k3(d).tolist() == pytest.approx(expected, rel=1e-4)


def test_binary_kl_in_fp64_at_the_ends():
    mu = torch.tensor([0.0, 0.0, -1.0, -1.0])
    logp = torch.tensor([0.0, -1.0, 0.0, -1.0])
    values = binary_kl(mu, logp).tolist()
    assert values[0] == 0.0
    assert values[1] == pytest.approx(1.0)
    assert values[2] == math.inf
    assert values[3] == 0.0


def test_the_batch_mean_is_for_whole_updates():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    assert batch_mean(rewards, torch.tensor([0, 1, 2, 3])).tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("name", BY_HAND)
def test_micro_batches_of_whole_responses_give_the_same_bits(name: str, logp: torch.Tensor):
    loss = loss_named(name)
    batch = make_batch(advantages=loss.advantages)
    loss(batch, logp).loss.backward()
    pieces = []
    for first, last in ((0, 1), (1, 3), (3, 4)):
        tokens = (batch.response >= first) & (batch.response < last)
        own = logp.detach()[tokens].clone().requires_grad_()
        loss(part_of(batch, first, last), own).loss.backward()
        assert own.grad is not None
        pieces.append(own.grad)
    assert logp.grad is not None
    assert bits.equal(torch.cat(pieces), logp.grad)
