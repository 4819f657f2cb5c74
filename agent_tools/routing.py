"""Which experts a token goes to is a step, not a slope: the fp64 reference of mixtures.

Where two experts score alike, an error of the last bit moves a token to another one, and its
logprob by any amount, in stock as in any plan. So the reference in fp64 takes every token through
the experts that the run under test chose (routing replay; stock has its own reference, with its own
choices), and the choices are judged apart: each must be what exact scores allow when they are off
by twice the largest error that stock's scores have. A choice that fp64 would have made otherwise
is a flip, and counted; one that no such error explains is wrong.

    trace = RoutingTrace()
    run = engines.pack(requests, trace)
    replay = Replay(pristine.module, trace)
    reference = reference_logprobs(pristine, requests, replay=replay)
    judged(replay, slack(stock_replay))

Legend: T tokens, E experts, K slots per token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..kernels.moe import Routing
from ..model_recipes.experts import router_facts, weights_of_choice
from ..trainer.engines.base import Observer, Request, SiteCall
from ..trainer.engines.replay import ChoiceRecorder

ALLOWANCE = 2.0
Row = tuple[str, int]


def routers(module: nn.Module) -> dict[str, Mapping[str, Any]]:
    """Facts of the routers in an untouched model, by path."""
    return {path: facts for path, each in module.named_modules() if (facts := router_facts(each))}


class RoutingTrace:
    """Keeps each token's experts and the router's logits; ``inner`` sees everything, too."""

    def __init__(self, inner: Observer | None = None) -> None:
        self.inner = inner
        self.choices = ChoiceRecorder()
        self.logits: dict[str, dict[Row, Tensor]] = {}
        self._rows: Sequence[Row] = ()

    def begin_rows(self, step: int, rows: Sequence[Row]) -> None:
        """Whose rows the next calls hold."""
        self._rows = rows
        self.choices.begin_rows(step, rows)
        if self.inner is not None:
            self.inner.begin_rows(step, rows)

    def on_site(self, call: SiteCall, /) -> Tensor | None:
        """Keep logits and choices."""
        if call.site.op_class == "router":
            known = self.logits.setdefault(call.site.path, {})
            logits = call.output.detach().double().cpu()
            known |= {row: each for row, each in zip(self._rows, logits, strict=True) if row[0]}
        self.choices.on_site(call)
        return None if self.inner is None else self.inner.on_site(call)


@dataclass(slots=True, kw_only=True)
class _Seen:
    """One router over all requests. exact, own: fp64 logits and choice; given: what was forced."""

    facts: Mapping[str, Any]
    bias: Tensor | None
    rows: list[Row] = field(default_factory=list[Row])
    exact: list[Tensor] = field(default_factory=list[Tensor])
    own: list[Tensor] = field(default_factory=list[Tensor])
    given: list[Tensor] = field(default_factory=list[Tensor])

    def scores(self, logits: Tensor) -> Tensor:
        """What experts are ranked by: logits, or sigmoids with the correction."""
        if not self.facts["routing"].sigmoid:
            return logits
        return logits.sigmoid() if self.bias is None else logits.sigmoid() + self.bias


class Replay:
    """A run's choices, put on an fp64 copy of the model that made them."""

    def __init__(self, pristine: nn.Module, trace: RoutingTrace) -> None:
        self.trace = trace
        self.seen = {path: _Seen(facts=facts, bias=_bias(pristine, path, facts))
                     for path, facts in routers(pristine).items()}  # fmt: skip
        self._request: Request | None = None

    def put_on(self, module: nn.Module) -> None:
        """Routers of ``module`` obey from now on."""
        for path, seen in self.seen.items():
            router = module.get_submodule(path)
            cast(Any, router).forward = self._forward(path, router, seen)

    def begin(self, request: Request) -> None:
        """Its tokens are next."""
        self._request = replace(request, forced=self.trace.choices.forced(request))

    def _forward(self, path: str, router: nn.Module, seen: _Seen) -> Callable[[Tensor], Any]:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            request = self._request
            assert request is not None
            logits, _, own = type(router).forward(router, hidden)
            chosen = torch.tensor(request.forced[f"{path}#experts"], device=own.device)
            weights = weights_of_choice(logits, chosen, seen.facts["routing"])
            seen.rows += [(request.id, position) for position in range(len(chosen))]
            seen.exact += logits.double().cpu()
            seen.own += own.cpu()
            seen.given += chosen.cpu()
            return logits, weights, chosen

        return forward


def _bias(pristine: nn.Module, path: str, facts: Mapping[str, Any]) -> Tensor | None:
    return None if facts["bias"] is None else pristine.get_submodule(path).get_buffer(
        facts["bias"]).detach().double().cpu()  # fmt: skip


def slack(stock: Replay) -> float:
    """By how much a score may be off: twice the largest error of stock's own."""
    errors = [
        float((seen.scores(stock.trace.logits[path][row]) - seen.scores(exact)).abs().max())
        for path, seen in stock.seen.items()
        for row, exact in zip(seen.rows, seen.exact, strict=True)
    ]
    return ALLOWANCE * max(errors, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """flipped: fp64 would have chosen otherwise; wrong: and no allowed error explains it."""

    compared: int
    flipped: int
    wrong: int


def judged(replay: Replay, error: float, spoiled: frozenset[Row] = frozenset()) -> Choices:
    """All choices of a run. spoiled: rows in which the worst expert replaces the last (a control).

    error: by how much a score may be off (:func:`slack`).
    """
    compared = flipped = wrong = 0
    for seen in replay.seen.values():
        routing = seen.facts["routing"]
        for row, exact, own, given in zip(seen.rows, seen.exact, seen.own, seen.given, strict=True):
            scores, chosen = seen.scores(exact), set(given.tolist())
            if row in spoiled:
                chosen = set(given.tolist()[:-1]) | {int(scores.argmin())}
            compared += 1
            if chosen != set(own.tolist()):
                flipped += 1
                wrong += not explained(scores, chosen, routing, error)
    return Choices(compared=compared, flipped=flipped, wrong=wrong)


def explained(scores: Tensor, chosen: set[int], routing: Routing, error: float) -> bool:
    """Whether ``chosen`` is the choice for some scores within ``error`` of ``scores[E]``.

    Groups are ranked by the sum of their two best, which is off by twice as much.
    """
    rivals = set(range(len(scores))) - chosen
    if routing.groups > 1:
        size = len(scores) // routing.groups
        ranks = scores.view(routing.groups, size).topk(2, dim=-1).values.sum(dim=-1)
        used = {expert // size for expert in chosen}
        free = routing.groups_kept - len(used)
        others = set(range(routing.groups)) - used
        above = max(sum(float(ranks[o] - ranks[u]) > 4 * error for o in others) for u in used)
        if above > free:
            return False
        kept = used | {
            o for o in others
            if int((ranks >= ranks[o] - 4 * error).sum()) <= routing.groups_kept
        }  # fmt: skip
        rivals = {expert for expert in rivals if expert // size in kept}
    if len(chosen) != routing.top_k or not rivals:
        return len(chosen) == routing.top_k
    best = max(float(scores[expert]) for expert in rivals)
    return best - min(float(scores[expert]) for expert in chosen) <= 2 * error
