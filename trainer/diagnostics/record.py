"""One record per update: how far apart rollout and learner are, why, and what it cost.

    record = record_of(facts, earlier=[])        # earlier: D3 of the updates before
    record.kernel.unequal                        # 0, or the engines are not aligned

The gap log π_k − log μ_v is kept in its two parts. ``kernel`` compares the trainer with the rollout
under the *same* weights, on the audited responses; under an aligned recipe every bit is equal and
all numbers are exactly 0. ``total`` is the whole gap of all action tokens, kernel term and weight
lag; D3, the effective sample sizes and the ratios belong to it.

``moves`` needs another forward pass, so it is there only where ``facts.after`` is. Sums are fp64.
"""

import math
import statistics
from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ...kernels import bits
from ...kernels.errors import InconclusiveError, NonFiniteError
from ..loop.records import Batch, UpdateFacts

# N action tokens, B responses

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


class Gap(BaseModel):
    """d = logprob of the trainer minus logprob of the rollout, over some tokens.

    compared: tokens; unequal: those whose fp32 bits differ. Of d: largest magnitude, mean, standard
    deviation, mean magnitude. k3: mean of expm1(d) − d.

        Gap(compared=512, unequal=0, largest=0, mean=0, deviation=0, mean_magnitude=0, k3=0)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    compared: int
    unequal: int
    largest: float
    mean: float
    deviation: float
    mean_magnitude: float
    k3: float


class UpdateRecord(BaseModel):
    """Everything about one update, in the order of the list above each group."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: int
    """k: the version whose gradient was taken; the update makes k + 1."""
    responses: int
    tokens: int
    """Action tokens."""
    length_quantiles: tuple[float, ...]
    """Action tokens of a response: least, quarter, half, three quarters, most."""

    kernel: Gap
    total: Gap
    k1: float
    """Mean of −d; signs cancel, a zero proves nothing."""
    d3: float
    """Mean of expm1(d) − d over action tokens."""
    d3_peak_to_median: float | None
    """Of the run so far; None while the median is 0."""
    log_ratio_least: float
    log_ratio_most: float
    ess_tokens: float
    """(Σw)²/(N·Σw²)."""
    ess_responses: float
    """The same for whole responses, exp(Σd) each; a diagnostic only."""

    lag_histogram: dict[int, int]
    """Versions behind: action tokens."""
    lag_median: float
    lag_most: int
    lag_cap: int
    d3_by_lag: dict[int, float]

    gradient_norm: float
    """Before any limit."""
    learning_rate: float
    loss: float
    """Its value; no measure of progress."""
    reward: float
    reward_deviation: float
    zero_advantage_groups: float
    """Share of prompts whose responses all got one reward."""
    entropy: float
    """Mean of −mu: an estimate, from the sampled tokens, of the rollout's entropy in nats."""
    rejected: float
    """Share of action tokens that the loss gave no gradient; 0 for REINFORCE Zero."""
    moves: float | None = None
    """Share of action tokens whose logprob moved against their advantage's sign, if asked for."""
    nonfinite: int
    """Always 0: anything else stops the run."""
    weights_root: str
    """Digest of the weights after the update."""
    plan_digest: str
    """Of the contracts that rollout and trainer computed by."""

    rollout_seconds: float
    train_seconds: float
    sync_seconds: float
    wait_seconds: float
    blocked_seconds: float
    install_seconds: float = 0.0
    audit_seconds: float = 0.0
    tokens_per_second: float
    """Rows the learner computed, over its training, waiting and publishing."""


