"""Faulty engines: what happens to tokens, logprobs, caches and weights between the operators.

Each is a context manager that disturbs one function of the rollout engine. None touches an
operator, so the alignment anchor, a refusal or the count of tokens must find it.
"""

import contextlib
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...model_recipes.models import LoadedModel
from ...model_recipes.state import named_state, state_digest
from ...trainer.engines import paged
from ...trainer.engines.base import Hit, Publish, Request, Run, Sample
from ...trainer.engines.pages import Pages
from ...trainer.engines.rows import Target
from ...trainer.engines.weights import Weights
from .mechanism import in_rollout, replaced

Planting = Callable[[LoadedModel], contextlib.AbstractContextManager[None]]


def _bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


def _value(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<i", bits))[0]


def on_targets(change: Callable[[Sequence[Target]], Sequence[Target]]) -> Planting:
    """The engine scores other targets than it was asked for."""

    @contextlib.contextmanager
    def planted(model: LoadedModel) -> Generator[None]:
        right = paged.score

        def score(instrument: Any, hidden: Tensor, targets: Sequence[Target], **more: Any) -> Any:
            return right(instrument, hidden, change(targets), **more)

        with replaced(paged, "score", score):
            yield

    return planted


def without_temperature(targets: Sequence[Target]) -> list[Target]:
    """L01: the logprob is taken before temperature."""
    return [replace(target, temperature=1.0) for target in targets]


def of_the_next_candidate(targets: Sequence[Target]) -> list[Target]:
    """L05: the right shape, but each position scores the candidate of the one after it."""
    tokens = [target.token for target in targets]
    return [replace(t, token=new) for t, new in zip(targets, tokens[1:] + tokens[:1], strict=True)]


def on_run(change: Callable[[Run], Run]) -> Planting:
    """The engine answers with something else than it computed."""

    @contextlib.contextmanager
    def planted(model: LoadedModel) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for name in ("run", "generate"):
                right = getattr(paged.PagedEngine, name)

                def answer(*given: Any, _right: Any = right, **more: Any) -> Run:
                    return change(_right(*given, **more))

                stack.enter_context(replaced(paged.PagedEngine, name, answer))
            yield

    return planted


def divided_by_temperature(run: Run) -> Run:
    """L02: a logprob at temperature 1, divided by the temperature afterwards."""
    samples = [
        replace(each, logprob_bits=_bits(_value(each.logprob_bits) / 0.7)) for each in run.samples
    ]
    return replace(run, samples=tuple(samples))


def from_the_wrong_end(run: Run) -> Run:
    """K03: the slice of the last request's logprobs is taken one place off."""
    name = run.samples[-1].request
    own = [each for each in run.samples if each.request == name]
    bits = [each.logprob_bits for each in own]
    moved = [
        replace(each, logprob_bits=new) for each, new in zip(own, bits[1:] + bits[:1], strict=True)
    ]
    return replace(run, samples=(*run.samples[: -len(own)], *moved))


def null_becomes_nan(run: Run) -> Run:
    """N01: one logprob became null on the wire and arrives as NaN."""
    last = replace(run.samples[-1], logprob_bits=_bits(float("nan")))
    return replace(run, samples=(*run.samples[:-1], last))


def encoded_again(run: Run) -> Run:
    """K01: the answer was decoded to text and encoded again: one token became another."""
    first = run.requests[0]
    other = (first.tokens[-1] + 1) % 3000 or 1
    changed = replace(first, tokens=(*first.tokens[:-1], other))
    return replace(run, requests=(changed, *run.requests[1:]))


def ended_by_hand(run: Run) -> Run:
    """K05: the end token is appended with logprob 0 and counts as sampled."""
    request = run.requests[0]
    end = Sample(
        request=request.id, position=len(request.tokens), token=2, logprob_bits=0, version=0,
        temperature=1.0,
    )  # fmt: skip
    longer = Request(
        id=request.id, tokens=(*request.tokens, 2), sampling=request.sampling,
        sampled_mask=(*(request.sampled_mask or (False,) * len(request.tokens)), True),
    )  # fmt: skip
    return replace(run, requests=(longer, *run.requests[1:]), samples=(*run.samples, end))


def from_an_old_buffer(run: Run) -> Run:
    """C01: a position that came from the cache has the logprob that its slot held before."""
    hits = [event for event in run.executed.events if isinstance(event, Hit)]
    if not hits:
        return run
    scored = {(each.request, each.position) for each in run.samples}
    old = [
        replace(each, request=hit.request)
        for hit in hits[:1]
        for each in run.samples
        if each.request == hit.source and each.position <= hit.upto
    ]
    invented = [each for each in old if (each.request, each.position) not in scored]
    return replace(run, samples=(*run.samples, *invented))


@contextlib.contextmanager
def stale_prefixes(model: LoadedModel) -> Generator[None]:
    """C05: cached keys survive a publication, and hits on them are served."""
    right = Pages.begin

    def begin(self: Pages, event: Any) -> None:
        if not isinstance(event, Publish):
            right(self, event)

    def admit(engine: str, scenario: Any, *rest: Any, **more: Any) -> Any:
        return scenario.schedule

    with replaced(Pages, "begin", begin), replaced(paged, "admit", admit):
        yield


def on_install(change: Callable[[Weights, Mapping[str, Tensor]], None]) -> Planting:
    """The engine counts a version up, whatever arrived."""

    @contextlib.contextmanager
    def planted(model: LoadedModel) -> Generator[None]:
        right = Weights.install

        def install(self: Weights, publish: Publish) -> None:
            if self.loaded is not model:
                right(self, publish)
                return
            held = self._staged  # pyright: ignore[reportPrivateUsage]
            staged = held.pop((publish.version, publish.digest), {})
            with torch.no_grad():
                change(self, staged)
            self.digests, self.version = state_digest(self.loaded.module), publish.version

        with replaced(Weights, "install", install):
            yield

    return planted


def nothing_arrives(weights: Weights, staged: Mapping[str, Tensor]) -> None:
    """S02: the apply call failed; only the version went up."""


def second_chunk_restores(weights: Weights, staged: Mapping[str, Tensor]) -> None:
    """W04: the second chunk of a publication restores the tensors of the first."""
    state = named_state(weights.loaded.module)
    for name in list(state)[len(state) // 2 :]:
        state[name].copy_(staged[name])


@contextlib.contextmanager
def buffer_made_anew(model: LoadedModel) -> Generator[None]:
    """W01: what was derived on loading is derived again; a captured graph reads the old one."""
    right = Weights.install

    def install(self: Weights, publish: Publish) -> None:
        right(self, publish)
        if self.loaded is model:
            rotary = cast(Any, model.module).model.rotary_emb
            rotary.inv_freq = rotary.inv_freq.clone()

    with replaced(Weights, "install", install):
        yield


@contextlib.contextmanager
def missing_names_logged(model: LoadedModel) -> Generator[None]:
    """W05: tensors that a publication lacks stay as they are, without an error."""
    right = Weights._check  # pyright: ignore[reportPrivateUsage]

    def check(self: Weights, weights: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
        if self.loaded is not model:
            return right(self, weights, version)
        return right(self, named_state(self.loaded.module) | dict(weights), version)

    with replaced(Weights, "_check", check):
        yield


@contextlib.contextmanager
def untied_head(model: LoadedModel) -> Generator[None]:
    """W06: the engine loads a tied head as a tensor of its own, which no update reaches."""
    head = cast(nn.Linear, model.module.get_submodule("lm_head"))
    tied = head.weight
    right = Weights._check  # pyright: ignore[reportPrivateUsage]

    def check(self: Weights, weights: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
        if self.loaded is not model:
            return right(self, weights, version)
        return named_state(self.loaded.module) | dict(weights)

    head.weight = nn.Parameter(tied.detach().clone(), requires_grad=False)
    try:
        with replaced(Weights, "_check", check):
            yield
    finally:
        head.weight = tied


@contextlib.contextmanager
def while_decoding(
    owner: Any, name: str, change: Callable[[Callable[..., Any], bool], Callable[..., Any]]
) -> Generator[None]:
    """Another function of the engine, which knows whether the rollout runs."""
    right = getattr(owner, name)
    with in_rollout() as running:

        def call(*given: Any, **more: Any) -> Any:
            return change(right, bool(running))(*given, **more)

        with replaced(owner, name, call):
            yield
