"""Causal grouped-query attention over pages of 16 keys: one set of bits for every schedule.

A query row walks the pages of absolute positions 0..15, 16..31, ... in order, with an online
softmax whose every step is written down, and reads nothing but its own keys. So decode, whole
prefill, any chunking, mixed batches, any placement of pages and the trainer's packed forward give
the same bits, and what lies in unused slots (another request's values, NaN) never reaches a
result. Stock SDPA on a CPU does not: decode differs from prefill in nearly every fp32 row.

Sliding windows, logit soft-capping and attention sinks are part of the contract. The backward of
the packed form runs in two passes without atomics, p recomputed from the saved maximum and sum:
dQ per query row, dK and dV per key, each one chain in a fixed order.
``kernels/reference/attention.py`` is the definition of the forward; ``pytest
tests/kernels/attention`` exercises both.

Head sizes up to 256; one that is no multiple of 16 is padded with zeros, which changes no bit.

CUDA tensors go to :mod:`.gpu`, whose contract has the same properties and other bits.

Legend: T query rows, H query heads, HK kv heads, D head size, B requests, P pages.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ..cpu.register import covering
from ..dispatch import choose
from ..errors import ContractError
from . import cpu, gpu
from . import gpu_contract as gpu_contract  # registers the contracts
from .batch import PAGE, AttentionBatch, KVCache, packed_batch

__all__ = [
    "PAGE",
    "AttentionBatch",
    "KVCache",
    "new_cache",
    "packed_attention",
    "packed_batch",
    "paged_attention",
    "read_kv",
    "read_slots",
    "write_kv",
]


def new_cache(
    num_pages: int,
    kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
) -> KVCache:
    """An uninitialised cache of ``num_pages`` pages of 16 positions: fp32, bf16; fp16 on a GPU."""
    if torch.device(device).type == "cuda":
        return gpu.new_cache(num_pages, kv_heads, head_dim, dtype=dtype, device=device)
    if torch.device(device).type != "cpu" or dtype not in cpu.CONTRACTS:
        raise ContractError(f"no cache for {dtype} on {device}; use float32 or bfloat16 on the CPU")
    if not 0 < head_dim <= cpu.MAX_HEAD_DIM:
        raise ContractError(
            f"head size {head_dim} is not between 1 and {cpu.MAX_HEAD_DIM}; no contract covers it, "
            "keep this model's attention stock"
        )
    k, v = cpu.new_pages(num_pages, kv_heads, -(-head_dim // PAGE) * PAGE, dtype)
    return KVCache(k, v, kv_heads, head_dim)


def write_kv(cache: KVCache, k: Tensor, v: Tensor, slot: Tensor) -> None:
    """Copy ``k, v [T, HK, D]`` bit for bit into distinct slots ``[T]`` (page * 16 + offset).

    On a GPU, negative slots are padding: skipped.
    """
    if cache.k.is_cuda:
        gpu.write_kv(cache, k, v, slot)
        return
    wanted = (slot.numel(), cache.kv_heads, cache.head_dim)
    if k.shape != wanted or v.shape != wanted or {k.dtype, v.dtype} != {cache.k.dtype}:
        raise ContractError(
            f"k {k.dtype} {tuple(k.shape)} and v {v.dtype} {tuple(v.shape)} do not fit a cache of "
            f"{cache.k.dtype}; pass both as {wanted}"
        )
    if slot.dtype != torch.int64 or slot.dim() != 1:
        raise ContractError(f"slot is {slot.dtype} {tuple(slot.shape)}; pass int64 [T]")
    lowest, highest = (int(slot.min()), int(slot.max())) if slot.numel() else (0, -1)
    if lowest < 0 or highest >= cache.num_pages * PAGE:
        raise ContractError(
            f"slots reach from {lowest} to {highest} in a cache of {cache.num_pages * PAGE}; "
            "allocate pages first"
        )
    cpu.write_pages(cache.k, cache.v, _rows(k), _rows(v), slot.contiguous())


def read_kv(cache: KVCache, block_table_row: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """``k, v [length, HK, D]`` of the request whose pages are listed in ``block_table_row``."""
    if cache.k.is_cuda:
        return gpu.read_kv(cache, block_table_row, length)
    pages = block_table_row[: -(-length // PAGE)].long()
    k = cache.k[pages].permute(0, 3, 1, 2).flatten(0, 1)
    v = cache.v[pages].transpose(1, 2).flatten(0, 1)
    return (
        k[:length, :, : cache.head_dim].contiguous(),
        v[:length, :, : cache.head_dim].contiguous(),
    )


def read_slots(cache: KVCache, slot: Tensor) -> tuple[Tensor, Tensor]:
    """``k, v [T, HK, D]`` as the cache holds them in slots ``[T]`` (page * 16 + offset)."""
    if cache.k.is_cuda:
        return gpu.read_slots(cache, slot)
    page, offset = slot // PAGE, slot % PAGE
    return cache.k[page, :, : cache.head_dim, offset], cache.v[page, :, offset, : cache.head_dim]


def paged_attention(
    q: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    contract: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend ``q [T, H, D]`` over keys already written to the cache; ``[T, H, D]``, no autograd.

    window: a query sees its last ``window`` positions, itself included. softcap: scores become
    ``cap * tanh(score / cap)``. sinks: fp32 ``[H]``, a score without a value for each head.
    contract: a plan's choice among those of this dtype and device; None is the first of them.
    out: contiguous ``[T, H, D]`` to write, which is returned.
    """
    if cache.k.is_cuda:
        return gpu.paged_attention(
            q, cache, batch, scale=scale, window=window, softcap=softcap, sinks=sinks,
            contract=contract, out=out,
        )  # fmt: skip
    _check_contract(contract, q)
    _check(q, cache.kv_heads, cache.head_dim, cache.k.dtype, batch.slot.numel())
    settings = _settings(scale, window, softcap)
    run = choose(covering(cpu.CONTRACTS, q).id).run
    found, _, _ = run(
        _rows(q), cache.k, cache.v, batch.query_start, batch.kv_len, batch.block_table, *settings,
        _sinks(sinks, q),
    )
    found = found[..., : cache.head_dim]
    return found if out is None else out.copy_(found)


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
    """Whole requests back to back: ``q [T, H, D]``, ``k, v [T, HK, D]``, ``query_start [B + 1]``.

    Writes K and V into private pages and runs the kernel of :func:`paged_attention`, so the bits
    are the same. Differentiable in q, k, v and sinks. Other arguments as there.
    """
    if q.is_cuda:
        packed = (q, k, v, query_start)
        return gpu.packed_attention(
            *packed, scale=scale, window=window, softcap=softcap, sinks=sinks, contract=contract
        )
    _check_contract(contract, q)
    if k.shape != v.shape or k.dim() != 3 or k.dtype != v.dtype:
        raise ContractError(
            f"k {k.dtype} {tuple(k.shape)} and v {v.dtype} {tuple(v.shape)} differ; "
            "pass both as [T, HK, D]"
        )
    _check(q, k.shape[1], k.shape[2], k.dtype, k.shape[0])
    batch = packed_batch(query_start)
    settings = _settings(scale, window, softcap)
    if batch.slot.numel() != q.shape[0]:
        raise ContractError(
            f"query_start ends at {batch.slot.numel()} but there are {q.shape[0]} rows; its last "
            "entry must be the number of rows"
        )
    head_dim = q.shape[2]
    q, k, v, sinks = _padded(q), _padded(k), _padded(v), _sinks(sinks, q)
    needed = any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    if torch.is_grad_enabled() and needed:
        out = _Packed.apply(q, k, v, sinks, batch, settings)
    else:
        out = _packed_forward(q, k, v, sinks, batch, settings)[0]
    return out[..., :head_dim]


