"""Recurrences on the GPU: contracts, launches, and the operator that steps a cache in place.

Contracts ``recurrence.<kind>.float32.sm90.v1``: the formulas of the CPU's, other orders (the
module of programs writes them down) and exp2. A step of any cut of a request has the same bits;
work per row does not depend on the other rows of the call. The operator writes its rows and states
into the cache and waits for nobody, so it can be captured in a graph; negative slots are padding.
The reference is the same programs at another launch shape. Certified on an H200
(``benchmarks/recurrent.md``). :mod:`.gpu_gradient` has the gradient.

Legend: as in :mod:`.gpu_kernels`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import first_admitted
from ..gpu.device import aligned, programs, require
from ..gpu.register import register_gpu
from .pages import RowBatch, owners, slots_of

_COLUMNS = 32


def padded(size: int) -> int:
    """The power of two, 16 at least, that holds ``size``: what a program's tile takes."""
    return max(16, 1 << (size - 1).bit_length())


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    k_pages: Tensor,
    u_pages: Tensor,
    g_pages: Tensor,
    end_pages: Tensor,
    query_start: Tensor,
    length: Tensor,
    table: Tensor,
    slot: Tensor,
    *,
    columns: int = _COLUMNS,
    warps: int = 4,
) -> Tensor:
    """``o [T, HV, V]``; the pages take the rows and the states. slot int64 [T]."""
    gpu_kernels = programs(__package__, "gpu_kernels")

    q, k, v, g = (aligned(each) for each in (q, k, v, g))
    (tokens, key_heads, key), (heads, value), chunk = q.shape, v.shape[1:], k_pages.shape[1]
    o = torch.empty_like(v)
    if not tokens:
        return o
    delta, key_padded = beta is not None, padded(key)
    owner = owners(query_start, tokens)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    a, b = (torch.empty(tokens, heads, chunk if used else 0, **fp32) for used in (True, delta))
    qs, ks = (torch.empty(tokens, heads, key if used else 0, **fp32) for used in (True, delta))
    options: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": warps}
    shape = {"C": chunk, "CHANNELS": g.dim() == 3, "DELTA": delta, "KP": key_padded}
    gpu_kernels.recurrence_weights_kernel[(tokens, heads)](
        q, k, g, k_pages, g_pages, slot, owner, query_start, a, b, qs, ks, key_heads, heads, key,
        VEC=4 if key_padded <= 128 else 8, **shape, **options,
    )  # fmt: skip
    gpu_kernels.recurrence_walk_kernel[(length.numel(), heads, -(-value // columns))](
        v, v if beta is None else aligned(beta), a, b, qs, ks, k_pages, u_pages, g_pages,
        end_pages, query_start, length, table, o, table.shape[1], key_heads, heads, key, value,
        CP=padded(chunk), BV=columns, **shape, **options,
    )  # fmt: skip
    return o


def functional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    k_pages: Tensor,
    u_pages: Tensor,
    g_pages: Tensor,
    end_pages: Tensor,
    query_start: Tensor,
    length: Tensor,
    table: Tensor,
    **shape: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(o, u, ends)`` as the CPU's contract gives them, from copies of the pages: to be proved."""
    stores = [each.clone() for each in (k_pages, u_pages, g_pages, end_pages)]
    chunk = k_pages.shape[1]
    slot = slots_of(query_start, length, table, chunk)
    pages = slot[slot % chunk == chunk - 1] // chunk
    k_new, u_new, g_new, end_new = stores
    index = (query_start, length, table, slot)
    o = launch(q, k, v, g, beta, k_new, u_new, g_new, end_new, *index, **shape)
    return o, u_new.flatten(0, 1)[slot], end_new[pages]


reference = partial(functional, columns=16, warps=1)

CONTRACTS = {
    kind: register_gpu(
        {"triton": functional},
        name=f"recurrence.{kind}",
        storages=("float32",),
        op="recurrence",
        formula=f"as recurrence.{kind}.float32.cpu.v1",
        order="log decays from the row backwards; dots by row_sum; sums over K and over rows each "
        "a tree of halves by index, then added; folds rows descending, the state last",
        rounding="fp32 throughout",
        functions="ex2.approx of the decay times log2(e)",
        reference="zeromismatch.kernels.recurrence.gpu:reference",
    )[torch.float32]
    for kind in ("ssd", "gated_delta", "kda")
}


@torch.library.custom_op(
    "zeromismatch::recurrence_step",
    mutates_args=("k_pages", "u_pages", "g_pages", "end_pages"),
)
def step_op(
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    k_pages: Tensor,
    u_pages: Tensor,
    g_pages: Tensor,
    end_pages: Tensor,
    query_start: Tensor,
    length: Tensor,
    table: Tensor,
    slot: Tensor,
) -> Tensor:
    """``o [T, HV, V]`` fp32."""
    first_admitted(CONTRACTS[kind].id, "triton")
    stores = (k_pages, u_pages, g_pages, end_pages)
    return launch(q, k, v, g, beta, *stores, query_start, length, table, slot)


@step_op.register_fake
def _(kind: str, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(v)


def check(*tensors: Tensor | None) -> None:
    """CUDA tensors of one device, on a GPU with proved contracts."""
    require("recurrence", *tensors)


def packed(
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    batch: RowBatch,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(o, u, ends)`` of whole requests, as the CPU's contract gives them; the pages go again."""
    pages = int(batch.table.max()) + 1 if batch.table.numel() else 0
    stores = [x.new_empty(pages, chunk, *x.shape[1:]) for x in (k, v, g)]
    stores.append(v.new_empty(pages, v.shape[1], k.shape[2], v.shape[2]))
    index = (batch.query_start, batch.length, batch.table, batch.slot)
    o = step_op(kind, q, k, v, g, beta, *stores, *index)
    full = batch.slot[batch.slot % chunk == chunk - 1] // chunk
    return o, stores[1].flatten(0, 1)[batch.slot], stores[3][full]
