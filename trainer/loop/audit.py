"""The kernel term, measured while training: the trainer scores rollout tokens under their version.

Two sources, and together they are an update's :class:`.records.Audit`:

- tokens that the learner's own version drew are compared in full by the update itself;
- of older tokens a random slice is scored here, when it arrives: a third copy of the model takes
  the published weights of exactly that version and runs the trainer's packed forward.

Scoring on arrival needs a version only as long as some worker uses it, whatever the lag. The
difference must be 0 in every bit; weight lag is what remains between that and the update's own
logprobs.
"""

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import bits
from ...kernels.errors import MisalignedError
from ...model_recipes.models import LoadedModel
from ...model_recipes.plan import Plan
from ...model_recipes.state import named_state
from ..engines.packed import PackedEngine
from .config import TrainConfig
from .records import Audit, Batch, Trajectory
from .trajectories import mu_of, request_of, versions_of
from .versions import Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group that arrived: its responses, and what the audit made of some of them.

    audited: members that were scored again. audit_bits: the trainer's logprob of each of their
    action tokens, as int32.
    """

    number: int
    trajectories: tuple[Trajectory, ...]
    audited: tuple[int, ...] = ()
    audit_bits: tuple[int, ...] = ()


class Auditor:
    """See the module. ``everything``: score all responses, for losses that ask for ``old``."""

    def __init__(
        self,
        model: LoadedModel,
        plan: Plan,
        config: TrainConfig,
        versions: Versions,
        *,
        everything: bool = False,
    ) -> None:
        self.engine = PackedEngine(model, plan)
        self.config, self.versions, self.everything = config, versions, everything
        self._installed: int | None = None
        self._lock = threading.Lock()  # several producers, one model

    def group(self, number: int, trajectories: Sequence[Trajectory]) -> Group:
        """The arrived group, with its share of the update's audit."""
        update = number // self.config.groups
        chosen = [
            member
            for member in self._members(number)
            if self.everything or any(v != update for v in trajectories[member].versions)
        ]
        with self._lock:
            scored = self.score([trajectories[member] for member in chosen]) if chosen else None
        return Group(
            number=number,
            trajectories=tuple(trajectories),
            audited=tuple(chosen),
            audit_bits=() if scored is None else tuple(bits.int_view(scored).tolist()),
        )

    @torch.no_grad()
    def score(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """fp32 [N]: the trainer's logprobs, each token under the version that drew it."""
        versions = versions_of(trajectories)
        logp = torch.empty(len(versions), dtype=torch.float32)
        requests = [request_of(each) for each in trajectories]
        for version in sorted(set(versions.tolist())):
            self._install(version)
            scored = self.engine.logprobs(requests, max_rows=self.config.max_rows).cpu()
            logp = torch.where(versions == version, scored, logp)
        return logp

    @torch.no_grad()
    def under(self, trajectories: Sequence[Trajectory], version: int) -> Tensor:
        """fp32 [N]: the trainer's logprobs of all action tokens under one published version."""
        with self._lock:
            self._install(version)
            requests = [request_of(each) for each in trajectories]
            return self.engine.logprobs(requests, max_rows=self.config.max_rows).cpu()

    def close(self) -> None:
        """Take the plan off the model."""
        self.engine.close()

    def _members(self, number: int) -> list[int]:
        """Members of this group among the update's audited responses."""
        size, groups = self.config.group_size, self.config.groups
        if self.everything:
            return list(range(size))
        rng = random.Random(f"audit/{self.config.seed}/{number // groups}")
        chosen = rng.sample(range(groups * size), min(self.config.audit, groups * size))
        return sorted(each % size for each in chosen if each // size == number % groups)

    def _install(self, version: int) -> None:
        """The published weights of a version, older or newer than what is there."""
        if version == self._installed:
            return
        self._installed = None
        weights = self.versions.read(version, self.engine.loaded.device)
        for name, tensor in named_state(self.engine.loaded.module).items():
            tensor.copy_(weights[name])
        self._installed = version


def audit_of(groups: Sequence[Group], batch: Batch, logp: Tensor) -> Audit:
    """The update's audit: what was scored on arrival, and the learner's own version's tokens."""
    audited = [group.trajectories[member] for group in groups for member in group.audited]
    values = [value for group in groups for value in group.audit_bits]
    scored = torch.tensor(values, dtype=torch.int32).view(torch.float32)
    own = batch.versions == batch.version
    return Audit(
        mu=torch.cat([mu_of(audited), batch.mu[own]]),
        logp=torch.cat([scored, logp[own]]),
        versions=torch.cat([versions_of(audited), batch.versions[own]]),
    )


def old_of(groups: Sequence[Group]) -> Tensor:
    """fp32 [N]: the trainer's logprobs under each token's own version; every token was audited."""
    values = [value for group in groups for value in group.audit_bits]
    return torch.tensor(values, dtype=torch.int32).view(torch.float32)


def require_zero(audit: Audit, update: int) -> None:
    """Raise MisalignedError naming the first token that differs in a bit."""
    found = bits.first_difference(audit.mu, audit.logp) if len(audit.mu) else None
    if found is not None:
        version = int(audit.versions[found.coordinate])
        raise MisalignedError(
            f"update {update}: rollout and trainer disagree under the same weights, version "
            f"{version}, {found}; the recipe does not hold here: run `zm gate` on it"
        )
