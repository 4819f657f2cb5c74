"""Known tokens through vLLM's decode: a logits processor that leaves one choice.

Scoring a reply the way it was generated needs decode steps over given tokens. vLLM's first runner
takes logits processors (a public engine argument) and computes ``raw_logprobs`` before they act, so
a processor that rules out every other token changes which token is drawn and no logprob.

    SamplingParams(extra_args={"zero_mismatch_tokens": [5, 9, 2]}, ...)

Nothing here is imported without vLLM.
"""

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

ARGUMENT = "zero_mismatch_tokens"


class ForcedTokens(LogitsProcessor):
    """Rows whose request carries :data:`ARGUMENT` draw its next token."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow requests as they enter, leave and move; output lists grow in place."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, output in batch_update.added:
            tokens = (params.extra_args or {}).get(ARGUMENT)
            self._rows.pop(row, None)
            if tokens is not None:
                self._rows[row] = (tokens, output)
        for source, target, direction in batch_update.moved:
            moved, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if other is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = other

    def apply(self, logits: Tensor) -> Tensor:
        """Every other token becomes impossible."""
        for row, (tokens, output) in self._rows.items():
            if len(output) < len(tokens):
                token = tokens[len(output)]
                kept = logits[row, token].clone()
                logits[row] = float("-inf")
                logits[row, token] = kept
        return logits
