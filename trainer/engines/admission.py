"""What an engine refuses before it does any work: requests, layouts, settings it cannot honour."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...kernels.errors import CapabilityError, ScheduleError, UsageError
from ...kernels.moe import Routing
from .base import Layout, Request, Scenario, Schedule, StateSpec, Step
from .legal import require_legal
from .replay import check_forced


def max_length(config: Any) -> int:
    """Longest sequence that the model's position table covers."""
    return int(config.max_position_embeddings)


def admit(
    engine: str,
    scenario: Scenario,
    config: Any,
    state_specs: Sequence[StateSpec],
    *,
    version: int,
    routings: Mapping[str, Routing] = MappingProxyType({}),
) -> Schedule:
    """The schedule of ``scenario`` if this engine may run it; raises otherwise."""
    if scenario.schedule is None:
        raise UsageError(
            "the scenario has no schedule; give it one, or let an engine's generate() make it"
        )
    if scenario.policy is not None:
        raise UsageError("the scenario has both a schedule and a policy; give exactly one of them")
    if scenario.layout != Layout():
        raise CapabilityError(
            f"engine {engine} runs on one rank, not with {scenario.layout}; use Layout()"
        )
    if scenario.settings:
        raise CapabilityError(
            f"engine {engine} has no setting {', '.join(sorted(scenario.settings))}; leave it out"
        )
    check_requests(engine, scenario.requests, config, routings=routings)
    require_legal(scenario.schedule, state_specs, scenario.requests, version=version)
    for index, event in enumerate(scenario.schedule.events):
        if isinstance(event, Step) and event.mode != "eager":
            raise CapabilityError(
                f"event {index}: engine {engine} runs steps eagerly, not in mode {event.mode!r}; "
                'use mode "eager"'
            )
    return scenario.schedule


def check_requests(
    engine: str,
    requests: Sequence[Request],
    config: Any,
    *,
    generating: bool = False,
    routings: Mapping[str, Routing] = MappingProxyType({}),
) -> None:
    """Refuse empty, overlong or foreign requests.

    generating: tokens to come count too. routings: choices that the model makes, by site.
    """
    if not requests:
        raise UsageError("there are no requests; give at least one")
    limit, vocabulary = max_length(config), int(config.vocab_size)  # slow to ask a config for
    for request in requests:
        name = f"request {request.id!r}"
        if not request.id:
            raise UsageError("a request has an empty id, which is kept for padding rows; name it")
        if not request.tokens:
            raise UsageError(f"{name} has an empty prompt; give it at least one token")
        length = len(request.tokens) + (request.sampling.max_new_tokens if generating else 0)
        if length > limit:
            raise ScheduleError(
                f"{name} needs {length} positions, but the model's limit is "
                f"{limit} (max_position_embeddings); shorten it"
            )
        outside = [t for t in request.tokens if not 0 <= t < vocabulary]
        if outside:
            raise UsageError(
                f"{name} has token id {outside[0]}, outside the vocabulary of {vocabulary}; "
                "tokenize it with this model's tokenizer"
            )
        if not request.sampling.temperature >= 0:
            raise UsageError(
                f"{name} has temperature {request.sampling.temperature}; use 0 (greedy) or more"
            )
        if request.adapter is not None:
            raise CapabilityError(
                f"{name} wants adapter {request.adapter!r}, and engine {engine} has no adapters; "
                "merge it into the weights, or set adapter to None"
            )
        check_forced(request, routings, engine)
