"""Launches of decode: chunks of SPLIT keys, then an ordered merge. Every way has the same bits.

Persistent programs take a chunk of one kv head at a time; a request with only one is finished
there. On sm_90 and later the merge of the others is launched while the programs end (programmatic
dependent launch) and waits inside for their results.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ..gpu.device import num_multiprocessors, programs
from .batch import PAGE
from .gpu_launch import LOG2E
from .gpu_table import SPLIT, block_keys, padded, shape_of


@functools.cache
def overlaps() -> bool:
    """Whether a launch may start before the one it waits for has ended."""
    triton: Any = importlib.import_module("triton")
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 9


def split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    index: tuple[Tensor, Tensor, Tensor],
    split_start: Tensor,
    chunks: int,
    few: int,
    settings: tuple[Any, ...],
) -> None:
    """Requests with at most ``few`` new tokens; writes their rows of o and lse."""
    query_start, kv_len, table = index
    scale, window, softcap, sinks = settings
    _, heads, size = q.shape
    kv_heads, width = k.shape[-2], padded(size)
    group = heads // kv_heads
    rows = max(16, 1 << (group - 1).bit_length())
    sms, items = num_multiprocessors(q.device.index), chunks * kv_heads
    shape, dependent = shape_of("split", size, q.dtype), overlaps()
    part = torch.empty(items * rows, width, device=q.device)
    part_m, part_l = (torch.empty(items * rows, device=q.device) for _ in range(2))
    partials = (part, part_m, part_l)
    outputs = (o, lse, lse if sinks is None else sinks)
    places = (query_start, kv_len, table, split_start, kv_len.numel(), kv_heads)
    strides = (kv_heads * size, size, table.stride(0))
    numbers: dict[str, Any] = {
        "G": group,
        "QS": few,
        "BM": rows,
        "BN": block_keys(size, q.dtype),
        "P": SPLIT,
        "D": size,
        "BD": width,
        "PAGE": PAGE,
        "WINDOW": window,
        "DEPENDENT": dependent,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
        "enable_fp_fusion": False,
    }
    per_sm = shape.per_sm if items > 4 * sms else min(2, shape.per_sm)
    kernel = programs(__package__, "gpu_kernels").attention_split_kernel
    kernel[(min(sms * per_sm, items),)](
        q,
        k,
        v,
        *partials,
        *outputs,
        *places,
        q.stride(0),
        *strides,
        o.stride(0),
        lse.stride(0),
        scale,
        scale * LOG2E,
        SOFTCAP=softcap,
        STAGES=shape.stages,
        HAS_SINK=sinks is not None,
        **numbers,
    )
    programs(__package__, "gpu_merge_kernels").attention_merge_kernel[(kv_len.numel(), heads)](
        *partials,
        *outputs,
        query_start,
        split_start,
        kv_heads,
        o.stride(0),
        lse.stride(0),
        G=group,
        BM=rows,
        D=size,
        BD=width,
        HAS_SINK=sinks is not None,
        UNROLL=8,
        DEPENDENT=dependent,
        num_warps=1,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if dependent else {}),
    )
