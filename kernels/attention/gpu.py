"""Attention on the GPU: one contract for prefill, any chunking, decode, prefix hit and packed
training.

Contract ``attention.split1024.<dtype>.sm90.v1`` (order in :mod:`.gpu_kernels`): keys in fixed
blocks on the request's absolute grid, chunks of SPLIT positions merged ascending. A row's bits
depend on its query and its own keys. Queries of requests with few new tokens are split over chunks
(decode), the others walk (prefill); which is schedule, chosen per request on the device, so a
captured graph serves any mixture.

Cache layout: ``k, v [num_pages, PAGE, HK, D]``. Head sizes 64, 80, 96, 128, 256; windows, soft-
capping and sinks. The backward (packed form) runs in two passes without atomics. Memory off the
request's keys, NaN included, never reaches a result.

Legend: T query rows, H query heads, HK kv heads, G = H / HK, D head size, B requests.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import Contract, Implementation, register_contract, register_implementation
from ..errors import ContractError
from ..gpu.device import HALF_DTYPES, NAMES, aligned, missing, require
from .batch import PAGE, AttentionBatch
from .gpu_launch import LOG2E, backward, hopper, hopper_serves, split, walk
from .gpu_step import GpuCache, Work, new_cache, read_kv, schedule, write_kv, write_kv_op
from .gpu_table import HEAD_SIZES, SPLIT

__all__ = [
    "GpuCache",
    "Work",
    "backward",
    "new_cache",
    "packed_attention",
    "packed_attention_op",
    "paged_attention",
    "paged_attention_op",
    "read_kv",
    "schedule",
    "write_kv",
    "write_kv_op",
]


@torch.library.custom_op("zeromismatch::paged_attention", mutates_args=())
def paged_attention_op(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    kv_len: Tensor,
    block_table: Tensor,
    walk_start: Tensor,
    split_start: Tensor,
    tiles: int,
    chunks: int,
    few: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(o [T, H, D], lse [H, T])."""
    q = aligned(q)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[1], q.shape[0], device=q.device)
    if not q.numel():
        return o, lse
    index = (query_start, kv_len, block_table)
    settings = (scale, window, softcap, sinks)
    if tiles:
        walk(q, k_cache, v_cache, o, lse, index, None, walk_start, tiles, settings)
    if chunks:
        split(q, k_cache, v_cache, o, lse, index, split_start, chunks, few, settings)
    return o, lse


