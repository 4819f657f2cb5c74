"""Routing replay: record which experts every token went to, and force the same choice elsewhere.

    recorder = ChoiceRecorder()
    run = paged.run(scenario, recorder)
    again = replace(request, forced=recorder.forced(request))
    packed.logprobs([again])                    # routes each token as the rollout did

Replay is a comparison recipe (R3), not alignment: it makes two engines agree on a choice, not on
its cause. A record that does not fit its request, row by row, is refused.

Legend: T rows of a forward, K slots per token.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...kernels.errors import CapabilityError, MisalignedError
from ...kernels.moe import Routing
from .base import Hit, Request, Schedule, SiteCall

Choices = tuple[tuple[int, ...], ...]


class ChoiceRecorder:
    """Observer that keeps the choice of every router for every (request, position).

    A position that is computed twice must choose alike: the second time is compared.
    """

    def __init__(self) -> None:
        self._rows: Sequence[tuple[str, int]] = ()
        self._chosen: dict[str, dict[tuple[str, int], tuple[int, ...]]] = {}

    def begin_rows(self, step: int, rows: Sequence[tuple[str, int]]) -> None:
        """Whose rows the next calls hold."""
        self._rows = rows

    def on_site(self, call: SiteCall, /) -> None:
        """Keep a router's choice."""
        if call.site.op_class != "topk":
            return
        known = self._chosen.setdefault(call.site.name, {})
        for row, chosen in zip(self._rows, call.output.tolist(), strict=True):
            if row[0] and known.setdefault(row, tuple(chosen)) != tuple(chosen):
                raise MisalignedError(
                    f"{call.site.name} chose {chosen} for request {row[0]!r}, position {row[1]}, "
                    f"and {list(known[row])} before; `zm localize` names what moved its scores"
                )

    def follow(self, executed: Schedule) -> None:
        """Give requests that started from another's prefix the choices that were made there."""
        for event in executed.events:
            if isinstance(event, Hit):
                for known in self._chosen.values():
                    for position in range(event.upto):
                        source = known.get((event.source, position))
                        if source is not None:
                            known.setdefault((event.request, position), source)

    def clear(self) -> None:
        """Forget all choices."""
        self._chosen.clear()

    def forced(self, request: Request, tokens: int | None = None) -> dict[str, Choices]:
        """``Request.forced`` for the request's first ``tokens`` positions (default: all)."""
        count = len(request.tokens) if tokens is None else tokens
        found: dict[str, Choices] = {}
        for site, known in self._chosen.items():
            missing = [p for p in range(count) if (request.id, p) not in known]
            if missing:
                raise MisalignedError(
                    f"request {request.id!r} has no recorded choice of {site} for position "
                    f"{missing[0]}; record the whole request"
                )
            found[site] = tuple(known[request.id, p] for p in range(count))
        return found


def check_forced(request: Request, routings: Mapping[str, Routing], engine: str) -> None:
    """Raise where a request's forced choices do not fit this model or this request."""
    unknown = sorted(set(request.forced) - set(routings))
    if unknown:
        have = ", ".join(routings) or "none"
        raise CapabilityError(
            f"request {request.id!r} forces choices at {', '.join(unknown)}, and engine {engine} "
            f"makes choices at {have}; leave `forced` empty, or record it with this model"
        )
    for site, choices in request.forced.items():
        routing = routings[site]
        if len(choices) != len(request.tokens):
            raise MisalignedError(
                f"request {request.id!r} has {len(request.tokens)} tokens but {len(choices)} rows "
                f"of choices for {site}; record exactly these tokens again"
            )
        for position, chosen in enumerate(choices):
            fits = len(set(chosen)) == len(chosen) == routing.top_k
            if not fits or not all(0 <= expert < routing.num_experts for expert in chosen):
                raise MisalignedError(
                    f"request {request.id!r}, position {position}: {site} takes {routing.top_k} "
                    f"different experts of 0 to {routing.num_experts - 1}, not {list(chosen)}; "
                    "record it again with this model"
                )


def forced_rows(
    rows: Sequence[tuple[str, int]],
    requests: Mapping[str, Request],
    routings: Mapping[str, Routing],
    device: torch.device,
) -> dict[str, Tensor]:
    """int64 [T, K] per forced site of one forward; padding rows go to the first experts.

    Either all requests of a forward force a site or none does: a mixed batch is refused.
    """
    if not any(request.forced for request in requests.values()):
        return {}
    present = {name for name, _ in rows if name}
    sites = {frozenset(requests[name].forced) for name in present}
    if len(sites) > 1:
        raise CapabilityError(
            "some requests of this step force choices and others do not; run them apart"
        )
    found: dict[str, Tensor] = {}
    for site in next(iter(sites), frozenset()):
        filler = tuple(range(routings[site].top_k))
        chosen = [requests[n].forced[site][p] if n else filler for n, p in rows]
        found[site] = torch.tensor(chosen, dtype=torch.int64, device=device)
    return found
