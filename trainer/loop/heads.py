"""The rollout's head of the vocabulary, recorded while it samples, for the one loss that asks.

    recorder = HeadRecorder(engine.instrument, vocabulary=3011, temperature=1.0)
    run = engine.generate(requests, observer=recorder)
    trajectories = recorder.added(trajectories, run)  # with the head of their last turn's tokens

At every drawn token the SIZE likeliest ids are kept with their logprobs, by the same logprob
operator as the drawn token's own. Score Centering needs them; nothing that trains does. SIZE is our
choice: the published size is unknown to us.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels import bits
from ...model_recipes.apply import Instrument
from ...model_recipes.operators import logprob_function
from ...model_recipes.sites import SiteCall
from ..engines.base import Run
from .records import Trajectory

SIZE = 8


class HeadRecorder:
    """An :class:`..engines.base.Observer`; see the module. temperature: of the whole run."""

    def __init__(self, instrument: Instrument, *, vocabulary: int, temperature: float) -> None:
        site = next(site for site in instrument.sites if site.op_class == "logprob")
        self._logprob = logprob_function(instrument.plan.choice(site))
        self._temperature = temperature
        self._vocabulary = vocabulary
        self._rows: Sequence[tuple[str, int]] = ()
        self._held: dict[tuple[str, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        """Whose rows come next."""
        self._rows = rows

    def on_site(self, call: SiteCall, /) -> Tensor | None:
        """Keep the head of logits: the LM head's, then its tail's where the model has one."""
        if call.output.dim() == 2 and call.output.shape[1] == self._vocabulary:
            self._keep(call.output.float())
        return None

    def _keep(self, logits: Tensor) -> None:
        size = min(SIZE, logits.shape[1])
        ids = logits.topk(size, dim=1).indices
        rows = logits.repeat_interleave(size, dim=0)
        at = torch.full((len(rows),), self._temperature, dtype=torch.float32, device=logits.device)
        logprobs = self._logprob(rows, ids.reshape(-1), at).view(-1, size)
        values = bits.int_view(logprobs).tolist()
        for (request, position), row, kept in zip(self._rows, ids.tolist(), values, strict=True):
            self._held[request, position + 1] = (tuple(row), tuple(kept))

    def added(self, trajectories: Sequence[Trajectory], run: Run) -> list[Trajectory]:
        """The trajectories with the head of each token of their last turn."""
        return [replace(each, head=(*each.head, *self._taken(each))) for each in trajectories]

    def _taken(self, trajectory: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        start, stop = trajectory.turns[-1]
        return [self._held.pop((trajectory.id, position)) for position in range(start, stop)]
