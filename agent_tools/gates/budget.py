"""How much a run of the gates does on a large model: what a budget of arithmetic holds.

A budget that was measured would let the requests follow the machine and the hour, and ``zm
regress`` could repeat nothing. So it is counted: a run of the whole size pushes about so many rows
(one token) through the model, a row costs two operations per weight, and every count shrinks alike
until the product fits the budget or the floors are reached. No rule of a gate depends on it: what
compared nothing, or too little for its claim, is inconclusive at any size. The report holds the
counts.

    size, share = fitted(QUICK, row_operations(model))      # QUICK itself up to 31 million weights
"""

from dataclasses import asdict, replace
from typing import Any

from ...kernels.attention import PAGE
from ...model_recipes.models import LoadedModel
from .bench import FULL, QUICK, Size

TERA = 1e12
BUDGETS = {QUICK: 4.5 * TERA, FULL: 20 * TERA}
"""Operations. An AVX2 core does about 28 thousand million a second over all that gates do: within 3
minutes, and 12."""
ROWS = {QUICK: 72_000, FULL: 330_000}
"""Rows of the whole size, counted on ``tiny:llama``, whose requests are as long as others'. A pass
counts as 20 rows more (it reads every weight), a row with a backward pass as five."""
LONG = 2 * PAGE
"""A chunk above makes requests several times as long as others'."""
LEAST = {
    QUICK: Size(
        requests=3, reply=14, fuzzed=3, fuzz_requests=2, backward=4, gradient_requests=3, long=144,
        rounds=3, training_steps=2, phase_requests=2, timed=2, backward_tokens=36,
    ),
    FULL: Size(
        requests=6, reply=20, fuzzed=8, fuzz_requests=3, backward=20, gradient_requests=3, long=512,
        rounds=3, training_steps=4, phase_requests=4, timed=3, backward_tokens=36,
    ),
}  # fmt: skip
"""The floors."""


def row_operations(model: LoadedModel) -> float:
    """Operations per row: two per weight of a matrix that a row is multiplied with.

    Of experts only the chosen ones; an embedding table is looked up, unless it is the head as well.
    Next to none where no processor does them.
    """
    if model.device.type != "cpu":
        return 1.0
    config: Any = model.config
    head = config.vocab_size * config.hidden_size
    total = float(head)
    for name, weight in model.module.named_parameters():
        if weight.dim() < 2 or weight.shape[0] == config.vocab_size or "embed" in name:
            continue
        chosen = 1.0
        if weight.dim() == 3 and ".experts." in name:
            chosen = min(1.0, getattr(config, "num_experts_per_tok", 1) / weight.shape[0])
        total += weight.numel() * chosen
    return 2.0 * total


def fitted(most: Size, operations: float, chunk: int = PAGE) -> tuple[Size, float]:
    """As much of ``most`` (QUICK or FULL) as its budget holds, and the share of it.

    operations: of a row (:func:`row_operations`). chunk: rows between two states of a recurrent
    layer; requests reach over three, so that a quick run makes fewer random schedules of long ones.
    """
    share = min(1.0, BUDGETS[most] / (ROWS[most] * operations))
    least = asdict(LEAST[most])
    counts = {name: max(least[name], round(share * n)) for name, n in asdict(most).items()}
    if most == QUICK and chunk > LONG:
        counts |= {name: least[name] for name in ("fuzzed", "fuzz_requests")}
        counts["timed"] = max(least["timed"], counts["timed"] // 2)
    return replace(most, **counts), share
