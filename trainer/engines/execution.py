"""One run of the paged engine: page tables, caches, and what each event does to them.

:meth:`Execution.apply` carries out one event of a schedule; a step goes through the model and
leaves its final hidden states. Both ``run`` (schedule given) and ``generate`` (schedule made on the
way) go through here, so that a generated schedule replays through the very same code.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...model_recipes.apply import Instrument
from .base import Event, Observer, Publish, Request, Step
from .paged_batch import Caches, paged_batch
from .pages import Pools
from .replay import forced_rows
from .rows import base_model, row_names, row_tokens
from .weights import Weights


class Execution:
    """State of one run. ``tokens`` may grow while it goes on.

    requests: by id, where they may force choices; none may while generating.
    """

    def __init__(
        self,
        instrument: Instrument,
        weights: Weights,
        pages: Pools,
        caches: Caches,
        tokens: Mapping[str, Sequence[int]],
        observer: Observer | None,
        requests: Mapping[str, Request],
    ) -> None:
        self.instrument = instrument
        self.weights = weights
        self.pages = pages
        self.caches = caches
        self.tokens = tokens
        self.observer = observer
        self.requests = requests
        self.executed: list[Event] = []
        self.steps = 0

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.weights.loaded.device

    def apply(self, event: Event) -> Tensor | None:
        """Carry out one event; a step returns its final hidden states [rows, H]."""
        self.executed.append(event)
        if isinstance(event, Publish):
            self.weights.install(event)
        self.pages.begin(event)
        hidden = self._forward(event) if isinstance(event, Step) else None
        self.pages.end(event)
        return hidden

    def _forward(self, step: Step) -> Tensor:
        rows = row_names(step)
        positions = [p for s in step.slices for p in range(s.start, s.stop)]
        positions += range(step.padded_rows)
        if self.observer is not None:
            self.observer.begin_rows(self.steps, rows)
        self.steps += 1
        forced = forced_rows(rows, self.requests, self.instrument.routings, self.device)
        self.instrument.force(forced)
        return base_model(self.instrument)(
            input_ids=row_tokens(rows, self.tokens).to(self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            batch=paged_batch(step, self.pages, self.caches, self.device),
        ).last_hidden_state[0]