def _check(q: Tensor, kv_heads: int, head_dim: int, dtype: torch.dtype, tokens: int) -> None:
    covering(cpu.CONTRACTS, q)
    if q.dim() != 3 or q.shape[0] != tokens or q.shape[2] != head_dim or q.dtype != dtype:
        raise ContractError(
            f"q is {q.dtype} {tuple(q.shape)} for {tokens} tokens of {dtype} keys with head size "
            f"{head_dim}; pass q [T, H, D] in the same dtype"
        )
    if head_dim > cpu.MAX_HEAD_DIM or kv_heads == 0 or q.shape[1] % kv_heads:
        raise ContractError(
            f"{q.shape[1]} query heads over {kv_heads} kv heads of size {head_dim}: no contract "
            f"covers it (whole groups, sizes up to {cpu.MAX_HEAD_DIM}); keep this attention stock"
        )


def _check_contract(contract: str | None, q: Tensor) -> None:
    offered = covering(cpu.CONTRACTS, q).id
    if contract not in (None, offered):
        raise ContractError(f"no attention contract {contract} for {q.dtype} here; name {offered}")


def _settings(scale: float, window: int | None, softcap: float | None) -> tuple[float, int, float]:
    if window is not None and window < 1:
        raise ContractError(f"window {window} sees nothing; pass at least 1, or None for all keys")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ContractError(f"softcap {softcap} is not positive and finite; pass None for no cap")
    return float(scale), window or 0, softcap or 0.0


def _sinks(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    if sinks.shape != (q.shape[1],):
        raise ContractError(f"sinks {tuple(sinks.shape)} do not fit; pass one per query head")
    return sinks.float().contiguous()


def _padded(x: Tensor) -> Tensor:
    return pad(x, (0, -x.shape[-1] % PAGE)).contiguous() if x.shape[-1] % PAGE else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    return _padded(x.detach())


def _packed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    batch: AttentionBatch,
    settings: tuple[float, int, float],
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = q.detach(), k.detach(), v.detach()
    k_pages, v_pages = cpu.new_pages(batch.num_pages, k.shape[1], k.shape[2], k.dtype)
    cpu.write_pages(k_pages, v_pages, k, v, batch.slot)
    run = choose(covering(cpu.CONTRACTS, q).id).run
    index = (batch.query_start, batch.kv_len, batch.block_table)
    return run(q, k_pages, v_pages, *index, *settings, None if sinks is None else sinks.detach())


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        batch: AttentionBatch,
        settings: tuple[float, int, float],
    ) -> Tensor:
        out, peak, total = _packed_forward(q, k, v, sinks, batch, settings)
        ctx.save_for_backward(q, k, v, sinks, out, peak, total)
        ctx.batch, ctx.settings = batch, settings
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        q, k, v, sinks, out, peak, total = ctx.saved_tensors
        dtype, batch = q.dtype, ctx.batch
        dout = grads[0].float().contiguous()
        wide = (dout, q.float(), k.float(), v.float(), out.float())
        run = choose(cpu.GRADIENT.id).run
        dq, dk, dv, dsinks = run(*wide, peak, total, batch.query_start, *ctx.settings, sinks)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks, None, None
