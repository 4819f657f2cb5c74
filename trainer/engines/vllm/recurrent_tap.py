"""Watch a model of :mod:`.recurrent_model`: its module carries the plan's own taps.

Every site that the trainer shows is shown here by the same code; what is vLLM's is whose rows a
step holds, which rows reach the head, and the sampler's logprobs (:mod:`.tap`).

Nothing here is imported without vLLM.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ....model_recipes.sites import SiteCall
from ..rows import PADDING
from .recurrent_model import AlignedModule, rows_of_forward
from .tap import Tap


def tap_class(model: nn.Module) -> type[Tap]:
    """What watches a live model."""
    return ModuleTap if isinstance(model, AlignedModule) else Tap


class ModuleTap(Tap):
    """See the module."""

    def __init__(self, model: Any, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        self._hook(model, None, self._end)
        instrument, compute = model.instrument, model.compute_logits
        model.compute_logits = self._around(compute)
        self._undo.append(lambda: delattr(model, "compute_logits"))
        instrument.listener = self._show
        self._undo.append(lambda: setattr(instrument, "listener", None))

    def _watch(self, path: str, module: nn.Module) -> None:
        """Nothing: no layer of vLLM's computes here."""

    def _begin(
        self, module: nn.Module, given: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        positions = keywords.get("positions", given[1] if len(given) > 1 else None)
        assert isinstance(positions, Tensor)
        padded = positions.new_zeros(rows_of_forward(positions))
        padded[: len(positions)] = positions
        super()._begin(module, (), {"positions": padded})

    def _end(self, module: nn.Module, given: tuple[Any, ...], hidden: Tensor) -> None:
        self._final = (hidden, self._rows)

    def _show(self, call: SiteCall) -> Tensor | None:
        known = call.site.name in self.sites and bool(self._rows)
        return self.observer.on_site(call) if known else None

    def _around(self, compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def compute_logits(hidden_states: Tensor) -> Tensor:
            rows = self._head_rows(hidden_states)
            padding = [PADDING] * (rows_of_forward(hidden_states) - len(rows))
            self._rows = rows + padding
            self.observer.begin_rows(self.step, self._rows)
            logits = compute(hidden_states)
            self._rows = rows
            self.observer.begin_rows(self.step, rows)
            return logits

        return compute_logits
