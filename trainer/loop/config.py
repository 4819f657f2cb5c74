"""The settings of a training run, as a user writes them and as a run folder keeps them.

    TrainConfig(recipe="model_recipes/tiny/qwen3", task="...", updates=300, lag=8)

A resumed run must have the same settings, except for those in :data:`MAY_CHANGE` and ``max_rows``.
"""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAY_CHANGE = frozenset(
    {
        "updates",
        "checkpoint_every",
        "wait_seconds",
        "task_seconds",
        "stop_after",
        "share_weights",
        "audit_apart",
        "apart",
        "cache_gib",
    }
)
"""They decide when a run stops or gives up and where it computes, not what."""


class TrainConfig(BaseModel):
    """See the module. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    recipe: str
    """Recipe folder or file: model, dtype and plan."""
    task: str
    """Where prompts and rewards come from."""
    updates: int = Field(default=100, ge=1)
    """Optimiser steps in all."""
    lag: int = Field(default=1, ge=0)
    """L: no token is older than this many versions when its gradient is taken."""
    mode: Literal["deterministic", "free"] = "deterministic"
    """deterministic: update u learns from version max(0, u - L) exactly, whatever the timing. free:
    workers take the newest version."""
    fill: float = Field(default=0.75, ge=0, le=1)
    """Mode free: the learner keeps at least this share of L updates under way before it, so that
    the lag stays between that and L; 0: it takes an update as soon as it is there."""
    partial: Literal["forbidden", "recorded"] = "forbidden"
    """Whether a publication waits for running responses, or goes in between two of their steps;
    then the rest is drawn from the new version, after a new prefill, and each token says which."""
    loss: str = "reinforce_zero"
    """Another one is for comparison only."""
    groups: int = Field(default=4, ge=1)
    """Prompts per update."""
    group_size: int = Field(default=4, ge=1)
    """Responses per prompt."""
    max_new_tokens: int = Field(default=16, ge=1)
    """Of one turn, where the prompt does not say."""
    max_turns: int = Field(default=4, ge=1)
    """Model turns of one response at most."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling and of scoring alike."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """After warm-up."""
    warmup: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises from 0, linearly."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's."""
    max_gradient_norm: float | None = Field(default=None, gt=0)
    """Scale the whole gradient down to this norm; None leaves it as it is."""
    max_rows: int | None = Field(default=2048, ge=1)
    """Tokens of one micro-batch; changes no bit with one rank, so that it may be lowered when a
    run that had no memory for it is resumed."""
    audit: int = Field(default=2, ge=1)
    """Responses of every update that the trainer scores again under their own version."""
    require_zero: bool = True
    """Stop where the kernel term is not 0 in every bit; off only to study stock kernels."""
    measure_moves: bool = False
    """After each update, score its tokens once more: which way did each logprob go? For studies."""
    seed: int = Field(default=0, ge=0)
    """Of prompts, sampling and audits."""
    shuffle_rewards: bool = False
    """Control: an update's rewards are dealt out at random, so that nothing can be learned."""
    rollout: Literal["paged", "vllm"] = "paged"
    """The engine that samples."""
    cache_gib: int | None = Field(default=None, ge=1)
    """GiB of vLLM's cache on a GPU; None: a quarter of what is free there, 6 at most. Changes no
    bit: what does not fit waits."""
    share_weights: bool | None = None
    """Whether the learner's last versions stay in its memory, where readers of this machine copy
    them from, beside the files that are written anyway; None: on a GPU. Changes no bit."""
    audit_apart: bool | None = None
    """Whether the audit has a process of its own, so that the learner does not wait for its turn
    in the interpreter; None: on a GPU, unless workers are threads. Changes no bit."""
    apart: bool = False
    """Whether rollout workers have devices of their own, to which weights are sent over NCCL (gloo
    between processors): worker w takes the w-th GPU after the learner's ranks. Needs placement
    processes. Changes no bit."""
    workers: int = Field(default=1, ge=1)
    """Rollout engines."""
    placement: Literal["threads", "processes", "ray"] = "threads"
    """Where they run."""
    ranks: int = Field(default=1, ge=1)
    """Processes that the learner is sharded over; another number sums gradients differently."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Updates between two evaluations on held-out problems, beside training; None for none."""
    evaluate_problems: int = Field(default=32, ge=1)
    """Held-out problems of each evaluation, the same every time."""
    evaluate_samples: int = Field(default=4, ge=1)
    """k: responses to each of them."""
    stop_after: float | None = Field(default=None, gt=0)
    """Seconds after which the run writes a checkpoint and ends, to be resumed; None: never."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Updates between two checkpoints."""
    wait_seconds: float = Field(default=600.0, gt=0)
    """No wait for a worker or a batch lasts longer."""
    task_seconds: float = Field(default=60.0, gt=0)
    """No call of the task lasts longer."""

    @model_validator(mode="after")
    def _is_consistent(self) -> "TrainConfig":
        if self.mode == "deterministic" and self.partial == "recorded":
            raise ValueError(
                "in deterministic mode every response comes from one version; use mode free, or "
                "partial forbidden"
            )
        if self.apart and (self.placement != "processes" or self.partial == "recorded"):
            raise ValueError("apart needs placement processes and partial forbidden; set them so")
        return self

    @property
    def ahead(self) -> int:
        """Updates that must be under way before the learner takes one."""
        return math.ceil(self.fill * self.lag)


def differences(kept: TrainConfig, asked: TrainConfig) -> list[str]:
    """Every setting that differs and may not, as ``name: kept -> asked``."""
    ours, theirs = kept.model_dump(), asked.model_dump()
    may_change = MAY_CHANGE | ({"max_rows"} if kept.ranks == 1 else set[str]())
    return [
        f"{name}: {ours[name]} -> {theirs[name]}"
        for name in ours
        if ours[name] != theirs[name] and name not in may_change
    ]
