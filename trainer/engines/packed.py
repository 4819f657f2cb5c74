"""The trainer's forward: whole requests packed into one row of tokens, differentiable.

    engine = PackedEngine(load_model("smollm2-135m"), plan)
    engine.run(scenario)                            # as an engine: scores given tokens
    logp = engine.logprobs(requests)                # as a trainer: fp32, with grad

Requests are packed without padding into ``[1, T]``, positions restart at 0, and attention sees each
request alone. As an engine it runs schedules whose steps hold whole requests; it has no cache. As a
trainer it packs as many requests into a micro-batch as ``max_rows`` allows: under an aligned plan
that changes no logprob bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.attention import packed_attention
from ...kernels.errors import CapabilityError, UsageError
from ...model_recipes.apply import Instrument, apply_plan
from ...model_recipes.models import LoadedModel
from ...model_recipes.plan import Plan
from ...model_recipes.recurrent import WholeRequests
from .admission import admit, check_requests
from .base import Observer, Request, Run, Sample, Scenario, Schedule, Slice, StateSpec, Step
from .environment import describe_engine
from .replay import forced_rows
from .rows import (
    base_model,
    known_targets,
    last_of_each,
    observed,
    row_names,
    row_tokens,
    score,
    score_temperature,
)
from .schedules import build_schedule
from .stock_attention import packed_stock_attention
from .weights import Weights

# T rows, H query heads, K key heads, D head size


@dataclass(frozen=True, slots=True)
class PackedBatch(WholeRequests):
    """The context of one packed row; ``query_start`` is int32 [requests + 1]."""

    def attend(
        self,
        layer_idx: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        /,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        attention: str,
    ) -> Tensor:
        """Causal attention within each request: [T, H, D]; differentiable."""
        options: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "sinks": sinks,
        }
        if attention != "stock":
            options["contract"] = attention
            return packed_attention(q_THD, k_TKD, v_TKD, self.query_start, **options)
        return packed_stock_attention(q_THD, k_TKD, v_TKD, self.query_start, **options)


class PackedEngine:
    """See the module."""

    name = "packed"

    def __init__(
        self, loaded: LoadedModel, plan: Plan, *, instrument: Instrument | None = None
    ) -> None:
        self.loaded = loaded
        self.instrument = instrument or apply_plan(loaded.module, plan)
        self.weights = Weights(loaded)

    @property
    def version(self) -> int:
        """Version of the installed weights."""
        return self.weights.version

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Nothing is kept between steps."""
        return ()

    def schedule(self, name: str, requests: Sequence[Request]) -> Schedule:
        """The named schedule; ``mixed`` means whole requests in shared steps."""
        name = "batched" if name == "mixed" else name
        return build_schedule(name, requests, self.state_specs())

    def describe(self) -> dict[str, Any]:
        """Everything that goes into the environment digest."""
        return describe_engine(self.name, self.instrument, self.weights)

    @torch.no_grad()
    def run(self, scenario: Scenario, observer: Observer | None = None) -> Run:
        """Score every known token of a schedule whose steps hold whole requests, or starts."""
        schedule = admit(
            self.name,
            scenario,
            self.loaded.config,
            self.state_specs(),
            version=self.version,
            routings=self.instrument.routings,
        )
        steps = list(_whole_steps(schedule))
        requests = {request.id: request for request in scenario.requests}
        scored: list[Sample] = []
        with observed(self.instrument, observer):
            for index, step in enumerate(steps):
                rows = row_names(step)
                if observer is not None:
                    observer.begin_rows(index, rows)
                scored += score(
                    self.instrument,
                    self._hidden(step, requests),
                    known_targets(rows, requests),
                    version=self.version,
                    step=index,
                    observer=observer,
                )
        return Run(
            scenario=scenario,
            executed=schedule,
            requests=scenario.requests,
            samples=last_of_each(scored),
            engine=self.name,
        )

    def logprobs(
        self,
        requests: Sequence[Request],
        temperature: float | None = None,
        *,
        max_rows: int | None = None,
    ) -> Tensor:
        """fp32 logprobs of the scored tokens (:meth:`scored`), in that order, with grad.

        temperature: None takes each request's own. max_rows: rows of one micro-batch; a trainer
        that wants to free each graph calls this once per :meth:`micro_batches` entry.
        """
        if temperature is not None and not temperature > 0:
            raise UsageError(f"temperature is {temperature}; use a number above 0")
        if not any(map(_scored_of, requests)):
            raise UsageError("no token can be scored; give requests of two tokens or more")
        batches = self.micro_batches(requests, max_rows=max_rows)
        return torch.cat([self._logprobs(batch, temperature) for batch in batches])

    def logprobs_beside(self, batch: Sequence[Request], ids_NH: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [N] of the scored tokens of one micro-batch, and [N, H] of other ids in their place.

        ids: int64 [N, H]. Both with grad, from one forward; the first has the bits of
        :meth:`logprobs`.
        """
        rows, targets, at = self._rows_of(batch)
        others = ids_NH.shape[1]
        logp = self.instrument.head_logprob(
            torch.cat([rows, rows.repeat_interleave(others, dim=0)]),
            torch.cat([targets, ids_NH.reshape(-1).to(rows.device)]),
            torch.cat([at, at.repeat_interleave(others)]),
        )
        return logp[: len(rows)], logp[len(rows) :].view(-1, others)

    def scored(self, requests: Sequence[Request]) -> list[tuple[str, int]]:
        """(request, position) of each scored token: the sampled ones; all where none is marked."""
        return [
            (request.id, position) for request in requests for position in _scored_of(request)
        ]

    def micro_batches(
        self, requests: Sequence[Request], *, max_rows: int | None = None
    ) -> list[tuple[Request, ...]]:
        """Consecutive requests in groups of at most ``max_rows`` tokens."""
        check_requests(
            self.name, requests, self.loaded.config, routings=self.instrument.routings
        )
        groups: list[list[Request]] = []
        rows = 0
        for request in requests:
            size = len(request.tokens)
            if max_rows is not None and size > max_rows:
                raise UsageError(
                    f"request {request.id!r} has {size} tokens, more than max_rows {max_rows}; "
                    f"use max_rows of at least {size}"
                )
            if not groups or (max_rows is not None and rows + size > max_rows):
                groups.append([])
                rows = 0
            groups[-1].append(request)
            rows += size
        return [tuple(group) for group in groups]

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Install new weights in place; nothing is cached."""
        self.weights.install(self.weights.stage(weights, version))

    def close(self) -> None:
        """Take the plan off the model."""
        self.instrument.remove()

    def _logprobs(self, batch: Sequence[Request], temperature: float | None) -> Tensor:
        rows, targets, at = self._rows_of(batch)
        at = at if temperature is None else torch.full_like(at, temperature)
        return self.instrument.head_logprob(rows, targets, at)

    def _rows_of(self, batch: Sequence[Request]) -> tuple[Tensor, Tensor, Tensor]:
        """What predicts each scored token [N, D], the token [N] and its temperature [N]."""
        step = Step(slices=tuple(Slice(request=r.id, start=0, stop=len(r.tokens)) for r in batch))
        rows, tokens, at, first = list[int](), list[int](), list[float](), 0
        for request in batch:
            positions = _scored_of(request)
            rows += [first + position - 1 for position in positions]
            tokens += [request.tokens[position] for position in positions]
            at += [score_temperature(request.sampling)] * len(positions)
            first += len(request.tokens)
        device = self.loaded.device  # copies wait for the device: so before the forward
        index, targets = torch.tensor([rows, tokens], dtype=torch.int64, device=device)
        divisors = torch.tensor(at, dtype=torch.float32, device=device)
        hidden = self._hidden(step, {request.id: request for request in batch})
        return hidden[index], targets, divisors

    def _hidden(self, step: Step, requests: Mapping[str, Request]) -> Tensor:
        """Final hidden states [T, H] of a step; padding rows form a sequence of their own."""
        lengths = [piece.stop for piece in step.slices]
        lengths += [step.padded_rows] if step.padded_rows else []
        device = self.loaded.device
        tokens = {name: request.tokens for name, request in requests.items()}
        rows = row_names(step)
        self.instrument.force(forced_rows(rows, requests, self.instrument.routings, device))
        positions = [p for length in lengths for p in range(length)]
        query_start = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        return base_model(self.instrument)(
            input_ids=row_tokens(rows, tokens).to(device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            batch=PackedBatch(query_start),
        ).last_hidden_state[0]


def _whole_steps(schedule: Schedule) -> Iterator[Step]:
    """The steps, each slice of which starts at 0 and keeps nothing for later."""
    for index, event in enumerate(schedule.events):
        if not isinstance(event, Step):
            raise CapabilityError(
                f"event {index} ({type(event).__name__}): the packed engine keeps no state; "
                "use the paged engine"
            )
        for piece in event.slices:
            if piece.start or piece.keep not in (None, piece.stop):
                raise CapabilityError(
                    f"event {index}: slice [{piece.start}, {piece.stop}) of {piece.request!r} "
                    "needs cached state, and the packed engine keeps none; use the paged engine, "
                    "or a schedule of whole requests (alone, batched, packed)"
                )
        yield event


def _scored_of(request: Request) -> list[int]:
    """Positions of the sampled tokens (1 and up); of all tokens where none is marked."""
    if True in request.sampled_mask:
        return [p for p, sampled in enumerate(request.sampled_mask) if sampled and p]
    return list(range(1, len(request.tokens)))
