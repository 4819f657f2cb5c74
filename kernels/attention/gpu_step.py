"""What one step of attention on the GPU needs besides numbers: the cache, and who works on what.

``schedule`` makes the work lists on the device, once per step for all layers: a request with few
new tokens is cut into chunks of keys, any other into tiles of queries. Lengths are read by the
kernels, so a captured graph follows them. ``write_kv`` copies bits; slots below 0 are padding.

Legend: T query rows, HK kv heads, D head size, B requests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ContractError
from ..gpu.device import NAMES, programs, require
from ..gpu.operator import gpu_operator
from .batch import PAGE, KVCache
from .gpu_table import MAX_HEAD_DIM, SPLIT, shape_of


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Which request each program works for: made once per step on the device, used by every layer.

    walk_start, split_start: int32 [B + 1], running counts of query tiles and of key chunks.
    tiles, chunks: upper bounds of their last entries, for the launch grid and scratch.
    """

    walk_start: Tensor
    split_start: Tensor
    tiles: int
    chunks: int
    few: int


def new_cache(
    num_pages: int,
    kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cuda",
) -> KVCache:
    """An uninitialised cache of ``num_pages`` pages ``k, v [num_pages, PAGE, HK, D]``."""
    if dtype not in NAMES or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ContractError(
            f"no GPU cache for {dtype} with head size {head_dim}; use float32, bfloat16 or "
            f"float16 and a head size from 1 to {MAX_HEAD_DIM}"
        )
    shape = (num_pages, PAGE, kv_heads, head_dim)
    k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    return KVCache(k, v, kv_heads, head_dim)


@gpu_operator("zeromismatch::write_kv", writes=("k_cache", "v_cache"))
def write_kv_op(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot: Tensor) -> None:
    """Copy rows into slots; negative slots are skipped (padding rows of a captured graph)."""
    gpu_step_kernels = programs(__package__, "gpu_step_kernels")

    k, v = (
        x if x.stride(-1) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (k, v)
    )
    tokens, width = k.shape[0], k.shape[1] * k.shape[2]
    if tokens:
        gpu_step_kernels.write_kv_kernel[(tokens,)](
            k_cache,
            v_cache,
            k,
            v,
            slot,
            width,
            k.stride(0),
            v.stride(0),
            BLOCK=1 << (width - 1).bit_length(),
            num_warps=4,
        )


def write_kv(cache: KVCache, k: Tensor, v: Tensor, slot: Tensor) -> None:
    """Copy ``k, v [T, HK, D]`` bit for bit into distinct slots ``[T]`` (page * PAGE + offset)."""
    require("write_kv", cache.k, k, v)
    if k.shape != v.shape or k.shape[1:] != cache.k.shape[2:] or k.dtype != cache.k.dtype:
        raise ContractError(
            f"k {k.dtype} {tuple(k.shape)} and v {tuple(v.shape)} do not fit a cache of "
            f"{cache.k.dtype} {tuple(cache.k.shape)}; pass both as [T, HK, D]"
        )
    write_kv_op(cache.k, cache.v, k.detach(), v.detach(), slot)


def read_kv(cache: KVCache, block_table_row: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """``k, v [length, HK, D]`` of the request whose pages are listed."""
    pages = block_table_row[: -(-length // PAGE)].long()
    return cache.k[pages].flatten(0, 1)[:length], cache.v[pages].flatten(0, 1)[:length]


def read_slots(cache: KVCache, slot: Tensor) -> tuple[Tensor, Tensor]:
    """``k, v [T, HK, D]`` as the cache holds them in slots ``[T]``."""
    page, offset = slot // PAGE, slot % PAGE
    return cache.k[page, offset], cache.v[page, offset]


def _few(group: int, split: bool) -> tuple[int, int]:
    """(queries per request that the split kernel takes, its rows): from the head group only."""
    rows = max(16, 1 << (group - 1).bit_length())
    return (rows // group if split else 0), rows


def walk_tile(q: Tensor) -> int:
    """Queries per tile of the walk, for q [T, H, D]."""
    return shape_of("walk", q.shape[2], q.dtype).bm


def schedule(
    query_start: Tensor,
    kv_len: Tensor,
    *,
    tokens: int,
    group: int,
    tile: int,
    max_kv: int,
    max_query: int | None = None,
    window: int = 0,
    split: bool = True,
) -> Work:
    """Work lists for one step. tile: queries of a walk tile (:func:`walk_tile`). max_kv, max_query:
    bounds on kv_len and on a request's new tokens.

    Without ``max_query`` the step is looked up on the device, except inside a graph capture, where
    both kernels are launched; the other facts stay on the device.
    """
    gpu_step_kernels = programs(__package__, "gpu_step_kernels")

    requests = kv_len.numel()
    few, _ = _few(group, split)
    walk, chunks = (
        torch.empty(requests + 1, dtype=torch.int32, device=kv_len.device) for _ in range(2)
    )
    gpu_step_kernels.attention_schedule_kernel[(1,)](
        query_start,
        kv_len,
        walk,
        chunks,
        requests,
        few,
        tile,
        SPLIT,
        WINDOW=window,
        BB=max(16, 1 << (requests - 1).bit_length()),
        num_warps=4,
    )
    per_request = (
        -(-max_kv // SPLIT)
        if not window
        else min(-(-max_kv // SPLIT), -(-(window + few) // SPLIT) + 1)
    )
    if split and max_query is None and not torch.cuda.is_current_stream_capturing():
        max_query = int(query_start.diff().max())
    tiles = 0 if split and max_query is not None and max_query <= few else tokens // tile + requests
    return Work(walk, chunks, tiles, per_request * requests if split else 0, few)
