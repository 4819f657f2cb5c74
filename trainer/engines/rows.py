"""Rows of a forward pass, and which of them are scored.

Row i of every tensor in a forward is one token of one request; padding rows belong to nobody. The
logprob of the token at position p comes from row p - 1, so a row is *scored* when the next token of
its request is known. A recomputed row scores its token again; the last score is kept, and the
observer sees all of them.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ...kernels import bits
from ...model_recipes.apply import Instrument
from .base import Observer, Request, Sample, Sampling, Step

PADDING = ("", -1)
HEAD_ROWS = 256


@dataclass(frozen=True, slots=True)
class Target:
    """One token to score: ``row`` of the forward pass predicts it."""

    row: int
    request: str
    position: int
    token: int
    temperature: float


def score_temperature(sampling: Sampling) -> float:
    """Logits are divided by this; greedy sampling (temperature 0) is scored at 1."""
    return sampling.temperature or 1.0


def row_names(step: Step) -> list[tuple[str, int]]:
    """(request, position) of every row, padding last."""
    rows = [(s.request, p) for s in step.slices for p in range(s.start, s.stop)]
    return rows + [PADDING] * step.padded_rows


def row_tokens(rows: Iterable[tuple[str, int]], tokens: Mapping[str, Sequence[int]]) -> Tensor:
    """Token ids of rows as int64 [1, rows]; padding rows hold token 0."""
    ids = [tokens[request][position] if request else 0 for request, position in rows]
    return torch.tensor([ids], dtype=torch.int64)


def known_targets(rows: Sequence[tuple[str, int]], requests: Mapping[str, Request]) -> list[Target]:
    """A target for every row whose next token is known."""
    targets: list[Target] = []
    for row, (name, position) in enumerate(rows):
        request = requests.get(name)
        if request is not None and position + 1 < len(request.tokens):
            targets.append(
                Target(
                    row=row,
                    request=name,
                    position=position + 1,
                    token=request.tokens[position + 1],
                    temperature=score_temperature(request.sampling),
                )
            )
    return targets


def score(
    instrument: Instrument,
    hidden: Tensor,
    targets: Sequence[Target],
    *,
    version: int,
    step: int,
    observer: Observer | None,
) -> list[Sample]:
    """Logprobs of ``targets`` from final hidden states [rows, H].

    Only scored rows reach the head, in blocks of ``HEAD_ROWS`` whether or not somebody watches.
    """
    scored: list[Sample] = []
    for first in range(0, len(targets), HEAD_ROWS):
        block = targets[first : first + HEAD_ROWS]
        begin_head(observer, step, block)
        logprobs = instrument.head_logprob(
            take_rows(hidden, block),
            torch.tensor([t.token for t in block], device=hidden.device),
            temperatures(block, hidden.device),
        )
        scored += samples(block, logprobs, version=version)
    return scored


def begin_head(observer: Observer | None, step: int, targets: Sequence[Target]) -> None:
    """Tell the observer whose rows the head is about to see."""
    if observer is not None:
        observer.begin_rows(step, [(t.request, t.position - 1) for t in targets])


def take_rows(hidden: Tensor, targets: Sequence[Target]) -> Tensor:
    """The rows of ``hidden`` that predict ``targets``: [targets, H]."""
    return hidden[torch.tensor([t.row for t in targets], device=hidden.device)]


def base_model(instrument: Instrument) -> Callable[..., Any]:
    """The model without its head."""
    return cast(Any, instrument.module).base_model


@contextmanager
def observed(instrument: Instrument, observer: Observer | None) -> Generator[None]:
    """Every site call in this block goes to ``observer``, if there is one."""
    if observer is None:
        yield
        return
    instrument.listener = observer.on_site
    try:
        yield
    finally:
        instrument.listener = None


def temperatures(targets: Sequence[Target], device: torch.device) -> Tensor:
    """fp32 [targets]."""
    return torch.tensor([t.temperature for t in targets], dtype=torch.float32, device=device)


def samples(targets: Sequence[Target], logprobs: Tensor, *, version: int) -> list[Sample]:
    """Records of scored tokens; ``logprobs`` is fp32 [targets]."""
    return [
        Sample(
            request=target.request,
            position=target.position,
            token=target.token,
            logprob_bits=value,
            version=version,
            temperature=target.temperature,
        )
        for target, value in zip(targets, bits.int_view(logprobs).tolist(), strict=True)
    ]


def last_of_each(scored: Iterable[Sample]) -> tuple[Sample, ...]:
    """One sample per token, the last one computed; requests as first seen, then positions."""
    order: dict[str, int] = {}
    last: dict[tuple[int, int], Sample] = {}
    for sample in scored:
        rank = order.setdefault(sample.request, len(order))
        last[rank, sample.position] = sample
    return tuple(last[key] for key in sorted(last))
