"""Launches of decode: chunks of SPLIT keys, then an ordered merge. Every way has the same bits.

Many chunks: persistent programs, a chunk of one kv head at a time. Few (no more than
multiprocessors): scores of all blocks first, then the chain over them by columns
(``gpu_phase_kernels.py``). On sm_90 and later the next launch starts while the last one ends
(programmatic dependent launch) and waits inside for its results.
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..gpu.device import num_multiprocessors, programs
from .batch import PAGE
from .gpu_launch import LOG2E
from .gpu_table import SPLIT, Shape, block_keys, padded, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How chunks are computed (schedule). columns: of the values per program in two phases; 0: one
    phase. dependent: launches overlap.
    """

    shape: Shape
    columns: int = 0
    dependent: bool = True


@functools.cache
def overlaps() -> bool:
    """Whether a launch may start before the one it waits for has ended."""
    triton: Any = importlib.import_module("triton")
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 9


def way_for(items: int, head_dim: int, dtype: torch.dtype, multiprocessors: int) -> Way:
    """By the bound on chunks that the host knows, head size and dtype."""
    shape = shape_of("split", head_dim, dtype)
    few = items <= multiprocessors
    return Way(shape=shape, columns=32 if few else 0, dependent=overlaps())


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
    *,
    way: Way | None = None,
) -> None:
    """Requests with at most ``few`` new tokens; writes their rows of o and lse."""
    query_start, kv_len, table = index
    scale, window, softcap, sinks = settings
    _, heads, size = q.shape
    kv_heads, width = k.shape[-2], padded(size)
    group = heads // kv_heads
    rows = max(16, 1 << (group - 1).bit_length())
    sms, items = num_multiprocessors(q.device.index), chunks * kv_heads
    way = way or way_for(items, size, q.dtype, sms)
    part = torch.empty(items * rows, width, device=q.device)
    part_m, part_l = (torch.empty(items * rows, device=q.device) for _ in range(2))
    partials = (part, part_m, part_l)
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
        "DEPENDENT": way.dependent,
        "num_warps": way.shape.warps,
        "num_stages": way.shape.stages,
        "enable_fp_fusion": False,
    }
    step = {"SOFTCAP": softcap, "STAGES": way.shape.stages}
    after = {"launch_pdl": True} if way.dependent else {}
    factors = (scale, scale * LOG2E)
    if way.columns:
        kernels, blocks = programs(__package__, "gpu_phase_kernels"), SPLIT // numbers["BN"]
        z = torch.empty(items * blocks * rows * numbers["BN"], device=q.device)
        kernels.attention_scores_kernel[(items, blocks)](
            q, k, z, *places, q.stride(0), *strides, **numbers
        )
        kernels.attention_values_kernel[(items, width // way.columns)](
            z, v, *partials, *places, *strides, *factors, DS=way.columns, **numbers, **step, **after
        )
    else:
        per_sm = way.shape.per_sm if items > 4 * sms else min(2, way.shape.per_sm)
        kernel = programs(__package__, "gpu_kernels").attention_split_kernel
        kernel[(min(sms * per_sm, items),)](
            q, k, v, *partials, *places, q.stride(0), *strides, *factors, **numbers, **step
        )
    programs(__package__, "gpu_merge_kernels").attention_merge_kernel[(kv_len.numel(), heads, few)](
        *partials,
        o,
        lse,
        lse if sinks is None else sinks,
        query_start,
        split_start,
        kv_heads,
        o.stride(0),
        lse.stride(0),
        G=group,
        QS=few,
        BM=rows,
        D=size,
        BD=width,
        HAS_SINK=sinks is not None,
        UNROLL=8,
        DEPENDENT=way.dependent,
        num_warps=1,
        enable_fp_fusion=False,
        **after,
    )
