"""A recurrent layer whose engine takes the tokens one by one, while the trainer takes chunks.

    step_by_step(state, layer, q, k, v, g, beta)      # for ``PagedState.recur``

P03: the same rule, and the state after every token instead of the state at a chunk's start and the
rows since. Both are right; no sum is added in the same order. The states lie beside the pages that
the right kernel would have written, so chunks, hits and preemption work.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.recurrence import stepwise_recurrence

if TYPE_CHECKING:
    from ...model_recipes.recurrent import RecurrentLayer, Rows
    from ...trainer.engines.recurrent_batch import PagedState


def step_by_step(
    state: "PagedState", layer: "RecurrentLayer", q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor,
) -> Tensor:  # fmt: skip
    """fp32 ``[T, HV, V]``: each token on the state that the one before it left."""

    def step(rows: "Rows", held: Tensor | None, decode: bool) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (row[0] for row in rows)
        before = torch.zeros(1, v.shape[1], k.shape[2], v.shape[2]) if held is None else held
        start = torch.tensor([0, len(q)], dtype=torch.int32)
        out, after = stepwise_recurrence(layer.kind, q, k, v, g, beta, before, start)
        return out[None], after

    return state.carry(layer, "step by step", (q, k, v, g, beta), step)
