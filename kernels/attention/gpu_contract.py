"""Attention's GPU contracts: the definition, and every phase as an implementation of it.

The definition computes each query row as a decode request of its own. Implementations compute the
same requests packed (Hopper's kernel, or the walk) and over shuffled pages, cut into chunks and
single rows that share a call or have one each: equality with the definition is phase invariance.

Legend: T query rows, H query heads, HK kv heads, D head size, B requests.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..gpu.register import register_gpu
from . import gpu_flash3 as flash3
from .batch import PAGE, AttentionBatch, KVCache
from .gpu import packed_forward, paged_forward, step_work
from .gpu_launch import backward
from .gpu_step import new_cache, write_kv_op
from .gpu_table import SPLIT, Shape

Settings = tuple[float, int, float, Tensor | None]


def _filled(k: Tensor, v: Tensor, starts: list[int]) -> tuple[KVCache, Tensor]:
    """A cache with every request's keys in shuffled pages, NaN elsewhere; its block table."""
    counts = [-(-(b - a) // PAGE) for a, b in pairwise(starts)]
    most, total = max(1, *counts), sum(counts)
    cache = new_cache(total + 1, k.shape[1], k.shape[2], dtype=k.dtype, device=k.device)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(total)).tolist()
    table = torch.full((len(counts), most), total, dtype=torch.int32)
    slots: list[Tensor] = []
    for request, count in enumerate(counts):
        pages = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        table[request, :count] = pages
        at = torch.arange(starts[request + 1] - starts[request])
        slots.append(pages.long()[at // PAGE] * PAGE + at % PAGE)
    write_kv_op(cache.k, cache.v, k, v, torch.cat(slots).to(k.device))
    return cache, table.to(k.device)


def _pieces(length: int, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
    edges = [0, *(cut for cut in cuts if cut < length), length]
    return [(a, b) for a, b in pairwise(edges) if b > a]


def over_pages(
    cuts: tuple[int, ...],
    alone: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    attend: Callable[..., tuple[Tensor, Tensor]] = paged_forward,
) -> Tensor:
    """Every request cut at ``cuts``, all pieces in one call over pages, or each ``alone``."""
    starts = query_start.tolist()
    cache, table = _filled(k, v, starts)
    spans = [
        (request, starts[request], first, last)
        for request in range(len(starts) - 1)
        for first, last in _pieces(starts[request + 1] - starts[request], cuts)
    ]
    out = torch.empty_like(q)
    settings: Settings = (scale, window, softcap, sinks)
    for group in [[span] for span in spans] if alone else [spans]:
        rows = torch.cat([torch.arange(base + a, base + b) for _, base, a, b in group])
        rows = rows.to(q.device)
        counts = torch.tensor([0] + [b - a for _, _, a, b in group], device=q.device)
        batch = AttentionBatch(
            counts.cumsum(0).to(torch.int32),
            torch.tensor([b for _, _, _, b in group], dtype=torch.int32, device=q.device),
            table[[request for request, *_ in group]].contiguous(),
            rows,
        )
        index = (batch.query_start, batch.kv_len, batch.block_table)
        work = step_work(q, cache, batch, window)
        out[rows] = attend(q[rows], cache.k, cache.v, index, work, settings)[0]
    return out


def packed(
    specialised: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Contiguous keys, as the trainer has them."""
    settings: Settings = (scale, window, softcap, sinks)
    return packed_forward(q, k, v, query_start, settings, specialised=specialised)[0]


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition on this architecture: each query row decoded over pages."""
    every = tuple(range(int(query_start.diff().max())))
    return over_pages(every, False, q, k, v, query_start, scale, window, softcap, sinks)


def reference_grad(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    query_start: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The definition: every request alone, in the smallest tiles."""
    shape = Shape(16, 4, 1, keys=16)
    parts: list[tuple[Tensor, ...]] = []
    for a, b in pairwise(query_start.tolist()):
        start = torch.tensor([0, b - a], dtype=torch.int32, device=q.device)
        one, two, three, four, five = (each[a:b].contiguous() for each in (do, q, k, v, o))
        tensors = (one, two, three, four, five, lse[:, a:b].contiguous(), start)
        parts.append(backward(*tensors, scale, window, softcap, shape=shape))
    dq, dk, dv = (torch.cat([part[i] for part in parts]) for i in range(3))
    return dq, dk, dv, torch.cat([part[3] for part in parts], dim=1)


CONTRACTS = register_gpu(
    {
        "gluon-hopper": partial(packed, True),
        "triton-walk": partial(packed, False),
        "triton-paged": partial(over_pages, (1, 40, 41, 1000), False),
        "triton-alone": partial(over_pages, (3, 999, 1000), True),
    },
    name=f"attention.split{SPLIT}",
    op="attention",
    formula="o = softmax(scale q k) v, causal, with window, softcap and sinks",
    order=f"blocks of 128 keys (64 above head size 128, 32 in fp32) and chunks of {SPLIT} on the "
    "absolute grid, ascending",
    rounding="fp32 scores and sums; p rounded to the dtype for both the row sum and p.v",
    functions="fma, ex2.approx.ftz, lg2.approx, IEEE division, Hopper mma (fp32: chains of fma)",
    reference="zeromismatch.kernels.attention.gpu_contract:reference",
)


def flash3_packed(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float, *plain: Any
) -> Tensor:
    """The library's kernel over contiguous keys, as the trainer has them."""
    return flash3.packed_forward(q, k, v, query_start, (scale, 0, 0.0, None))[0]


def reference_flash3(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, *settings: Any
) -> Tensor:
    """The adopted definition: each query row decoded over pages by the library's kernel."""
    every = tuple(range(int(query_start.diff().max())))
    tensors = (q, k, v, query_start)
    return over_pages(every, False, *tensors, *settings, attend=flash3.paged_forward)


FLASH3 = register_gpu(
    {
        "flash3-packed": flash3_packed,
        "flash3-paged": partial(over_pages, (1, 40, 41, 1000), False, attend=flash3.paged_forward),
        "flash3-alone": partial(over_pages, (3, 999, 1000), True, attend=flash3.paged_forward),
    },
    name="attention.flash3",
    storages=("bfloat16", "float16"),
    missing=flash3.missing,
    op="attention",
    formula="o = softmax(scale q k) v, causal, head size 128",
    order=f"FlashAttention 3 of vLLM {flash3.RELEASE}, one split: blocks of {flash3.TILE} keys on "
    "the absolute grid, descending",
    rounding="fp32 scores and sums; p rounded to the dtype for p.v",
    functions="the library's",
    reference="zeromismatch.kernels.attention.gpu_contract:reference_flash3",
)
GRADIENTS = register_gpu(
    {"triton": backward},
    name="attention_grad.passes2",
    op="attention_grad",
    formula="p from lse; ds = p (do v - delta); dq = scale ds k, dk = scale ds q, dv = p do",
    order="dq: keys ascending; dk, dv: heads of the group, then queries, ascending; one "
    "accumulator each",
    rounding="fp32 inside; p and ds rounded to the dtype for the products; one rounding at the end",
    functions="fma, ex2.approx.ftz, Hopper mma (fp32: chains of fma)",
    reference="zeromismatch.kernels.attention.gpu_contract:reference_grad",
)
