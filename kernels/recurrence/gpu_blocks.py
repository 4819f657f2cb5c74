"""Recurrences on matrix units: bf16 rows in blocks of 16, decode with the instructions of prefill.

Contracts ``recurrence_blocks.<kind>.bfloat16.sm90.v1`` for ssd and gated_delta (decays per value
head), chunks of a multiple of 16 rows. Orders and rounding points are in :mod:`.gpu_block_kernels`:
products of bf16 operands with fp32 sums, as in the chunk kernels of vLLM, whose accuracy it has.
Pages hold k and u in bf16 and, for g, its running sum from the chunk's start; states are fp32.
Written for graphs: nothing waits for the host, the number of programs follows from shapes alone.

    o = launch(q, k, v, g, beta, k_pages, u_pages, g_pages, end_pages, start, length, table)

Left out: KDA, whose decays are per channel; a gradient. The reference is the same programs at
another launch shape. Legend: as in :mod:`.gpu_kernels`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import choose
from ..errors import ContractError
from ..gpu.device import aligned, programs
from ..gpu.register import register_gpu
from .gpu import padded
from .pages import slots_of

_COLUMNS = 32
BLOCK = 16


def blocks_of(query_start: Tensor, length: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """int32 ``(owner [rows // 16 + 2 B], ends [B])``: whose each block is; B where nobody's."""
    begin = length - query_start.diff()
    count = (length + BLOCK - 1) // BLOCK - begin // BLOCK
    ends = torch.where(length > begin, count, 0).cumsum(0).to(torch.int32)
    block = torch.arange(
        rows // BLOCK + 2 * length.numel(), device=length.device, dtype=torch.int32
    )
    return torch.searchsorted(ends, block, right=True, out_int32=True), ends


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
    blocks: tuple[Tensor, Tensor] | None = None,
    *,
    columns: int = _COLUMNS,
    warps: int = 4,
) -> Tensor:
    """``o [T, HV, V]`` fp32; the pages take the rows and the states."""
    gpu_kernels = programs(__package__, "gpu_block_kernels")

    q, k, v, g = (aligned(each) for each in (q, k, v, g))
    (tokens, key_heads, key), (heads, value), chunk = q.shape, v.shape[1:], k_pages.shape[1]
    if chunk % BLOCK:
        raise ContractError(
            f"chunks of {chunk} rows are no multiple of {BLOCK}; take the fp32 contract"
        )
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    o, requests = torch.empty(v.shape, **fp32), length.numel()
    if not tokens:
        return o
    owner, ends = blocks or blocks_of(query_start, length, tokens)
    delta = beta is not None
    a = torch.empty(tokens, heads, chunk, dtype=v.dtype, device=q.device)
    b = torch.empty(tokens, heads, chunk if delta else 0, **fp32)
    w = torch.empty(tokens, heads, **fp32)
    index = (query_start, length, table)
    whose = (owner, ends, *index, table.shape[1], requests)
    options: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": warps, "num_stages": 1}
    sizes = (key_heads, heads, key)
    shape = {"C": chunk, "CP": padded(chunk), "DELTA": delta, "KP": padded(key)}
    gpu_kernels.recurrence_rows_kernel[(owner.numel(),)](
        k, g, k_pages, g_pages, *whose, heads, key_heads * key, C=chunk, HP=padded(heads), KB=128,
        **options,
    )  # fmt: skip
    gpu_kernels.recurrence_block_weights_kernel[(owner.numel(), heads)](
        q, k_pages, g_pages, a, b, w, *whose, *sizes, **shape, **options
    )
    gpu_kernels.recurrence_block_kernel[(-(-value // columns), heads, requests)](
        q, v, v if beta is None else aligned(beta), a, b, w, k_pages, u_pages, g_pages, end_pages,
        *index, o, table.shape[1], *sizes, value, BV=columns, **shape, **options,
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
    **shape: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(o, u, ends)`` of the call's rows, from copies of the pages: to be proved."""
    stores = [each.clone() for each in (k_pages, u_pages, g_pages, end_pages)]
    chunk = k_pages.shape[1]
    slot = slots_of(query_start, length, table, chunk)
    k_new, u_new, g_new, end_new = stores
    pages = slot[slot % chunk == chunk - 1] // chunk
    index = (query_start, length, table)
    o = launch(q, k, v, g, beta, k_new, u_new, g_new, end_new, *index, **shape)
    return o, u_new.flatten(0, 1)[slot], end_new[pages]


reference = partial(functional, columns=16, warps=1)

CONTRACTS = {
    kind: register_gpu(
        {"triton": functional},
        name=f"recurrence_blocks.{kind}",
        storages=("bfloat16",),
        op="recurrence_blocks",
        formula=f"as recurrence.{kind}.float32.cpu.v1, decays as differences of running sums",
        order="products over K and over earlier blocks by matrix instructions, ascending; rows of "
        "the block by substitution, ascending; state last",
        rounding="bf16 operands (S, a, b off the block, u), fp32 sums",
        functions="ex2.approx of the decay times log2(e)",
        reference="zeromismatch.kernels.recurrence.gpu_blocks:reference",
    )[torch.bfloat16]
    for kind in ("ssd", "gated_delta")
}


def step(kind: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """:func:`launch` by its proved contract; q, k and v are rounded to bf16 first."""
    choose(CONTRACTS[kind].id)  # proved, or refused, before the first step
    narrow = torch.bfloat16
    return launch(q.to(narrow), k.to(narrow), v.to(narrow), *rest)
