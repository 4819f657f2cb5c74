"""Attention on the GPU: one contract for prefill, any chunking, decode, prefix hit and packed training.

Contract ``attention.split1024.<dtype>.sm90.v1`` (order in :mod:`.gpu_kernels`): keys in fixed blocks on
the request's absolute grid, chunks of SPLIT positions merged ascending. A row's bits depend on its query
and its own keys. Queries of requests with few new tokens are split over chunks (decode), the others walk
(prefill); which is schedule, chosen per request on the device, so a captured graph serves any mixture.

Cache layout: ``k, v [num_pages, PAGE, HK, D]``. Head sizes 64, 80, 96, 128, 256; windows, soft-capping
and sinks. The backward (packed form) runs in two passes without atomics. Memory off the request's keys,
NaN included, never reaches a result.

Legend: T query rows, H query heads, HK kv heads, G = H / HK, D head size, B requests.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import Contract, Implementation, register_contract, register_implementation
from ..errors import ContractError
from ..gpu.device import HALF_DTYPES, NAMES, aligned, missing, num_multiprocessors, require
from .batch import PAGE, AttentionBatch
from .gpu_table import (
    DKV,
    DKV_KEYS,
    DQ,
    DQ_KEYS,
    HEAD_SIZES,
    HOPPER_QUERIES,
    SPLIT,
    SPLIT_KEYS,
    WALK,
    block_keys,
    padded,
)

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True, eq=False)
class GpuCache:
    """Pages ``k, v [num_pages, PAGE, HK, D]`` on the GPU."""

    k: Tensor
    v: Tensor

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]


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
    num_pages: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: str | torch.device = "cuda"
) -> GpuCache:
    """An uninitialised cache of ``num_pages`` pages of PAGE positions, bf16 or fp16."""
    if dtype not in HALF_DTYPES or head_dim not in HEAD_SIZES:
        raise ContractError(
            f"no GPU cache for {dtype} with head size {head_dim}; use bfloat16 or float16 and one of {HEAD_SIZES}"
        )
    shape = (num_pages, PAGE, kv_heads, head_dim)
    return GpuCache(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))


@torch.library.custom_op("zeromismatch::write_kv", mutates_args=("k_cache", "v_cache"))
def write_kv_op(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot: Tensor) -> None:
    """Copy rows into slots; negative slots are skipped (padding rows of a captured graph)."""
    from . import gpu_kernels

    k, v = (x if x.stride(-1) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (k, v))
    tokens, width = k.shape[0], k.shape[1] * k.shape[2]
    if tokens:
        gpu_kernels.write_kv_kernel[(tokens,)](
            k_cache, v_cache, k, v, slot, width, k.stride(0), v.stride(0),
            BLOCK=1 << (width - 1).bit_length(), num_warps=4)


def write_kv(cache: GpuCache, k: Tensor, v: Tensor, slot: Tensor) -> None:
    """Copy ``k, v [T, HK, D]`` bit for bit into distinct slots ``[T]`` (page * PAGE + offset)."""
    require("write_kv", cache.k, k, v, dtypes=HALF_DTYPES)
    if k.shape != v.shape or k.shape[1:] != cache.k.shape[2:] or k.dtype != cache.k.dtype:
        raise ContractError(
            f"k {k.dtype} {tuple(k.shape)} and v {tuple(v.shape)} do not fit a cache of {cache.k.dtype} "
            f"{tuple(cache.k.shape)}; pass both as [T, HK, D]"
        )
    write_kv_op(cache.k, cache.v, k, v, slot)


def read_kv(cache: GpuCache, block_table_row: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """``k, v [length, HK, D]`` of the request whose pages are listed."""
    pages = block_table_row[: -(-length // PAGE)].long()
    return cache.k[pages].flatten(0, 1)[:length], cache.v[pages].flatten(0, 1)[:length]


def _few(group: int, split: bool) -> tuple[int, int]:
    """(queries per request that the split kernel takes, its rows): from the head group only."""
    rows = max(16, 1 << (group - 1).bit_length())
    return (rows // group if split else 0), rows


def schedule(
    query_start: Tensor, kv_len: Tensor, *, tokens: int, group: int, head_dim: int, max_kv: int,
    max_query: int | None = None, window: int = 0, split: bool = True, tile: int | None = None,
) -> Work:
    """Work lists for one step. max_kv, max_query: bounds on kv_len and on a request's new tokens.

    Without ``max_query`` the step is looked up on the device, except inside a graph capture, where both
    kernels are launched; the other facts stay on the device.
    """
    from . import gpu_kernels

    requests = kv_len.numel()
    few, _ = _few(group, split)
    tile = tile or WALK[padded(head_dim)].bm
    walk, chunks = (torch.empty(requests + 1, dtype=torch.int32, device=kv_len.device) for _ in range(2))
    gpu_kernels.attention_schedule_kernel[(1,)](
        query_start, kv_len, walk, chunks, requests, few, tile, SPLIT,
        WINDOW=window, BB=max(16, 1 << (requests - 1).bit_length()), num_warps=4)
    per_request = -(-max_kv // SPLIT) if not window else min(-(-max_kv // SPLIT), -(-(window + few) // SPLIT) + 1)
    if split and max_query is None and not torch.cuda.is_current_stream_capturing():
        max_query = int(query_start.diff().max())
    tiles = 0 if split and max_query is not None and max_query <= few else tokens // tile + requests
    return Work(walk, chunks, tiles, per_request * requests if split else 0, few)


@torch.library.custom_op("zeromismatch::paged_attention", mutates_args=())
def paged_attention_op(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, query_start: Tensor, kv_len: Tensor, block_table: Tensor,
    walk_start: Tensor, split_start: Tensor, tiles: int, chunks: int, few: int,
    scale: float, window: int, softcap: float, sinks: Tensor | None,
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
        _walk(q, k_cache, v_cache, o, lse, index, None, walk_start, tiles, settings)
    if chunks:
        _split(q, k_cache, v_cache, o, lse, index, split_start, chunks, few, settings)
    return o, lse


@paged_attention_op.register_fake
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def _walk(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, index: tuple[Tensor, Tensor, Tensor],
    kv_start: Tensor | None, walk_start: Tensor, tiles: int, settings: tuple[Any, ...],
) -> None:
    """k, v: the cache, or with ``kv_start`` packed [T, HK, D]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from . import gpu_kernels

    query_start, kv_len, table = index
    scale, window, softcap, sinks = settings
    _, heads, size = q.shape
    kv_heads, width = k.shape[-2], padded(size)
    shape = WALK[width]
    paged = kv_start is None
    describe = not paged and size == width and k.data_ptr() % 16 == 0
    descriptors = [
        TensorDescriptor(x, [x.shape[0], kv_heads * size], [kv_heads * size, 1], [block_keys(size), size])
        if describe else None for x in (k, v)
    ]
    gpu_kernels.attention_walk_kernel[(heads, tiles)](
        q, k, v, *descriptors, o, lse, lse if sinks is None else sinks, query_start, kv_len,
        query_start if paged else kv_start, table, walk_start, kv_len.numel(), heads,
        q.stride(0), kv_heads * size, size, table.stride(0), o.stride(0), lse.stride(0), scale, scale * LOG2E,
        G=heads // kv_heads, R=1, BM=shape.bm, BN=block_keys(size), P=SPLIT, D=size, BD=width, PAGE=PAGE,
        PAGED=paged, TMA=describe, WINDOW=window, SOFTCAP=softcap, HAS_SINK=sinks is not None,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _split(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, index: tuple[Tensor, Tensor, Tensor],
    split_start: Tensor, chunks: int, few: int, settings: tuple[Any, ...],
) -> None:
    from . import gpu_kernels

    query_start, kv_len, table = index
    scale, window, softcap, sinks = settings
    _, heads, size = q.shape
    kv_heads, width = k.shape[-2], padded(size)
    group = heads // kv_heads
    rows = max(16, 1 << (group - 1).bit_length())
    shape = SPLIT_KEYS[width]
    part = torch.empty(chunks * kv_heads * rows, width, device=q.device)
    part_m, part_l = (torch.empty(chunks * kv_heads * rows, device=q.device) for _ in range(2))
    sms, items = num_multiprocessors(q.device.index), chunks * kv_heads
    per_sm = shape.per_sm if items > 4 * sms else min(2, shape.per_sm)
    programs = min(sms * per_sm, items)
    gpu_kernels.attention_split_kernel[(programs,)](
        q, k, v, part, part_m, part_l, query_start, kv_len, table, split_start, kv_len.numel(), kv_heads,
        q.stride(0), kv_heads * size, size, table.stride(0), scale, scale * LOG2E,
        G=group, QS=few, BM=rows, BN=block_keys(size), P=SPLIT, D=size, BD=width, PAGE=PAGE,
        WINDOW=window, SOFTCAP=softcap, STAGES=shape.stages,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip
    gpu_kernels.attention_merge_kernel[(kv_len.numel(), heads, few)](
        part, part_m, part_l, o, lse, lse if sinks is None else sinks, query_start, split_start, kv_heads,
        o.stride(0), lse.stride(0), G=group, QS=few, BM=rows, D=size, BD=width, HAS_SINK=sinks is not None,
        UNROLL=8, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def _check(q: Tensor, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    require("attention", q, dtypes=HALF_DTYPES)
    if q.dim() != 3 or q.shape[2] != head_dim or q.dtype != dtype or head_dim not in HEAD_SIZES:
        raise ContractError(
            f"q is {q.dtype} {tuple(q.shape)} for {dtype} keys of head size {head_dim}; pass q [T, H, D] in the "
            f"same dtype, with a head size of {HEAD_SIZES}"
        )
    if kv_heads == 0 or q.shape[1] % kv_heads:
        raise ContractError(
            f"{q.shape[1]} query heads over {kv_heads} kv heads are no whole groups; check the model's config"
        )


def _settings(
    q: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> tuple[float, int, float, Tensor | None]:
    if not scale > 0 or (window is not None and window < 1) or (softcap is not None and not 0 < softcap < math.inf):
        raise ContractError(
            f"scale {scale}, window {window}, softcap {softcap}: scale and softcap must be positive and a window at "
            "least 1; pass None for no window or cap"
        )
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ContractError(f"sinks {tuple(sinks.shape)} do not fit; pass one per query head")
    return float(scale), window or 0, float(softcap or 0.0), None if sinks is None else sinks.float().contiguous()


def paged_attention(
    q: Tensor, cache: GpuCache, batch: AttentionBatch, *, scale: float, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, work: Work | None = None,
) -> Tensor:
    """Attend ``q [T, H, D]`` over keys already written to the cache; no autograd.

    work: from :func:`schedule`, once per step; made here when absent.
    """
    _check(q, cache.kv_heads, cache.head_dim, cache.k.dtype)
    scale, window, softcap, sinks = _settings(q, scale, window, softcap, sinks)
    work = work or schedule(
        batch.query_start, batch.kv_len, tokens=q.shape[0], group=q.shape[1] // cache.kv_heads,
        head_dim=q.shape[2], max_kv=batch.block_table.shape[1] * PAGE, window=window,
    )  # fmt: skip
    return paged_attention_op(
        q, cache.k, cache.v, batch.query_start, batch.kv_len, batch.block_table,
        work.walk_start, work.split_start, work.tiles, work.chunks, work.few, scale, window, softcap, sinks,
    )[0]


@torch.library.custom_op("zeromismatch::packed_attention", mutates_args=())
def packed_attention_op(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float, window: int, softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(o [T, H, D], lse [H, T]): the walk over contiguous keys."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[1], q.shape[0], device=q.device)
    if not q.numel():
        return o, lse
    kv_len = query_start.diff()
    work = schedule(query_start, kv_len, tokens=q.shape[0], group=q.shape[1] // k.shape[1], head_dim=q.shape[2],
                    max_kv=q.shape[0], window=window, split=False)  # fmt: skip
    if _hopper_serves(q, window, softcap, sinks):
        _hopper(q, k, v, o, lse, query_start, work, scale)
        return o, lse
    table = query_start[None]
    _walk(q, k, v, o, lse, (query_start, kv_len, table), query_start, work.walk_start, work.tiles,
          (scale, window, softcap, sinks))  # fmt: skip
    return o, lse


def _hopper_serves(q: Tensor, window: int, softcap: float, sinks: Tensor | None) -> bool:
    return q.shape[2] == 128 and not window and not softcap and sinks is None and _has_gluon()


@functools.cache
def _has_gluon() -> bool:
    """Gluon is experimental in Triton: the kernel is used with the release it was proved with."""
    import triton

    return triton.__version__.startswith("3.6.") and not triton.knobs.runtime.interpret


def _hopper(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, query_start: Tensor, work: Work, scale: float
) -> None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from . import gpu_hopper, gpu_kernels

    tokens, heads, size = q.shape
    kv_heads, keys, requests = k.shape[1], block_keys(size), query_start.numel() - 1
    width = kv_heads * size
    key_start = query_start
    if requests > 1:
        blocks = tokens // keys + requests
        aligned_k, aligned_v = (torch.empty(blocks * keys, width, dtype=q.dtype, device=q.device) for _ in range(2))
        gpu_kernels.align_keys_kernel[(blocks, keys // 16)](
            k, v, aligned_k, aligned_v, query_start, work.walk_start, requests, width, width,
            BN=keys, ROWS=16, BW=1 << (width - 1).bit_length(), num_warps=8)
        k, v, key_start = aligned_k, aligned_v, work.walk_start * keys
    layout = gl.NVMMASharedLayout(128, 16, 2)
    describe = lambda x, columns, rows: TensorDescriptor(  # noqa: E731
        x, [x.shape[0], columns], [columns, 1], [rows, size], layout)
    gpu_hopper.attention_hopper_kernel[(heads, work.tiles)](
        describe(q, heads * size, HOPPER_QUERIES // 2), describe(k, width, keys), describe(v, width, keys),
        o, lse, query_start, key_start, work.walk_start, requests, o.stride(0), lse.stride(0), scale * LOG2E,
        G=heads // kv_heads, BM=HOPPER_QUERIES, BN=keys, P=SPLIT, D=size, STAGES=2,
        num_warps=4, maxnreg=168, enable_fp_fusion=False,
    )  # fmt: skip


@packed_attention_op.register_fake
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, query_start: Tensor,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, delta [H, T])."""
    from . import gpu_backward_kernels

    q, k, v, do = aligned(q), aligned(k), aligned(v), aligned(do)
    tokens, heads, size = q.shape
    kv_heads, width = k.shape[1], padded(size)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(lse)
    if not q.numel():
        return dq, dk, dv, delta
    lengths = query_start.diff()
    rows = 4 * max(1, 256 // width)
    gpu_backward_kernels.attention_delta_kernel[(-(-tokens * heads // rows),)](
        o, do, delta, tokens, heads, R=rows, D=size, BD=width, num_warps=4, enable_fp_fusion=False)
    common = (scale, scale * LOG2E)
    for name, shape, keys in (("dkv", DKV[width], DKV_KEYS[width]), ("dq", DQ[width], DQ_KEYS[width])):
        tile = keys if name == "dkv" else shape.bm
        work = schedule(query_start, lengths, tokens=tokens, group=1, head_dim=size, max_kv=tokens, split=False,
                        tile=tile)  # fmt: skip
        inputs = (q, k, v, do, lse, delta)
        outputs = (dk, dv) if name == "dkv" else (dq,)
        kernel = getattr(gpu_backward_kernels, f"attention_{name}_kernel")
        kernel[(kv_heads if name == "dkv" else heads, work.tiles)](
            *inputs, *outputs, query_start, work.walk_start, lengths.numel(), tokens, q.stride(0), k.stride(0), *common,
            G=heads // kv_heads, BM=shape.bm, BN=keys, D=size, BD=width, WINDOW=window, SOFTCAP=softcap,
            num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return dq, dk, dv, delta


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, query_start: Tensor,
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
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, *, scale: float, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Whole requests back to back, ``query_start`` int32 [B + 1]; differentiable in q, k, v, sinks."""
    _check(q, k.shape[1], k.shape[2], k.dtype)
    if k.shape != v.shape or k.shape[0] != q.shape[0]:
        raise ContractError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit q {tuple(q.shape)}; "
                            "pass both as [T, HK, D]")  # fmt: skip
    scale, window, softcap, sinks = _settings(q, scale, window, softcap, sinks)
    return _Packed.apply(q, k, v, sinks, query_start.to(torch.int32), (scale, window, softcap))


def reference(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float, window: int = 0, softcap: float = 0.0,
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
            rows.append(paged_attention(q[row : row + 1], cache, batch, scale=scale, window=window or None,
                                        softcap=softcap or None, sinks=sinks))  # fmt: skip
    return torch.cat(rows) if rows else torch.empty_like(q)


def _run(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float, window: int = 0, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    return packed_attention_op(q, k, v, query_start, scale, window, softcap, sinks)[0]


for _dtype in HALF_DTYPES:
    register_contract(Contract(
        id=f"attention.split{SPLIT}.{NAMES[_dtype]}.sm90.v1",
        op="attention",
        dtype=NAMES[_dtype],
        device="sm90",
        formula="o = softmax(scale q k) v, causal, with window, softcap and sinks",
        order=f"blocks of 128 keys (64 above head size 128) and chunks of {SPLIT} on the absolute grid, ascending",
        rounding="fp32 scores and sums; p rounded to the dtype for both the row sum and p.v",
        functions="fma, ex2.approx.ftz, lg2.approx, IEEE division, Hopper mma",
        reference="zeromismatch.kernels.attention.gpu:reference",
        gradient_rtol=2e-2,
    ))  # fmt: skip
    register_implementation(Implementation(
        contract=f"attention.split{SPLIT}.{NAMES[_dtype]}.sm90.v1", name="triton-walk", run=_run, missing=missing))
