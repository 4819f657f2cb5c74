"""Stock transformers, untouched: the baseline, never the product. It accepts only the stock plan.

Steps of one slice run over transformers' own cache, one per request (so whole prompts, chunks and
decodes work); steps of several whole prompts run as a padded batch without a cache. Anything else
is refused with the engine that can do it. Only scored rows reach the head, as with transformers'
own ``logits_to_keep``; the stock logprob is ``log_softmax`` of fp32 logits.

    engine = TransformersEngine(load_model("smollm2-135m"), stock_plan())
    run = engine.run(scenario_of(engine.schedule("decode", requests)))
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...kernels.errors import CapabilityError, RecipeError
from ...model_recipes.apply import apply_plan
from ...model_recipes.models import LoadedModel
from ...model_recipes.plan import Plan
from .admission import admit
from .base import (
    Event,
    Evict,
    Hit,
    Observer,
    Preempt,
    Publish,
    Request,
    Run,
    Sample,
    Scenario,
    Schedule,
    Slice,
    StateSpec,
    Step,
)
from .environment import describe_engine
from .recurrent_batch import state_specs
from .rows import PADDING, base_model, known_targets, last_of_each, observed, row_tokens, score
from .schedules import build_schedule
from .weights import Weights


def cache_argument(model: Any) -> str:
    """What this transformers release calls the cache: 5.19 ``past_key_values``, 5.24 ``cache``.

    Some releases swallow a wrong name in silence, so it is read from the signature.
    """
    names = inspect.signature(type(model).forward).parameters
    for name in ("past_key_values", "cache"):
        if name in names:
            return name
    raise CapabilityError(
        f"cannot find the cache argument of transformers among {', '.join(names)}; "
        "install a release between 5.16.1 and 5.20"
    )


class TransformersEngine:
    """See the module."""

    name = "transformers"

    def __init__(self, loaded: LoadedModel, plan: Plan) -> None:
        if not plan.is_stock:
            raise RecipeError(
                "the transformers engine is the untouched baseline: it runs the stock plan, not "
                f"{plan.name}; use the packed or the paged engine"
            )
        self.loaded = loaded
        self.instrument = apply_plan(loaded.module, plan, attention="module")
        self.weights = Weights(loaded)
        self.cache_argument = cache_argument(base_model(self.instrument))

    @property
    def version(self) -> int:
        """Version of the installed weights."""
        return self.weights.version

    def state_specs(self) -> tuple[StateSpec, ...]:
        """Keys and values of every attention site, states of recurrent layers."""
        return state_specs(self.instrument, granule=1)

    def schedule(self, name: str, requests: Sequence[Request]) -> Schedule:
        """The named schedule; ``mixed`` means whole requests in shared steps."""
        name = "batched" if name == "mixed" else name
        return build_schedule(name, requests, self.state_specs())

    def describe(self) -> dict[str, Any]:
        """Everything that goes into the environment digest."""
        return describe_engine(self.name, self.instrument, self.weights) | {
            "attention": self.loaded.config._attn_implementation,
        }

    @torch.no_grad()
    def run(self, scenario: Scenario, observer: Observer | None = None) -> Run:
        """Execute a schedule of single slices and batches of whole prompts."""
        schedule = admit(
            self.name, scenario, self.loaded.config, self.state_specs(), version=self.version
        )
        _require_able(schedule)
        requests = {request.id: request for request in scenario.requests}
        caches: dict[str, DynamicCache] = {}
        continued = _continued(schedule)
        scored: list[Sample] = []
        steps = 0
        with observed(self.instrument, observer):
            for event in schedule.events:
                if isinstance(event, Evict | Preempt):
                    caches.pop(event.request, None)
                if not isinstance(event, Step):
                    continue
                rows, arguments = _arguments(event, requests)
                piece = event.slices[0]
                if len(event.slices) == 1 and piece.request in continued:
                    new = DynamicCache(config=self.loaded.config)
                    cache = caches.setdefault(piece.request, new)
                    arguments |= {self.cache_argument: cache, "use_cache": True}
                if observer is not None:
                    observer.begin_rows(steps, rows)
                hidden = self._hidden(arguments)
                targets = known_targets(rows, requests)
                scored += score(
                    self.instrument,
                    hidden,
                    targets,
                    version=self.version,
                    step=steps,
                    observer=observer,
                )
                steps += 1
        return Run(
            scenario=scenario,
            executed=schedule,
            requests=scenario.requests,
            samples=last_of_each(scored),
            engine=self.name,
        )

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Install new weights in place. No cached state outlives a run."""
        self.weights.install(self.weights.stage(weights, version))

    def close(self) -> None:
        """Stop watching the model."""
        self.instrument.remove()

    def _hidden(self, arguments: Mapping[str, Any]) -> Tensor:
        on_device = {
            name: value.to(self.loaded.device) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        return base_model(self.instrument)(**on_device).last_hidden_state.flatten(0, 1)


def _require_able(schedule: Schedule) -> None:
    """Refuse what stock transformers cannot do, before any work."""
    batched: set[str] = set()
    for index, event in enumerate(schedule.events):
        refused = _refused(event, batched)
        if refused:
            raise CapabilityError(
                f"event {index} ({type(event).__name__}): the transformers engine cannot do "
                f"{refused}; use the paged engine"
            )
        if isinstance(event, Step):
            names = {piece.request for piece in event.slices if not piece.start}
            batched = batched | names if len(event.slices) > 1 else batched - names


def _refused(event: Event, batched: set[str]) -> str | None:
    """What makes an event impossible here. batched: requests whose prefill left no cache."""
    match event:
        case Hit():
            return "prefix hits"
        case Publish():
            return "a publication inside a schedule; it can with publish(), between runs"
        case Step() if event.padded_rows:
            return "padding rows"
        case Step() if any(piece.keep not in (None, piece.stop) for piece in event.slices):
            return "rejected drafts"
        case Step() if len(event.slices) > 1 and any(piece.start for piece in event.slices):
            return "a step that continues several requests at once"
        case Step() if any(piece.start and piece.request in batched for piece in event.slices):
            return "a request that goes on after a batched prefill"
        case _:
            return None


def _continued(schedule: Schedule) -> set[str]:
    """Requests with a slice that starts after 0: only they need a cache."""
    steps = (event for event in schedule.events if isinstance(event, Step))
    return {piece.request for step in steps for piece in step.slices if piece.start}


def _arguments(
    step: Step, requests: Mapping[str, Request]
) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Row names and model arguments of a step; several prompts are padded on the right."""
    widest = max(piece.stop - piece.start for piece in step.slices)
    rows = [row for piece in step.slices for row in _padded_row(piece, widest)]
    tokens = {name: request.tokens for name, request in requests.items()}
    arguments: dict[str, Any] = {
        "input_ids": row_tokens(rows, tokens).reshape(len(step.slices), widest),
        "use_cache": False,
    }
    if len(step.slices) > 1:
        mask = torch.tensor([int(row != PADDING) for row in rows])
        arguments["attention_mask"] = mask.reshape(len(step.slices), widest)
    return rows, arguments


def _padded_row(piece: Slice, widest: int) -> list[tuple[str, int]]:
    names = [(piece.request, position) for position in range(piece.start, piece.stop)]
    return names + [PADDING] * (widest - len(names))
