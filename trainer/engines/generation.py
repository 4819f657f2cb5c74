"""Sampling: the scheduler forms steps, the execution computes them, the last rows draw tokens.

A token's noise is keyed by its request's seed, its position and the token id, so what is drawn does
not depend on the batch; its logprob is taken from the same logits and recorded with the weight
version that computed them. New weights may go in between two steps: whatever is cached is dropped,
running requests are prefilled again from their tokens, and draw on from the new version.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.errors import UsageError
from ...kernels.sampling import sample
from ...model_recipes.operators import logprob_function
from .admission import check_requests
from .base import Policy, Publish, Request, Sample, Step
from .execution import Execution
from .rows import (
    HEAD_ROWS,
    Target,
    begin_head,
    samples,
    score_temperature,
    take_rows,
    temperatures,
)
from .scheduler import Scheduler


def check_generation(engine: str, requests: Sequence[Request], policy: Policy, config: Any) -> None:
    """Refuse what cannot be generated, before any work."""
    check_requests(engine, requests, config, generating=True)
    if len({request.id for request in requests}) < len(requests):
        raise UsageError("two requests share an id; give every request its own")
    for request in requests:
        if request.sampling.max_new_tokens < 1:
            raise UsageError(
                f"request {request.id!r} has max_new_tokens {request.sampling.max_new_tokens}: "
                "nothing to sample; ask for at least 1, or score it with run()"
            )
    for name in ("max_step_tokens", "max_running", "num_pages"):
        value = getattr(policy, name)
        if value is not None and value < 1:
            raise UsageError(f"the policy has {name} {value}; use at least 1")


def generate(
    execution: Execution,
    requests: Sequence[Request],
    tokens: Mapping[str, list[int]],
    policy: Policy,
    between: Callable[[], Publish | None] | None = None,
) -> list[Sample]:
    """Run until every request is finished; appends to ``tokens`` and returns the sampled tokens.

    between: asked before every step but the first for staged weights to install.
    """
    named = {request.id: request for request in requests}
    scheduler = Scheduler(
        requests,
        tokens,
        policy,
        execution.pages,
        version=execution.weights.version,
        emit=execution.apply,
    )
    drawn: list[Sample] = []
    while step := scheduler.next_step():
        hidden = execution.apply(step)
        assert hidden is not None
        fresh: list[Sample] = []
        places = _last_rows(step, {name: named[name] for name in scheduler.draws(step)})
        for first in range(0, len(places), HEAD_ROWS):
            fresh += _draw(execution, hidden, places[first : first + HEAD_ROWS], named)
        scheduler.advance(step, {entry.request: entry.token for entry in fresh})
        drawn += fresh
        event = between() if between is not None and scheduler.unfinished else None
        if event is not None:
            execution.apply(event)
            scheduler.publish(event.version)
    return drawn


def _last_rows(step: Step, drawing: Mapping[str, Request]) -> list[Target]:
    """Where the new tokens come from; their ids are not known yet (-1)."""
    places: list[Target] = []
    row = -1
    for piece in step.slices:
        row += piece.stop - piece.start
        if piece.request in drawing:
            temperature = score_temperature(drawing[piece.request].sampling)
            places.append(Target(row, piece.request, piece.stop, -1, temperature))
    return places


def _draw(
    execution: Execution, hidden: Tensor, places: Sequence[Target], named: Mapping[str, Request]
) -> list[Sample]:
    """Draw one token per place and score it from the same logits."""
    instrument = execution.instrument
    begin_head(execution.observer, execution.steps - 1, places)
    logits = instrument.head_logits(take_rows(hidden, places))
    sampling = [named[place.request].sampling for place in places]
    device = hidden.device
    drawn = sample(
        logits,
        torch.tensor([each.seed for each in sampling], device=device),
        torch.tensor([place.position for place in places], device=device),
        torch.tensor([each.temperature for each in sampling], dtype=torch.float32, device=device),
    )
    site = next(site for site in instrument.sites if site.op_class == "logprob")
    logprob = logprob_function(instrument.plan.choice(site))
    logprobs = logprob(logits, drawn, temperatures(places, device))
    targets = [
        Target(place.row, place.request, place.position, token, place.temperature)
        for place, token in zip(places, drawn.tolist(), strict=True)
    ]
    return samples(targets, logprobs, version=execution.weights.version)