def record_of(facts: UpdateFacts, earlier: Sequence[float] = ()) -> UpdateRecord:
    """The record of one update. earlier: D3 of the run's earlier updates.

    Raises NonFiniteError where any number is not finite, InconclusiveError where no token was
    audited: a kernel term of 0 that nobody measured is no result.
    """
    batch = facts.batch
    check_finite(facts)
    if facts.audit.mu.numel() == 0:
        raise InconclusiveError(
            f"update {batch.version}: no token was audited; set `audit` to at least 1"
        )
    d = facts.logp.double() - batch.mu.double()
    k3 = torch.expm1(d) - d
    lag = (batch.version - batch.versions).to(torch.int64)
    d3 = float(k3.mean())
    shown = [int(value) for value in lag.unique().tolist()]
    spent = facts.train_seconds + facts.wait_seconds + facts.sync_seconds
    return UpdateRecord(
        version=batch.version,
        responses=batch.num_responses,
        tokens=d.numel(),
        length_quantiles=tuple(
            torch.quantile(batch.lengths.double(), torch.tensor(QUANTILES).double()).tolist()
        ),
        kernel=gap(facts.audit.logp, facts.audit.mu),
        total=gap(facts.logp, batch.mu),
        k1=float(-d.mean()),
        d3=d3,
        d3_peak_to_median=peak_to_median([*earlier, d3]),
        log_ratio_least=float(d.min()),
        log_ratio_most=float(d.max()),
        ess_tokens=ess(d),
        ess_responses=ess(
            torch.zeros(len(batch.lengths)).double().index_add_(0, batch.response, d)
        ),
        lag_histogram={value: int((lag == value).sum()) for value in shown},
        lag_median=float(lag.double().quantile(0.5)),
        lag_most=max(shown),
        lag_cap=facts.cap,
        d3_by_lag={value: float(k3[lag == value].mean()) for value in shown},
        gradient_norm=facts.gradient_norm,
        learning_rate=facts.learning_rate,
        loss=float(facts.output.loss),
        reward=float(batch.rewards.mean()),
        reward_deviation=float(batch.rewards.std(correction=0)),
        zero_advantage_groups=zero_advantage_groups(batch),
        entropy=float(-batch.mu.double().mean()),
        rejected=float(facts.output.rejected.double().mean()),
        moves=moved_against(facts.logp, facts.after, batch) if facts.after is not None else None,
        nonfinite=0,
        weights_root=facts.weights_root,
        plan_digest=facts.plan_digest,
        rollout_seconds=facts.rollout_seconds,
        train_seconds=facts.train_seconds,
        sync_seconds=facts.sync_seconds,
        wait_seconds=facts.wait_seconds,
        blocked_seconds=facts.blocked_seconds,
        install_seconds=facts.install_seconds,
        audit_seconds=facts.audit_seconds,
        tokens_per_second=facts.tokens / spent if spent > 0 else 0.0,
    )


def gap(logp: Tensor, mu: Tensor) -> Gap:
    """Compare fp32 logprobs of the same tokens, bits first."""
    d = logp.double() - mu.double()
    return Gap(
        compared=d.numel(),
        unequal=int((~bits.equal_rows(logp, mu)).sum()),
        largest=float(d.abs().max()),
        mean=float(d.mean()),
        deviation=float(d.std(correction=0)),
        mean_magnitude=float(d.abs().mean()),
        k3=float((torch.expm1(d) - d).mean()),
    )


def ess(log_weights: Tensor) -> float:
    """Effective share of samples with these log weights: exp(2·lse(x) − lse(2x))/count, in fp64."""
    log_share = 2 * torch.logsumexp(log_weights, 0) - torch.logsumexp(2 * log_weights, 0)
    return float(log_share.exp()) / log_weights.numel()


def peak_to_median(values: Sequence[float]) -> float | None:
    """Largest over median; None where the median is 0 (nothing to be a multiple of)."""
    median = statistics.median(values)
    return max(values) / median if median > 0 else None


def zero_advantage_groups(batch: Batch) -> float:
    """Share of groups whose rewards are all equal."""
    groups = batch.group.unique().tolist()
    equal = [len(batch.rewards[batch.group == group].unique()) == 1 for group in groups]
    return sum(equal) / len(groups)


def moved_against(before: Tensor, after: Tensor, batch: Batch) -> float:
    """Share of action tokens with an advantage whose logprob moved the other way (or not at all).

    before, after: fp32 [N], of the same tokens under the weights before and after one update.
    """
    advantage = batch.advantages[batch.response].double()
    asked = advantage != 0
    if not bool(asked.any()):
        return 0.0
    gained = (after.double() - before.double()) * advantage
    return float((gained[asked] <= 0).double().mean())


def check_finite(facts: UpdateFacts) -> None:
    """Raise NonFiniteError naming what is not finite."""
    tensors = {
        "reward": facts.batch.rewards,
        "advantage": facts.batch.advantages,
        "rollout logprob": facts.batch.mu,
        "learner logprob": facts.logp,
        "ratio": facts.output.weights,
        "loss": facts.output.loss.reshape(1),
        "audited logprob": facts.audit.logp,
    }
    bad = {name: where for name, value in tensors.items() if (where := bits.nonfinite(value))}
    if not math.isfinite(facts.gradient_norm):
        bad["gradient norm"] = ()
    for name, where in bad.items():
        raise NonFiniteError(
            f"update {facts.batch.version}: {name} at {list(where)} is not finite; resume from the "
            "last checkpoint with a lower learning rate"
        )
