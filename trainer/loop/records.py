"""The records of training: what is drawn, what an update is made of, what an update has to report.

A *group* is one prompt with several responses. Group ``n`` belongs to update ``n // groups``; its
number is also its place in the data order. A *trajectory* is one response, all turns of it, in
tokens. A *batch* holds the action tokens of one update side by side, without padding:

    N action tokens, B responses;  batch.response[t] is the response that token t belongs to

``mu`` is what the rollout recorded, ``logp`` what the learner computes; bits travel as the int32
view of fp32 numbers. Losses and tasks are written against the protocols here. What is left out: the
settings of a run (``config.py``), and any arithmetic.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a task asks.

    tokens: the prompt, in token ids. data: anything JSON can hold that ``score`` needs later.
    stop_ids: a response ends with the first of these. max_new_tokens: of one turn; None takes the
    run's.

        Prompt(tokens=(1, 17, 5), data={"answer": "42"}, stop_ids=(2,))
    """

    tokens: tuple[int, ...]
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stop_ids: tuple[int, ...] = ()
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One response to a prompt, all turns.

    id: ``"group/member"``, the same in every run of this seed. tokens: prompt, model turns and
    what the task said between them. sampled_mask: True where the policy sampled the token. turns:
    (start, stop) of each model turn. logprob_bits, versions: one entry per sampled token, in order:
    the int32 view of its fp32 logprob, and the weight version that drew it. reward: None until it
    is scored. head: per sampled token, ids and logprob bits of the likeliest tokens in its place,
    where a loss asks for them (``heads.py``); else empty. routes: per router's site, the experts
    that each token went to, best first, where a loss asks for them (``routes.py``); else empty.

        Trajectory(id="3/0", group=3, prompt=Prompt(tokens=(1, 17)), tokens=(1, 17, 9),
                   sampled_mask=(False, False, True), turns=((2, 3),),
                   logprob_bits=(-1069547520,), versions=(4,), temperature=1.0, reward=0.5)
    """

    id: str
    group: int
    prompt: Prompt
    tokens: tuple[int, ...]
    sampled_mask: tuple[bool, ...]
    turns: tuple[tuple[int, int], ...]
    logprob_bits: tuple[int, ...]
    versions: tuple[int, ...]
    temperature: float
    reward: float | None = None
    head: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    routes: Mapping[str, tuple[tuple[int, ...], ...]] = field(
        default_factory=dict[str, tuple[tuple[int, ...], ...]]
    )

    @property
    def responses(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each model turn."""
        return tuple(self.tokens[start:stop] for start, stop in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The rollout's likeliest tokens at each position, for the one loss that asks for them.

    ids: int64 [N, H]. mu, logp: fp32 [N, H], as the rollout recorded and the learner computes them,
    the latter with grad.
    """

    ids: Tensor
    mu: Tensor
    logp: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The action tokens of one update (or of one micro-batch of whole responses of it).

    version: k, the learner's version whose gradient is taken. mu: fp32 [N]. versions: int32 [N],
    the version that drew each token. response: int64 [N], row of the per-response tensors. lengths:
    int64 [B], T_i, action tokens of the whole response. rewards: fp64 [B]. group: int64 [B].
    advantages: fp32 [B]. num_responses: B of the *whole update*, also in a micro-batch:
    c_i = 1/(B T_i) is fixed before anything is split. old (fp32 [N], the trainer's logprobs under
    the version that drew each token) and head: only where a comparison loss needs them.
    """

    version: int
    mu: Tensor
    versions: Tensor
    response: Tensor
    lengths: Tensor
    rewards: Tensor
    group: Tensor
    advantages: Tensor
    num_responses: int
    old: Tensor | None = None
    head: Head | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a loss makes of a batch.

    loss: 0-dim, whose gradient with respect to ``logp`` is used; micro-batches' losses add up to
    the update's. weights: fp32 [N], detached: the ratio w = exp(logp - mu) of each token, as it is.
    rejected: bool [N]: tokens that a comparison recipe gives no gradient; all False for ours.
    """

    loss: Tensor
    weights: Tensor
    rejected: Tensor


class Loss(Protocol):
    """A loss over action tokens. Pure: no state, no I/O, nothing random."""

    @property
    def name(self) -> str:
        """What a config calls it."""
        ...

    def advantages(self, rewards: Tensor, group: Tensor) -> Tensor:
        """fp32 [B] from fp64 [B] rewards and int64 [B] groups, over the whole update."""
        ...

    def __call__(self, batch: Batch, logp: Tensor) -> LossOutput:
        """``logp``: fp32 [N], with grad."""
        ...


@runtime_checkable
class Task(Protocol):
    """Where prompts and rewards come from. Must pickle: workers may be other processes."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def prompt(self, index: int, rng: random.Random) -> Prompt:
        """Prompt number ``index`` of the data order.

        ``rng`` is seeded by the run's seed and ``index``: use no other source of chance and keep no
        state, so that a resumed run asks the same.
        """
        ...

    def score(self, trajectory: Trajectory) -> float:
        """The reward of a finished response."""
        ...


@runtime_checkable
class TurnTask(Task, Protocol):
    """A task that answers the model, for several turns."""

    def next_turn(self, trajectory: Trajectory) -> tuple[int, ...] | None:
        """Tokens to append before the next model turn, or None when the response is finished."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Tokens of this update's responses, scored again by the trainer under their own version.

    mu, logp: fp32 [M], what the rollout recorded and what the trainer computes; the kernel term is
    their difference, and must be 0 in every bit. versions: int32 [M].
    """

    mu: Tensor
    logp: Tensor
    versions: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFacts:
    """Everything that is known about one update, for the diagnostics to make a record of.

    batch, logp (fp32 [N]), output: the whole update's, detached. audit: the kernel term's evidence.
    gradient_norm: before any clipping. cap: L. rollout_seconds, train_seconds, sync_seconds,
    wait_seconds, blocked_seconds: rollout work, gradient and optimiser, the learner's part of
    publication, its waiting for samples, the producers' waiting for room. install_seconds,
    audit_seconds: workers' pauses for new weights; the audit, beside both. tokens: rows the learner
    computed. weights_root: of the version after the update; known once that is published.
    plan_digest: of the contracts that both sides computed by. after: fp32 [N], the same tokens'
    logprobs under the weights after the update, where it was asked for.
    """

    batch: Batch
    logp: Tensor
    output: LossOutput
    audit: Audit
    gradient_norm: float
    learning_rate: float
    cap: int
    rollout_seconds: float
    train_seconds: float
    sync_seconds: float
    wait_seconds: float
    blocked_seconds: float
    tokens: int
    weights_root: str
    plan_digest: str
    after: Tensor | None = None
    install_seconds: float = 0.0
    audit_seconds: float = 0.0
