"""Attention on the GPU: one contract for prefill, any chunking, decode, prefix hit and packed
training.

Contract ``attention.split1024.<dtype>.sm90.v1`` (order in :mod:`.gpu_kernels`): keys in fixed
blocks on the request's absolute grid, chunks of SPLIT positions merged ascending. A row's bits
depend on its query and its own keys. Queries of requests with few new tokens are split over chunks
(decode), the others walk (prefill); which is schedule, chosen per request on the device, so a
captured graph serves any mixture.

Head sizes up to 256; windows, softcapping and sinks. The backward (packed form) runs in two passes
without atomics. Memory off the request's keys, NaN included, never reaches a result.
:mod:`.gpu_contract` holds the contracts and their references.

Legend: T query rows, H query heads, HK kv heads, G = H / HK, D head size, B requests.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..dispatch import choose, first_admitted
from ..errors import ContractError
from ..gpu.device import NAMES, aligned, require
from ..gpu.operator import gpu_operator
from ..gpu.register import ARCHITECTURE
from ..taps import tapped
from . import gpu_flash3 as flash3
from .batch import PAGE, AttentionBatch, KVCache
from .gpu_launch import LOG2E, backward, hopper, hopper_serves, walk
from .gpu_split import split
from .gpu_step import (
    Work,
    new_cache,
    read_kv,
    read_slots,
    schedule,
    walk_tile,
    write_kv,
    write_kv_op,
)
from .gpu_table import MAX_HEAD_DIM, SPLIT

__all__ = [
    "Work",
    "backward",
    "contract_id",
    "new_cache",
    "packed_attention",
    "packed_attention_op",
    "packed_forward",
    "paged_attention",
    "paged_attention_op",
    "paged_forward",
    "read_kv",
    "read_slots",
    "schedule",
    "walk_tile",
    "write_kv",
    "write_kv_op",
]


def contract_id(dtype: torch.dtype, op: str = "attention") -> str:
    """The contract of ``attention`` or ``attention_grad`` at a dtype."""
    order = f"split{SPLIT}" if op == "attention" else "passes2"
    return f"{op}.{order}.{NAMES[dtype]}.{ARCHITECTURE}.v1"


def _certified(dtype: torch.dtype, *names: str) -> str:
    """The first of ``names`` that is proved here."""
    return first_admitted(contract_id(dtype), *names)


def paged_forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index: tuple[Tensor, Tensor, Tensor],
    work: Work,
    settings: tuple[float, int, float, Tensor | None],
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(o [T, H, D], lse [H, T]); index: query_start, kv_len, block_table. out: contiguous o."""
    q = aligned(q)
    o = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[1], q.shape[0], device=q.device)
    if q.numel() and work.tiles:
        walk(q, k_cache, v_cache, o, lse, index, None, work.walk_start, work.tiles, settings)
    if q.numel() and work.chunks:
        few, chunks = work.few, work.chunks
        split(q, k_cache, v_cache, o, lse, index, work.split_start, chunks, few, settings)
    return o, lse


def packed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    settings: tuple[float, int, float, Tensor | None],
    *,
    specialised: bool,
) -> tuple[Tensor, Tensor]:
    """(o [T, H, D], lse [H, T]) over contiguous keys; specialised: Hopper's kernel where it can."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[1], q.shape[0], device=q.device)
    if not q.numel():
        return o, lse
    kv_len = query_start.diff()
    scale, window, softcap, sinks = settings
    work = schedule(
        query_start,
        kv_len,
        tokens=q.shape[0],
        group=q.shape[1] // k.shape[1],
        tile=walk_tile(q),
        max_kv=q.shape[0],
        window=window,
        split=False,
    )
    if specialised and hopper_serves(q, window, softcap, sinks):
        hopper(q, k, v, o, lse, query_start, work, scale)
        return o, lse
    index = (query_start, kv_len, query_start[None])
    walk(q, k, v, o, lse, index, query_start, work.walk_start, work.tiles, settings)
    return o, lse


def _paged(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """:func:`paged_forward` by certified kernels, seen by a tap."""
    _certified(q.dtype, "triton-paged")
    _certified(q.dtype, "triton-alone")
    o, lse = paged_forward(q, *arguments)
    return tapped("attention", o), lse


@gpu_operator("zeromismatch::paged_attention")
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
    work = Work(walk_start, split_start, tiles, chunks, few)
    index = (query_start, kv_len, block_table)
    return _paged(q, k_cache, v_cache, index, work, (scale, window, softcap, sinks))


@paged_attention_op.register_fake
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@gpu_operator("zeromismatch::packed_attention")
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
    """(o [T, H, D], lse [H, T])."""
    name = _certified(q.dtype, "gluon-hopper", "triton-walk")
    settings = (scale, window, softcap, sinks)
    specialised = name == "gluon-hopper"
    o, lse = packed_forward(q, k, v, query_start, settings, specialised=specialised)
    return tapped("attention", o), lse


@packed_attention_op.register_fake
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@gpu_operator("zeromismatch::packed_attention_grad")
def packed_attention_grad_op(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    query_start: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, delta [H, T])."""
    run = choose(contract_id(q.dtype, "attention_grad")).run
    return run(do, q, k, v, o, lse, query_start, scale, window, softcap)


