"""Attention on the CPU core: contracts and implementations, and the pages of a cache."""

import torch
from torch import Tensor

from ..cpu.load import core
from ..cpu.register import is_bf16, register_core
from ..errors import ContractError
from .batch import PAGE, packed_batch

MAX_HEAD_DIM = 256


def _run(
    variant: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_start: Tensor,
    kv_len: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, dim = q.shape
    num_pages, kv_heads = k_pages.shape[:2]
    out = torch.empty_like(q)
    peak, total = (torch.empty(rows, heads, dtype=torch.float32) for _ in range(2))
    bad = torch.full((1,), -1, dtype=torch.int64)
    core(variant).call(
        "attention", q, k_pages, v_pages, query_start, kv_len, block_table, sinks, out, peak, total,
        bad, rows, num_pages, *block_table.shape, heads, kv_heads, dim, window, float(scale),
        float(softcap), is_bf16(q), torch.get_num_threads(),
    )
    if int(bad) == kv_len.numel():
        raise ContractError(
            f"query_start does not run from 0 to the {rows} rows of q; rebuild the batch"
        )
    if int(bad) >= 0:
        raise ContractError(
            f"request {int(bad)} has more queries than keys, or its block table does not cover its "
            f"keys with pages below {num_pages}; allocate pages and rebuild the batch"
        )
    return out, peak, total


CONTRACTS = register_core(
    _run,
    name="attention.pages16",
    op="attention",
    formula="softmax(scale q K^T, causal, within the window, capped, with sinks) V",
    order="pages of 16 keys ascending from position 0; dot over d ascending; running maximum per "
    "page; sum in 16 lanes, closed by lanes16.tree.v1; V accumulated over visible keys ascending",
    rounding="fp32 throughout, K and V read from storage, one division and one rounding at the end",
    functions="exp.cpu.v1, tanh.cpu.v1 (softcap), correctly rounded division",
    reference="zeromismatch.kernels.reference.attention:attention",
    gradient_rtol=1e-5,
)


def new_pages(num_pages: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Uninitialised K ``[P, HK, dim, 16]`` and V ``[P, HK, 16, dim]``."""
    k = torch.empty(num_pages, kv_heads, dim, PAGE, dtype=dtype)
    return k, torch.empty(num_pages, kv_heads, PAGE, dim, dtype=dtype)


def write_pages(
    k_pages: Tensor, v_pages: Tensor | None, k: Tensor, v: Tensor | None, slot: Tensor
) -> None:
    """Copy rows ``[T, HK, dim]`` bit for bit into their slots (page * 16 + offset)."""
    core().call(
        "write_kv", k_pages, v_pages, k, v, slot, *k.shape, k.element_size(),
        torch.get_num_threads(),
    )


def _grad(
    variant: str,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    peak: Tensor,
    total: Tensor,
    query_start: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    (rows, heads, dim), kv_heads = q.shape, k.shape[1]
    batch = packed_batch(query_start)
    k_pages, k_rows = new_pages(batch.num_pages, kv_heads, dim, torch.float32)
    v_pages = torch.empty_like(k_pages)
    write_pages(k_pages, k_rows, k, k, batch.slot)
    write_pages(v_pages, None, v, None, batch.slot)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dsinks = None if sinks is None else torch.empty_like(sinks)
    delta = torch.empty(rows, heads, dtype=torch.float32)
    core(variant).call(
        "attention_backward", q, k_pages, v_pages, k_rows, out, dout, batch.query_start,
        batch.kv_len, batch.block_table, sinks, peak, total, delta, dq, dk, dv, dsinks,
        *batch.block_table.shape, heads, kv_heads, dim, window, float(scale), float(softcap),
        torch.get_num_threads(),
    )
    return dq, dk, dv, dsinks


GRADIENT = register_core(
    _grad,
    name="attention_grad.pages16",
    storages=("float32",),
    op="attention_grad",
    formula="p from the saved maximum and sum; ds = scale p (dO V - sum(dO O)); dQ = ds K, "
    "dK = ds Q, dV = p dO; dsink = -sum p_sink sum(dO O)",
    order="one FMA chain each; dQ: keys ascending; dK, dV: heads of the group, then queries, "
    "ascending",
    rounding="fp32 throughout; bf16 is widened before and rounded once after",
    functions="exp.cpu.v1, tanh.cpu.v1 (softcap), correctly rounded division",
    reference="zeromismatch.kernels.reference.attention_grad:attention_grad",
    gradient_rtol=1e-5,
)[torch.float32]
