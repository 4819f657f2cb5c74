"""Launches of the attention kernels: shapes from head size and head groups, never from the rows.

``walk`` and ``hopper`` take whole tiles of queries, with the bits of :mod:`.gpu_split`. ``hopper``
serves plain causal attention of head size 128 over contiguous keys. ``backward`` runs delta, dK and
dV, then dQ.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ..gpu.device import aligned, programs
from .batch import PAGE
from .gpu_step import Work, schedule
from .gpu_table import HOPPER_QUERIES, SPLIT, Shape, block_keys, padded, shape_of

LOG2E = 1.4426950408889634


def walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    index: tuple[Tensor, Tensor, Tensor],
    kv_start: Tensor | None,
    walk_start: Tensor,
    tiles: int,
    settings: tuple[Any, ...],
) -> None:
    """k, v: the cache, or with ``kv_start`` packed [T, HK, D]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    gpu_kernels = programs(__package__, "gpu_kernels")

    query_start, kv_len, table = index
    scale, window, softcap, sinks = settings
    _, heads, size = q.shape
    kv_heads, width = k.shape[-2], padded(size)
    shape, keys = shape_of("walk", size, q.dtype), block_keys(size, q.dtype)
    paged = kv_start is None
    describe = not paged and size == width and k.data_ptr() % 16 == 0 and q.dtype != torch.float32
    descriptors = [
        TensorDescriptor(x, [x.shape[0], kv_heads * size], [kv_heads * size, 1], [keys, size])
        if describe
        else None
        for x in (k, v)
    ]
    gpu_kernels.attention_walk_kernel[(heads, tiles)](
        q,
        k,
        v,
        *descriptors,
        o,
        lse,
        lse if sinks is None else sinks,
        query_start,
        kv_len,
        query_start if paged else kv_start,
        table,
        walk_start,
        kv_len.numel(),
        heads,
        q.stride(0),
        kv_heads * size,
        size,
        table.stride(0),
        o.stride(0),
        lse.stride(0),
        scale,
        scale * LOG2E,
        G=heads // kv_heads,
        R=1,
        BM=shape.bm,
        BN=keys,
        P=SPLIT,
        D=size,
        BD=width,
        PAGE=PAGE,
        PAGED=paged,
        TMA=describe,
        WINDOW=window,
        SOFTCAP=softcap,
        HAS_SINK=sinks is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        enable_fp_fusion=False,
    )


def hopper_serves(q: Tensor, window: int, softcap: float, sinks: Tensor | None) -> bool:
    plain = not window and not softcap and sinks is None and q.dtype != torch.float32
    return q.shape[2] == 128 and plain and has_gluon()


@functools.cache
def has_gluon() -> bool:
    """Gluon is experimental in Triton: the kernel is used with the release it was proved with."""
    triton: Any = importlib.import_module("triton")
    return triton.__version__.startswith("3.6.") and not triton.knobs.runtime.interpret


def hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    query_start: Tensor,
    work: Work,
    scale: float,
) -> None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    gpu_hopper = programs(__package__, "gpu_hopper")
    gpu_step_kernels = programs(__package__, "gpu_step_kernels")

    tokens, heads, size = q.shape
    kv_heads, keys, requests = k.shape[1], block_keys(size, q.dtype), query_start.numel() - 1
    width = kv_heads * size
    key_start = query_start
    if requests > 1:
        blocks = tokens // keys + requests
        aligned_k, aligned_v = (
            torch.empty(blocks * keys, width, dtype=q.dtype, device=q.device) for _ in range(2)
        )
        gpu_step_kernels.align_keys_kernel[(blocks, keys // 16)](
            k,
            v,
            aligned_k,
            aligned_v,
            query_start,
            work.walk_start,
            requests,
            width,
            width,
            BN=keys,
            ROWS=16,
            BW=1 << (width - 1).bit_length(),
            num_warps=8,
        )
        k, v, key_start = aligned_k, aligned_v, work.walk_start * keys
    layout = gl.NVMMASharedLayout(128, 16, 2)
    describe = lambda x, columns, rows: TensorDescriptor(  # noqa: E731
        x, [x.shape[0], columns], [columns, 1], [rows, size], layout
    )
    gpu_hopper.attention_hopper_kernel[(heads, work.tiles)](
        describe(q, heads * size, HOPPER_QUERIES // 2),
        describe(k, width, keys),
        describe(v, width, keys),
        o,
        lse,
        query_start,
        key_start,
        work.walk_start,
        requests,
        o.stride(0),
        lse.stride(0),
        scale * LOG2E,
        G=heads // kv_heads,
        BM=HOPPER_QUERIES,
        BN=keys,
        P=SPLIT,
        D=size,
        STAGES=2,
        num_warps=4,
        maxnreg=168,
        enable_fp_fusion=False,
    )


def backward(
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
    *,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, delta [H, T]); shape: tiles other than the table's (schedule)."""
    gpu_backward_kernels = programs(__package__, "gpu_backward_kernels")

    q, k, v, o, do, lse = (aligned(each) for each in (q, k, v, o, do, lse))
    tokens, heads, size = q.shape
    kv_heads, width = k.shape[1], padded(size)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(lse)
    if not q.numel():
        return dq, dk, dv, delta
    lengths = query_start.diff()
    rows = 4 * max(1, 256 // width)
    gpu_backward_kernels.attention_delta_kernel[(-(-tokens * heads // rows),)](
        o, do, delta, tokens, heads, R=rows, D=size, BD=width, num_warps=4, enable_fp_fusion=False
    )
    common = (scale, scale * LOG2E)
    for name in ("dkv", "dq"):
        tiling = shape or shape_of(name, size, q.dtype)
        tile = tiling.keys if name == "dkv" else tiling.bm
        work = schedule(
            query_start,
            lengths,
            tokens=tokens,
            group=1,
            max_kv=tokens,
            split=False,
            tile=tile,
        )
        inputs = (q, k, v, do, lse, delta)
        outputs = (dk, dv) if name == "dkv" else (dq,)
        kernel = getattr(gpu_backward_kernels, f"attention_{name}_kernel")
        kernel[(kv_heads if name == "dkv" else heads, work.tiles)](
            *inputs,
            *outputs,
            query_start,
            work.walk_start,
            lengths.numel(),
            tokens,
            q.stride(0),
            k.stride(0),
            *common,
            G=heads // kv_heads,
            BM=tiling.bm,
            BN=tiling.keys,
            D=size,
            BD=width,
            WINDOW=window,
            SOFTCAP=softcap,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            enable_fp_fusion=False,
        )
    return dq, dk, dv, delta
