"""Gradients of row operators on the GPU in torch's elementwise operations: fp64 inside, fixed sums.

A formula is one function of rows. It gives the rows' gradients and, last, what every row adds to
the parameters' gradients; :func:`register_gradient` makes a contract of it:

    GRADIENT = register_gradient(skip, name="skip_grad", rows=3, chains=1, formula="...")

Everything is widened to fp64, exactly, and rounded once to the storage. ``tree_sum`` adds halves by
index (i with i + n / 2, for the n >= 2 that is a power of two), so zero rows at the end change
nothing. A parameter's gradient takes blocks of 8,192 rows, each a tree in fp64, rounded to fp32,
then added ascending to ``initial`` or 0: micro-batches that end on a block leave its bits alone.
The reference takes one row at a time and adds rows in a list.

Written to be right; a step moves 8 bytes a number several times (``benchmarks/recurrent.md``).

Legend: T rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..contract import Contract
from .register import register_gpu

BLOCK_ROWS = 8192
Formula = Callable[..., tuple[Tensor, ...]]


def wide(x: Tensor) -> Tensor:
    """fp64."""
    return x.double()


def sigmoid64(x: Tensor) -> Tensor:
    """fp64 ``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + torch.exp(-x))


def tree_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Sum over ``dim``: halves by index."""
    size = x.shape[dim]
    while size > 1:
        half = 1 << (size - 1).bit_length() - 1
        low, high = x.narrow(dim, 0, half), x.narrow(dim, half, size - half)
        if size < 2 * half:
            both = low.narrow(dim, 0, size - half) + high
            x = torch.cat((both, low.narrow(dim, size - half, 2 * half - size)), dim)
        else:
            x = low + high
        size = half
    return x.select(dim, 0) if size else x.sum(dim)


def chained(parts: Tensor, initial: Tensor | None) -> Tensor:
    """fp32 sum over rows ``parts [T, ...]`` fp64, continuing ``initial``."""
    shape, device = parts.shape[1:], parts.device
    total = torch.zeros(shape, device=device) if initial is None else initial
    for block in parts.split(BLOCK_ROWS):
        if len(block):
            total = total + tree_sum(block, 0).float()
    return total.clone() if total is initial else total


def whole(formula: Formula, chains: int, *arguments: Any) -> tuple[Tensor, ...]:
    """All rows at once."""
    cut = len(arguments) - chains
    found = formula(*arguments[:cut])
    kept = len(found) - chains
    sums = (chained(*each) for each in zip(found[kept:], arguments[cut:], strict=True))
    return *found[:kept], *sums


def row_by_row(formula: Formula, rows: int, chains: int, *arguments: Any) -> tuple[Tensor, ...]:
    """The definition: every row by itself; the first ``rows`` arguments have them."""
    cut = len(arguments) - chains
    count = len(arguments[0])
    single = [
        formula(*(each[t : t + 1] for each in arguments[:rows]), *arguments[rows:cut])
        for t in range(count)
    ]
    found = [torch.cat(each) for each in zip(*single, strict=True)]
    kept = len(found) - chains
    sums = (listed(*each) for each in zip(found[kept:], arguments[cut:], strict=True))
    return *found[:kept], *sums


def listed(parts: Tensor, initial: Tensor | None) -> Tensor:
    """The definition of :func:`chained`."""
    total = torch.zeros_like(parts[0], dtype=torch.float32) if initial is None else initial
    for first in range(0, len(parts), BLOCK_ROWS):
        rows = list(parts[first : first + BLOCK_ROWS])
        while len(rows) > 1:
            half = 1
            while 2 * half < len(rows):
                half *= 2
            for i in range(half, len(rows)):
                rows[i - half] = rows[i - half] + rows[i]
            rows = rows[:half]
        total = total + rows[0].float()
    return total


def register_gradient(
    formula: Formula, *, name: str, rows: int, chains: int, text: str, reference: str
) -> dict[torch.dtype, Contract]:
    """Contracts ``<name>.<dtype>.sm90.v1``. rows: leading arguments that have rows; chains: how
    many parameters, whose ``initial`` come last. reference: where :func:`row_by_row` of it lies."""
    op = name.split(".")[0]
    return register_gpu(
        {"torch": partial(whole, formula, chains)},
        name=name,
        storages=("float32", "bfloat16"),
        op=op,
        formula=text,
        order="columns: halves by index; rows: blocks of 8,192, halves by index, then ascending",
        rounding="fp64 inside; rows once to storage; parameters once to fp32 per block of rows",
        functions="exp, log1p and sqrt of CUDA in fp64",
        reference=reference,
    )