@paged_attention_op.register_fake
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def _check(q: Tensor, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    require("attention", q, dtypes=HALF_DTYPES)
    if q.dim() != 3 or q.shape[2] != head_dim or q.dtype != dtype or head_dim not in HEAD_SIZES:
        raise ContractError(
            f"q is {q.dtype} {tuple(q.shape)} for {dtype} keys of head size {head_dim}; pass "
            f"q [T, H, D] in the "
            f"same dtype, with a head size of {HEAD_SIZES}"
        )
    if kv_heads == 0 or q.shape[1] % kv_heads:
        raise ContractError(
            f"{q.shape[1]} query heads over {kv_heads} kv heads are no whole groups; check "
            f"the model's config"
        )


def _settings(
    q: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> tuple[float, int, float, Tensor | None]:
    if (
        not scale > 0
        or (window is not None and window < 1)
        or (softcap is not None and not 0 < softcap < math.inf)
    ):
        raise ContractError(
            f"scale {scale}, window {window}, softcap {softcap}: scale and softcap must be "
            f"positive and a window at "
            "least 1; pass None for no window or cap"
        )
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ContractError(f"sinks {tuple(sinks.shape)} do not fit; pass one per query head")
    return (
        float(scale),
        window or 0,
        float(softcap or 0.0),
        None if sinks is None else sinks.float().contiguous(),
    )


def paged_attention(
    q: Tensor,
    cache: GpuCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    work: Work | None = None,
) -> Tensor:
    """Attend ``q [T, H, D]`` over keys already written to the cache; no autograd.

    work: from :func:`schedule`, once per step; made here when absent.
    """
    _check(q, cache.kv_heads, cache.head_dim, cache.k.dtype)
    scale, window, softcap, sinks = _settings(q, scale, window, softcap, sinks)
    work = work or schedule(
        batch.query_start,
        batch.kv_len,
        tokens=q.shape[0],
        group=q.shape[1] // cache.kv_heads,
        head_dim=q.shape[2],
        max_kv=batch.block_table.shape[1] * PAGE,
        window=window,
    )
    return paged_attention_op(
        q,
        cache.k,
        cache.v,
        batch.query_start,
        batch.kv_len,
        batch.block_table,
        work.walk_start,
        work.split_start,
        work.tiles,
        work.chunks,
        work.few,
        scale,
        window,
        softcap,
        sinks,
    )[0]


@torch.library.custom_op("zeromismatch::packed_attention", mutates_args=())
def packed_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(o [T, H, D], lse [H, T]): the walk over contiguous keys."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[1], q.shape[0], device=q.device)
    if not q.numel():
        return o, lse
    kv_len = query_start.diff()
    work = schedule(
        query_start,
        kv_len,
        tokens=q.shape[0],
        group=q.shape[1] // k.shape[1],
        head_dim=q.shape[2],
        max_kv=q.shape[0],
        window=window,
        split=False,
    )
    if hopper_serves(q, window, softcap, sinks):
        hopper(q, k, v, o, lse, query_start, work, scale)
        return o, lse
    table = query_start[None]
    walk(
        q,
        k,
        v,
        o,
        lse,
        (query_start, kv_len, table),
        query_start,
        work.walk_start,
        work.tiles,
        (scale, window, softcap, sinks),
    )
    return o, lse


@packed_attention_op.register_fake
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        query_start: Tensor,
        settings: tuple[float, int, float],
    ) -> Tensor:
        o, lse = packed_attention_op(q, k, v, query_start, *settings, sinks)
        ctx.save_for_backward(q, k, v, o, lse, sinks, query_start)
        ctx.settings = settings
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        q, k, v, o, lse, sinks, query_start = ctx.saved_tensors
        dq, dk, dv, delta = backward(q, k, v, o, lse, do, query_start, *ctx.settings)
        d_sinks = None
        if sinks is not None:
            d_sinks = -(torch.exp2(sinks[:, None] * LOG2E - lse) * delta).sum(1)
        return dq, dk, dv, d_sinks, None, None


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Whole requests back to back, ``query_start`` int32 [B + 1]; differentiable in all."""
    _check(q, k.shape[1], k.shape[2], k.dtype)
    if k.shape != v.shape or k.shape[0] != q.shape[0]:
        raise ContractError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit q {tuple(q.shape)}; "
            "pass both as [T, HK, D]"
        )
    scale, window, softcap, sinks = _settings(q, scale, window, softcap, sinks)
    return _Packed.apply(q, k, v, sinks, query_start.to(torch.int32), (scale, window, softcap))


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
    """The definition on this architecture: each query row alone, as the only row of a call."""
    rows = []
    for start, stop in zip(query_start.tolist()[:-1], query_start.tolist()[1:], strict=True):
        pages = -(-(stop - start) // PAGE)
        cache = new_cache(max(1, pages), k.shape[1], k.shape[2], dtype=k.dtype, device=k.device)
        slot = torch.arange(stop - start, device=q.device)
        write_kv(cache, k[start:stop], v[start:stop], slot)
        table = torch.arange(max(1, pages), dtype=torch.int32, device=q.device)[None]
        for row in range(start, stop):
            one = torch.tensor([0, 1], dtype=torch.int32, device=q.device)
            length = torch.tensor([row - start + 1], dtype=torch.int32, device=q.device)
            batch = AttentionBatch(one, length, table, slot[row - start : row - start + 1])
            rows.append(
                paged_attention(
                    q[row : row + 1],
                    cache,
                    batch,
                    scale=scale,
                    window=window or None,
                    softcap=softcap or None,
                    sinks=sinks,
                )
            )
    return torch.cat(rows) if rows else torch.empty_like(q)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    return packed_attention_op(q, k, v, query_start, scale, window, softcap, sinks)[0]


for _dtype in HALF_DTYPES:
    register_contract(
        Contract(
            id=f"attention.split{SPLIT}.{NAMES[_dtype]}.sm90.v1",
            op="attention",
            dtype=NAMES[_dtype],
            device="sm90",
            formula="o = softmax(scale q k) v, causal, with window, softcap and sinks",
            order=(
                f"blocks of 128 keys (64 above head size 128) and chunks of {SPLIT} on "
                f"the absolute grid, ascending"
            ),
            rounding="fp32 scores and sums; p rounded to the dtype for both the row sum and p.v",
            functions="fma, ex2.approx.ftz, lg2.approx, IEEE division, Hopper mma",
            reference="zeromismatch.kernels.attention.gpu:reference",
            gradient_rtol=2e-2,
        )
    )
    register_implementation(
        Implementation(
            contract=f"attention.split{SPLIT}.{NAMES[_dtype]}.sm90.v1",
            name="triton-walk",
            run=_run,
            missing=missing,
        )
    )
