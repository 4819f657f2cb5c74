"""What each request asks of vLLM: sampling parameters, and how its answers are read back.

Logprobs come back as Python floats that are exact images of fp32; here they become bits again.
Nothing imports vLLM before parameters are made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....kernels.errors import CapabilityError
from ..base import Request
from ..schedules import prompt_length

Score = tuple[str, int, int, int]
"""(request, position, token, logprob bits)."""


@dataclass(frozen=True, slots=True)
class Given:
    """Sampling parameters, and what of the request they are about."""

    parameters: Any
    whole: bool = False
    samples: bool = False


def scoring(request: Request, *, whole: bool, prompt: bool) -> Given:
    """Whole: all tokens as a prompt. Otherwise the reply is forced, token by token."""
    from .forced import ARGUMENT

    reply = () if whole else request.tokens[prompt_length(request) :]
    arguments: dict[str, Any] = {"extra_args": {ARGUMENT: list(reply)}} if reply else {}
    parameters = _parameters(
        temperature=0.0,
        max_tokens=max(1, len(reply)),
        logprobs=0,
        prompt_logprobs=0 if prompt else None,
        **arguments,
    )
    return Given(parameters, whole=whole)


def sampling(request: Request, *, seeded: bool) -> Given:
    """Draw a reply. seeded: by the request's own seed, so that no other request matters."""
    given = request.sampling
    if given.temperature not in (0.0, 1.0):
        raise CapabilityError(
            f"request {request.id!r} has temperature {given.temperature}: vLLM's raw_logprobs are "
            "those at 1, and its division is in no contract; sample at 1, or greedily at 0"
        )
    parameters = _parameters(
        temperature=given.temperature,
        max_tokens=given.max_new_tokens,
        logprobs=0,
        seed=given.seed if seeded else None,
        stop_token_ids=list(given.stop_ids),
    )
    return Given(parameters, samples=True)


def _parameters(**settings: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **settings,
    )


def as_bits(logprob: float) -> int:
    """int32 view of a logprob that vLLM returned as a Python float, an exact image of fp32."""
    return int(np.float32(logprob).view(np.int32))


def prompt_scores(name: str, entries: Sequence[Any], tokens: Sequence[int]) -> list[Score]:
    return [
        (name, position, tokens[position], as_bits(entry[tokens[position]].logprob))
        for position, entry in enumerate(entries)
        if entry is not None
    ]


def grown(request: Request, reply: Sequence[int]) -> Request:
    known = len(request.tokens)
    return replace(
        request,
        tokens=(*request.tokens, *reply),
        sampled_mask=(request.sampled_mask or (False,) * known) + (True,) * len(reply),
        turns=(*request.turns, (known, known + len(reply))),
    )
