"""The kernel term, measured while training: the trainer scores rollout tokens under their version.

Two sources, and together they are an update's :class:`.records.Audit`:

- tokens that the learner's own version drew are compared in full by the update itself;
- of older tokens a random slice is scored here, when it arrives: a third copy of the model takes
  the published weights of exactly that version and runs the trainer's packed forward.

Scoring on arrival needs a version only as long as some worker uses it, whatever the lag; groups
that arrive together are scored in one forward. The difference must be 0 in every bit; weight lag is
what remains between that and the update's own logprobs. On a GPU the auditor has a process of its
own (``hosts.py``), so that neither takes the learner's interpreter from it; only the responses that
it scores go there, and only bits come back.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import bits
from ...kernels.errors import MisalignedError
from ...model_recipes.models import LoadedModel
from ...model_recipes.plan import Plan
from ...model_recipes.state import digests_of, named_state
from ..engines.packed import PackedEngine
from ..publication.flat import copy_all
from .config import TrainConfig
from .limits import fewer_rows, named_memory, rows_of
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

    def groups(self, numbers: Sequence[int], groups: Sequence[Sequence[Trajectory]]) -> list[Group]:
        """The arrived groups, each with its share of the update's audit; one forward a version."""
        return audited(numbers, groups, self.config, self.scored, everything=self.everything)

    def scored(self, trajectories: Sequence[Trajectory]) -> tuple[int, ...]:
        """:meth:`score`, as int32 bits."""
        with self._lock:
            return tuple(bits.int_view(self.score(trajectories)).tolist())

    @torch.no_grad()
    def score(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """fp32 [N]: the trainer's logprobs, each token under the version that drew it."""
        versions = versions_of(trajectories)
        logp = torch.empty(len(versions), dtype=torch.float32)
        for version in sorted(set(versions.tolist())):
            logp = torch.where(versions == version, self._all(trajectories, version), logp)
        return logp

    @torch.no_grad()
    def under(self, trajectories: Sequence[Trajectory], version: int) -> Tensor:
        """fp32 [N]: the trainer's logprobs of all action tokens under one published version."""
        with self._lock:
            return self._all(trajectories, version)

    def close(self) -> None:
        """Take the plan off the model."""
        self.engine.close()

    def _all(self, trajectories: Sequence[Trajectory], version: int) -> Tensor:
        config = self.config
        requests = [request_of(each) for each in trajectories]
        what = f"the audit of version {version}, {rows_of(config)}"
        with named_memory(what, fewer_rows(config)):
            self._install(version)
            return self.engine.logprobs(requests, max_rows=config.max_rows).cpu()

    def _install(self, version: int) -> None:
        """The published weights of a version, older or newer than what is there."""
        if version == self._installed:
            return
        self._installed = None
        state, device = named_state(self.engine.loaded.module), self.engine.loaded.device
        there = self.versions.shelved(version, device)
        if there is not None:
            copy_all(state, there.tensors)
        if there is None or digests_of(state) != there.card.digests:  # not there, or no longer
            copy_all(state, self.versions.read(version, device))
        self._installed = version


def audited(
    numbers: Sequence[int],
    groups: Sequence[Sequence[Trajectory]],
    config: TrainConfig,
    score: Callable[[Sequence[Trajectory]], Sequence[int]],
    *,
    everything: bool,
) -> list[Group]:
    """The arrived groups; ``score`` gets those of their responses that are due, all at once, and
    gives the bits of their action tokens."""
    due = [
        [
            one
            for one in _members(number, config, everything=everything)
            # tokens of the update's own version are compared by the update
            if everything or any(v != number // config.groups for v in members[one].versions)
        ]
        for number, members in zip(numbers, groups, strict=True)
    ]
    asked = [members[one] for members, ones in zip(groups, due, strict=True) for one in ones]
    scored = score(asked) if asked else ()
    found: list[Group] = []
    first = 0
    for number, members, ones in zip(numbers, groups, due, strict=True):
        last = first + sum(len(members[one].versions) for one in ones)
        found.append(
            Group(
                number=number,
                trajectories=tuple(members),
                audited=tuple(ones),
                audit_bits=tuple(scored[first:last]),
            )
        )
        first = last
    return found


def _members(number: int, config: TrainConfig, *, everything: bool) -> list[int]:
    """Members of this group among the update's audited responses."""
    size, groups = config.group_size, config.groups
    if everything:
        return list(range(size))
    rng = random.Random(f"audit/{config.seed}/{number // groups}")
    chosen = rng.sample(range(groups * size), min(config.audit, groups * size))
    return sorted(each % size for each in chosen if each // size == number % groups)


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