@packed_attention_grad_op.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(each.new_empty(each.shape) for each in (q, k, v, lse))  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, query_start, *ctx.settings, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, query_start, sinks)


def _grad(ctx: Any, do: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, o, lse, query_start, sinks = ctx.saved_tensors
    dq, dk, dv, delta = packed_attention_grad_op(do, q, k, v, o, lse, query_start, *ctx.settings)
    d_sinks = None
    if sinks is not None:
        d_sinks = -(torch.exp2(sinks[:, None] * LOG2E - lse) * delta).sum(1)
    return dq, dk, dv, None, None, None, None, d_sinks


packed_attention_op.register_autograd(_grad, setup_context=_keep)


def _keep_flash3(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _grad_flash3(ctx: Any, do: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, start, o, lse = ctx.saved_tensors
    return *packed_attention_grad_op(do, q, k, v, o, lse, start, ctx.scale, 0, 0.0)[:3], None, None


flash3.packed_op.register_autograd(_grad_flash3, setup_context=_keep_flash3)


def _adopted(contract: str | None, dtype: torch.dtype) -> bool:
    """Whether a plan's contract is the adopted one; None is our own."""
    known = (contract_id(dtype), flash3.contract_id(dtype))
    if contract not in (None, *known):
        raise ContractError(
            f"no attention contract {contract} for {dtype} on this GPU; name one of "
            f"{', '.join(known)}"
        )
    return contract == known[1]


def _check(q: Tensor, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    require("attention", q)
    if q.dim() != 3 or q.shape[2] != head_dim or q.dtype != dtype or head_dim > MAX_HEAD_DIM:
        raise ContractError(
            f"q is {q.dtype} {tuple(q.shape)} for {dtype} keys of head size {head_dim}; pass "
            f"q [T, H, D] in the same dtype, with a head size up to {MAX_HEAD_DIM}"
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
            "positive and a window at least 1; pass None for no window or cap"
        )
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ContractError(f"sinks {tuple(sinks.shape)} do not fit; pass one per query head")
    return (
        float(scale),
        window or 0,
        float(softcap or 0.0),
        None if sinks is None else sinks.float().contiguous(),
    )


def step_work(q: Tensor, cache: KVCache, batch: AttentionBatch, window: int) -> Work:
    """The work lists of one step, made once and kept with the batch for all layers."""
    key = (walk_tile(q), q.shape[1] // cache.kv_heads, window)
    if key not in batch.derived:
        batch.derived[key] = schedule(
            batch.query_start,
            batch.kv_len,
            tokens=q.shape[0],
            group=key[1],
            tile=key[0],
            max_kv=batch.block_table.shape[1] * PAGE,
            window=window,
        )
    return batch.derived[key]


def paged_attention(
    q: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    work: Work | None = None,
    contract: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend ``q [T, H, D]`` over keys already written to the cache; no autograd.

    work: from :func:`schedule`; by default made at the batch's first layer and kept with it.
    contract: None is our own; :mod:`.gpu_flash3` has another. out: contiguous, is returned.
    """
    _check(q, cache.kv_heads, cache.head_dim, cache.k.dtype)
    scale, window, softcap, sinks = _settings(q, scale, window, softcap, sinks)
    work = work or step_work(q, cache, batch, window)
    index = (batch.query_start, batch.kv_len, batch.block_table)
    if _adopted(contract, q.dtype):
        flash3.check(q, (scale, window, softcap, sinks))
        o = flash3.paged_op(q.detach(), cache.k, cache.v, *index, work.tiles, work.few, scale)
        return o if out is None else out.copy_(o)
    if out is not None:
        settings = (scale, window, softcap, sinks)
        return _paged(q, cache.k, cache.v, index, work, settings, out)[0]
    return paged_attention_op(
        q.detach(),
        cache.k,
        cache.v,
        *index,
        work.walk_start,
        work.split_start,
        work.tiles,
        work.chunks,
        work.few,
        scale,
        window,
        softcap,
        None if sinks is None else sinks.detach(),
    )[0]


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
    contract: str | None = None,
) -> Tensor:
    """Whole requests back to back, ``query_start`` int32 [B + 1]; differentiable in all."""
    _check(q, k.shape[1], k.shape[2], k.dtype)
    require("attention", q, k, v, query_start, sinks)
    if k.shape != v.shape or k.dtype != v.dtype or k.shape[0] != q.shape[0]:
        raise ContractError(
            f"k {k.dtype} {tuple(k.shape)} and v {v.dtype} {tuple(v.shape)} do not fit q "
            f"{tuple(q.shape)}; pass both as [T, HK, D]"
        )
    scale, window, softcap, sinks = _settings(q, scale, window, softcap, sinks)
    start = query_start.to(torch.int32).contiguous()
    if _adopted(contract, q.dtype):
        flash3.check(q, (scale, window, softcap, sinks))
        return flash3.packed_op(q, k, v, start, scale)[0]
    return packed_attention_op(q, k, v, start, scale, window, softcap, sinks)[0]
