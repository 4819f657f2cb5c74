"""Certification cases of routing, grouped linear layers and combining.

Logits hold ties (rounded values, whole rows of one value), loads hold experts without a token and
one with all of them. Row variations of :mod:`.trial` then move tokens to other places, leave one
alone and put NaN beside it.

Legend: T tokens, E experts, K slots, H width, I inputs, N outputs of an expert.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from . import adversarial
from .certify import register_cases
from .contract import Contract
from .trial import Case

QUICK_TOKENS = (1, 7, 40, 130)
FULL_TOKENS = (*QUICK_TOKENS, 2, 3, 16, 17, 33, 64, 65, 127, 129, 257)
ROUTINGS = (  # experts, top k, groups, groups kept, sigmoid
    (16, 4, 1, 1, False),
    (16, 4, 4, 2, True),
    (17, 1, 1, 1, False),
    (24, 8, 8, 4, True),
    (128, 8, 1, 1, False),
)
EXPERTS = ((16, 4, 200, 33), (4, 2, 129, 16), (8, 8, 37, 130), (16, 1, 256, 17))  # E, K, I, N

Key = tuple[int, ...]


def _device(contract: Contract) -> str:
    return "cpu" if contract.device == "cpu" else "cuda"


def _rows(contract: Contract, tokens: int, width: int, seed: int, scale: float = 1.0) -> Tensor:
    dtype = getattr(torch, contract.dtype)
    return adversarial.rows(
        tokens, width, seed=seed, dtype=dtype, device=_device(contract), scale=scale
    )


def _logits(contract: Contract, tokens: int, experts: int, seed: int) -> Tensor:
    logits = adversarial.rows(tokens, experts, seed=seed, kind="plain") * 2.0
    logits[1::3] = logits[1::3].round()
    logits[2::7] = 0.5
    return logits.to(_device(contract))


def chosen(tokens: int, experts: int, top_k: int, seed: int) -> Tensor:
    """[T, K] without repeats; some experts get no token, one gets (nearly) all."""
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.rand(tokens, experts, generator=generator)
    wanted[:, 1] += 2.0
    if top_k < experts - 1:
        wanted[:, experts - 1] -= 2.0
    return wanted.argsort(dim=1, descending=True)[:, :top_k].contiguous()


def _steps(quick: bool, seed: int) -> Iterator[tuple[int, int, int]]:
    for step, tokens in enumerate(QUICK_TOKENS if quick else FULL_TOKENS):
        yield step, tokens, seed * 1_000_003 + 10 * step


def router(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for step, tokens, base in _steps(quick, seed):
        experts, width = ROUTINGS[step % len(ROUTINGS)][0], (200, 37, 257, 360)[step % 4]
        arguments = (
            _rows(contract, tokens, width, base),
            _rows(contract, experts, width, base + 1, 0.1),
            None,
        )
        yield Case(label=f"tokens {tokens}, {width} to {experts}", arguments=arguments, rows=(0,))


def topk(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for step, tokens, base in _steps(quick, seed):
        experts, top_k, groups, kept, sigmoid = ROUTINGS[step % len(ROUTINGS)]
        # Few different corrections, so that whole groups tie where a token's logits do.
        bias = (_logits(contract, 1, experts, base + 1)[0] * 0.5).round() / 4 if sigmoid else None
        arguments = (
            _logits(contract, tokens, experts, base), bias, top_k, groups, kept, sigmoid,
        )  # fmt: skip
        label = f"tokens {tokens}, {top_k} of {experts}, groups {kept} of {groups}"
        yield Case(label=label, arguments=arguments, rows=(0,))


def topk_weights(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for case in topk_weights_grad(contract, quick, seed, key):
        yield Case(label=case.label, arguments=case.arguments[1:], rows=(0, 1))


def topk_weights_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for step, tokens, base in _steps(quick, seed):
        experts, top_k, _, _, sigmoid = ROUTINGS[step % len(ROUTINGS)]
        options = (sigmoid, step % 2 == 0, 1e-20 if sigmoid else 0.0, 2.5 if sigmoid else 1.0)
        arguments = (
            _rows(contract, tokens, top_k, base + 2),
            _logits(contract, tokens, experts, base),
            chosen(tokens, experts, top_k, base + 1).to(_device(contract)),
            *options,
        )
        label = f"tokens {tokens}, {top_k} of {experts}"
        yield Case(label=label, arguments=arguments, rows=(0, 1, 2))


def grouped_linear(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for case in grouped_linear_grad(contract, quick, seed, key):
        yield Case(label=case.label, arguments=case.arguments[1:4], rows=(0, 1))


def grouped_linear_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    few_and_many = [(step, tokens, seed + step) for step, tokens in ((0, 2), (4, 97))]
    for step, tokens, base in (*_steps(quick, seed), *few_and_many):
        experts, top_k, inputs, outputs = EXPERTS[step % len(EXPERTS)]
        by_slot = step % 2 == 1
        x = _rows(contract, tokens * (top_k if by_slot else 1), inputs, base)
        start = _rows(contract, experts * outputs, inputs, base + 4).float()
        arguments = (
            _rows(contract, tokens * top_k, outputs, base + 1).unflatten(0, (tokens, top_k)),
            x.unflatten(0, (tokens, top_k)) if by_slot else x,
            chosen(tokens, experts, top_k, base + 2).to(_device(contract)),
            _rows(contract, experts * outputs, inputs, base + 3, 0.1).unflatten(
                0, (experts, outputs)
            ),
            start.unflatten(0, (experts, outputs)) if step % 3 == 0 else None,
        )
        label = f"tokens {tokens}, {top_k} of {experts} experts, {inputs} to {outputs}"
        yield Case(label=label, arguments=arguments)


def combine(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for case in combine_grad(contract, quick, seed, key):
        yield Case(label=case.label, arguments=case.arguments[1:], rows=(0, 1))


def combine_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for step, tokens, base in _steps(quick, seed):
        top_k, width = (4, 1, 8, 2)[step % 4], (360, 33, 16, 257)[step % 4]
        weights = adversarial.rows(tokens, top_k, seed=base + 2, kind="plain")
        arguments = (
            _rows(contract, tokens, width, base),
            _rows(contract, tokens * top_k, width, base + 1).unflatten(0, (tokens, top_k)),
            weights.to(_device(contract)),
        )
        yield Case(label=f"tokens {tokens}, {top_k} slots of {width}", arguments=arguments,
                   rows=(0, 1, 2))  # fmt: skip


for _cases in (
    router, topk, topk_weights, topk_weights_grad, grouped_linear, grouped_linear_grad, combine,
    combine_grad,
):  # fmt: skip
    register_cases(_cases.__name__, _cases)
