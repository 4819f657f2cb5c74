"""Certification cases of the row operators' and attention's gradients; attention's on the CPU.

Upstream gradients and saved tensors are adversarial like the forward's inputs. A norm's weight
gradient sums over rows, so its rows are not moved; attention's saved maximum and sum come from
its forward reference.

Legend: T rows, H width, D head size.
"""

from collections.abc import Iterator
from typing import Any

import torch

from . import adversarial
from .contract import Contract
from .reference.attention import attention
from .trial import Case

QUICK_SHAPES = ((1, 576), (7, 64), (40, 257), (130, 7))
FULL_SHAPES = (*QUICK_SHAPES, (3, 1), (17, 16), (33, 320), (64, 33), (257, 40), (512, 15))
SETTINGS = (  # lengths, heads, kv heads, D, window, softcap, sinks
    ((33, 1, 70), 4, 2, 16, 0, 0.0, False),
    ((40,), 3, 1, 32, 17, 5.0, True),
    ((90, 16), 6, 2, 64, 0, 0.0, False),
    ((49, 50), 2, 2, 80, 16, 0.0, True),
)

Key = tuple[int, ...]


def _shapes(quick: bool) -> tuple[tuple[int, int], ...]:
    return QUICK_SHAPES if quick else FULL_SHAPES


def _device(contract: Contract) -> str:
    return "cpu" if contract.device == "cpu" else "cuda"


def _label(shape: tuple[int, int]) -> str:
    return f"rows {shape[0]}, width {shape[1]}"


def rmsnorm_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    dtype, device = getattr(torch, contract.dtype), _device(contract)
    many = () if device == "cpu" else ((16_400, 33),)  # a GPU adds rows by blocks of 8,192
    for step, shape in enumerate((*_shapes(quick), *many)):
        base = seed * 1_000_003 + 10 * step
        dy, s, ds = (
            adversarial.rows(*shape, seed=base + i, dtype=dtype, device=device) for i in range(3)
        )
        weight = adversarial.rows(1, shape[1], seed=base + 3, dtype=dtype, kind="plain")[0]
        weight = weight.to(device)
        initial = adversarial.rows(1, shape[1], seed=base + 4)[0].to(device) if step % 2 else None
        arguments = (dy, s, weight, 1e-5, step % 3 == 1, ds if step % 2 == 0 else None, initial)
        yield Case(label=_label(shape), arguments=arguments)


def rmsnorm_wide_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for step, case in enumerate(rmsnorm_grad(contract, quick, seed, key)):
        dy, s, weight, eps, _, *rest = case.arguments
        weight = weight.float() / 3.0 if step % 2 else weight
        yield Case(label=case.label, arguments=(dy, s, weight, eps, *rest))


def activation_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for case in gated_grad(contract, quick, seed, key):
        yield Case(label=case.label, arguments=case.arguments[:2], rows=(0, 1))


def gated_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    dtype = getattr(torch, contract.dtype)
    for step, shape in enumerate(_shapes(quick)):
        base = seed * 1_000_003 + 10 * step
        tensors = tuple(
            adversarial.rows(
                *shape, seed=base + i, dtype=dtype, scale=0.3, device=_device(contract)
            )
            for i in range(3)
        )
        yield Case(label=_label(shape), arguments=tensors, rows=(0, 1, 2))


def attention_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for step, setting in enumerate(SETTINGS[:2] if quick else SETTINGS):
        lengths, heads, kv_heads, dim, window, softcap, has_sinks = setting
        base = seed * 1_000_003 + 10 * step
        q, k, v, dout = (
            adversarial.rows(sum(lengths), num * dim, seed=base + i, scale=0.3).view(-1, num, dim)
            for i, num in enumerate((heads, kv_heads, kv_heads, heads))
        )
        sinks = torch.linspace(-2.0, 2.0, heads) if has_sinks else None
        start = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
        options = (dim**-0.5, window, softcap, sinks)
        saved = _forward(q, k, v, lengths, start, options)
        yield Case(
            label=f"lengths {lengths}, heads {heads}/{kv_heads} of {dim}, window {window}",
            arguments=(dout, q, k, v, *saved, start, *options),
        )


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[int, ...],
    start: torch.Tensor,
    options: tuple[Any, ...],
) -> tuple[torch.Tensor, ...]:
    """Output, maximum and sum of the forward reference, each request in pages of its own."""
    pages = [-(-length // 16) for length in lengths]
    shape = (sum(pages), 16, *k.shape[1:])
    slots = torch.cat(
        [torch.arange(length) + 16 * sum(pages[:request]) for request, length in enumerate(lengths)]
    )
    k_rows, v_rows = k.new_zeros(shape), v.new_zeros(shape)
    k_rows.flatten(0, 1)[slots], v_rows.flatten(0, 1)[slots] = k, v
    first = torch.tensor(pages).cumsum(0) - torch.tensor(pages)
    table = (first[:, None] + torch.arange(max(pages))).to(torch.int32)
    k_pages = k_rows.permute(0, 2, 3, 1).contiguous()
    v_pages = v_rows.transpose(1, 2).contiguous()
    return attention(
        q, k_pages, v_pages, start, torch.tensor(lengths, dtype=torch.int32), table, *options
    )
