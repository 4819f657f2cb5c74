"""A loss as one coefficient per token, and the arithmetic that every recipe shares.

All recipes here have the detached form L' = −Σ_it s_i·A_i·sg(c_it)·logp_it with s_i = 1/(B·T_i), so
a recipe is its coefficient c. The gradient that reaches a token's logprob is g_it = −A_i·s_i·c_it.
B and T_i are those of the whole update: packing, micro-batches and ranks change neither, and tokens
that a recipe rejects (c = 0) stay in T_i.

    loss = CoefficientLoss(name="truncated", coefficient=Truncated(most=2.0))
    output = loss(batch, logp)          # output.loss.backward() gives logp.grad == g, bit for bit

Differences of logprobs, ratios and sums are fp64 (at d = 1e-4 fp32 exp(d) − 1 − d is wrong by a
factor of three); g is rounded to fp32 once. What is no finite number stops the update here, with
its place: nothing is clamped, zeroed or skipped.

    pytest tests/trainer/losses         # every gradient against fp64 by hand
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.errors import NonFiniteError, UsageError
from ..loop.records import Batch, LossOutput
from .advantage import group_mean

# N action tokens of whole responses, B responses, H recorded head of the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """c per token, fp64 [N]; ``rejected`` bool [N]: tokens that the recipe's rule gives c = 0.

    head: fp64 [N, H], coefficients of the recorded head's logprobs; None for all recipes but one.
    """

    c: Tensor
    rejected: Tensor
    head: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientLoss:
    """A :class:`..loop.records.Loss` made of a coefficient and a baseline.

    coefficient: from the batch and the learner's logprobs (fp32 [N], detached). needs_old: the
    batch must carry ``old``, the trainer's logprobs under the weights that sampled. needs_head: it
    must carry ``head``. needs_routes: the learner must obey the rollout's choices of experts. The
    value of the loss is −Σ s·A·c: no measure of progress (0 at c = 1).
    """

    name: str
    coefficient: Callable[[Batch, Tensor], Coefficient]
    baseline: Callable[[Tensor, Tensor], Tensor] = group_mean
    needs_old: bool = False
    needs_head: bool = False
    needs_routes: bool = False

    def advantages(self, rewards: Tensor, group: Tensor) -> Tensor:
        """fp32 [B] over the whole update."""
        return self.baseline(rewards, group)

    def __call__(self, batch: Batch, logp: Tensor) -> LossOutput:
        """See :class:`..loop.records.Loss`. Raises NonFiniteError with the token's place."""
        self._check(batch, logp)
        detached = logp.detach()
        w = ratio(batch, detached)
        found = self.coefficient(batch, detached)
        scaled = batch.advantages.double() / (batch.num_responses * batch.lengths)
        exact = -scaled[batch.response] * found.c
        g = exact.to(torch.float32)
        check_tokens(g, "the gradient −A·c/(B·T)", batch)
        loss = _WithGradient.apply(logp, g, exact.sum())
        if found.head is not None:
            assert batch.head is not None
            g_head = (-scaled[batch.response, None] * found.head).to(torch.float32)
            check_tokens(g_head.sum(dim=1), "the gradient of the recorded head", batch)
            loss = loss + _WithGradient.apply(batch.head.logp, g_head, exact.new_zeros(()))
        return LossOutput(loss=loss, weights=w.to(torch.float32), rejected=found.rejected)

    def _check(self, batch: Batch, logp: Tensor) -> None:
        if logp.dim() != 1 or logp.shape != batch.mu.shape or logp.numel() == 0:
            raise UsageError(
                f"a loss takes one logprob per action token, at least one: {tuple(logp.shape)} for "
                f"{tuple(batch.mu.shape)}; give the logprobs of the batch's own tokens"
            )
        missing = [
            name
            for name in ("old", "head")
            if getattr(self, f"needs_{name}") and getattr(batch, name) is None
        ]
        if missing:
            raise UsageError(
                f"loss {self.name} needs `{missing[0]}` in the batch; fill it before calling"
            )
        check_tokens(batch.mu, "the rollout's logprob", batch)
        check_tokens(logp, "the learner's logprob", batch)
        check_tokens(batch.advantages[batch.response], "the advantage", batch)


class _WithGradient(torch.autograd.Function):
    """A value whose gradient in ``x`` is given: no product or sum rounds it on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None, None


def check_tokens(values: Tensor, what: str, batch: Batch) -> None:
    """Raise NonFiniteError that names response and token unless every value is finite."""
    values = values.detach()
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):
        return
    index = int(bad.to(torch.uint8).argmax())
    response = int(batch.response[index])
    place = index - int((batch.response[:index] != response).sum())
    raise NonFiniteError(
        f"{what} is {float(values[index])} at action token {place} of response {response} of this "
        f"batch (drawn by version {int(batch.versions[index])}, learner version {batch.version}); "
        "the update stops before the optimiser: look at that token and at the learning rate"
    )


def log_ratio(p: Tensor, q: Tensor) -> Tensor:
    """d = log p − log q in fp64; of fp32 inputs, rounded once at most."""
    return p.detach().double() - q.detach().double()


def ratio(batch: Batch, logp: Tensor) -> Tensor:
    """w = π/μ, fp64 [N]; exactly 1 where both logprobs are equal.

    What fp32 cannot hold (d above about 88.7) stops the update.
    """
    w = log_ratio(logp, batch.mu).exp()
    check_tokens(w.to(torch.float32), "the ratio w = exp(logp − mu)", batch)
    return w


def k3(d: Tensor) -> Tensor:
    """expm1(d) − d ≥ 0: each token's estimate of KL(μ‖π) from d = logp − mu (Schulman 2020)."""
    return torch.expm1(d) - d


def over_response(values: Tensor, batch: Batch, how: str) -> Tensor:
    """Sum or mean of fp64 [N] over each response's tokens, given back to each of them: fp64 [N]."""
    total = values.new_zeros(len(batch.lengths)).index_add_(0, batch.response, values)
    if how == "mean":
        total = total / batch.lengths
    elif how != "sum":
        raise UsageError(f"{how!r} does not combine tokens; use `sum` or `mean`")
    return total[batch.response]


def accepted(c: Tensor) -> Coefficient:
    """c as it is, nothing rejected."""
    return Coefficient(c=c, rejected=torch.zeros_like(c, dtype=torch.bool))


def keep_where(keep: Tensor, c: Tensor) -> Coefficient:
    """c where ``keep`` holds, 0 elsewhere: selected, since 0 times infinity is no number."""
    return Coefficient(c=torch.where(keep, c, torch.zeros_like(c)), rejected=~keep)
