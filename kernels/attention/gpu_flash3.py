"""A second contract: FlashAttention 3 as vLLM ships it, plain causal attention of head size 128.

Contract ``attention.flash3.<dtype>.sm90.v1`` is what that kernel gives for a query row alone, over
pages of 16 keys, with one split. At head size 128 its key tile is 128 for causal attention,
whatever the rows; at 64 it follows the number of query rows (192 keys for few, 128 for many), so
there is no contract there. The sweep proves it or refuses it, for one release of vLLM: another may
have other tiles. Nothing takes this contract by itself: a plan's rule names it.

One split means one program per kv head and query tile however long the keys are: prefill and
training are fast, decode of few requests is slow (:mod:`.gpu` splits those). The backward is ours,
in two passes, from the kernel's output and log-sum-exp (turned to base 2).

Legend: T query rows, H query heads, HK kv heads, D head size, B requests.
"""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..dispatch import admitted
from ..errors import CapabilityError, ContractError, NotCertifiedError
from ..gpu import device
from ..gpu.device import NAMES, aligned, programs
from ..gpu.operator import gpu_operator
from ..gpu.register import ARCHITECTURE
from ..taps import tapped
from .batch import PAGE
from .gpu_launch import LOG2E
from .gpu_step import Work, schedule

RELEASE = "0.25.1"
HEAD_DIM = 128
TILE = 128  # keys: the kernel's tile, and a page of the packed form's aligned copy

Settings = tuple[float, int, float, Tensor | None]


def contract_id(dtype: torch.dtype) -> str:
    """The adopted contract at a dtype."""
    return f"attention.flash3.{NAMES.get(dtype, str(dtype))}.{ARCHITECTURE}.v1"


@functools.cache
def missing() -> str | None:
    """None where the library of the proved release can run, else the reason."""
    why = device.missing()
    if why:
        return why
    try:
        release = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return f"vLLM is not installed (its release {RELEASE} holds the kernel)"
    if release != RELEASE:
        return f"vLLM is {release}, and the contract is about the kernel of {RELEASE}"
    interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    return None if interface.FA3_AVAILABLE else str(interface.FA3_UNAVAILABLE_REASON)


@functools.cache
def _library() -> Callable[..., Any]:
    return importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func


def _run(q: Tensor, k: Tensor, v: Tensor, scale: float, **index: Any) -> tuple[Tensor, Tensor]:
    o, lse = _library()(
        q, k, v, softmax_scale=scale, causal=True, return_softmax_lse=True, num_splits=1,
        fa_version=3, **index,
    )  # fmt: skip
    return o, lse * LOG2E


def paged_forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index: tuple[Tensor, Tensor, Tensor],
    work: Work,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """(o [T, H, D], lse [H, T], base 2); index: query_start, kv_len, block_table."""
    query_start, kv_len, table = index
    if not q.numel():
        return torch.empty_like(q), q.new_empty(q.shape[1], 0, dtype=torch.float32)
    # an upper bound; at 1 the library would drop the causal mask, and its tile with it
    longest = max(2, q.shape[0] if work.tiles else work.few)
    return _run(
        aligned(q), k_cache, v_cache, settings[0], cu_seqlens_q=query_start, seqused_k=kv_len,
        block_table=table, max_seqlen_q=longest, max_seqlen_k=table.shape[1] * PAGE,
    )  # fmt: skip


def packed_forward(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """(o [T, H, D], lse [H, T], base 2) over contiguous keys.

    Several requests are copied to pages of a tile each, zero-filled behind a request's end: the
    kernel multiplies masked values by zero, and a neighbour's may be NaN.
    """
    tokens, requests = q.shape[0], query_start.numel() - 1
    if not q.numel():
        return torch.empty_like(q), q.new_empty(q.shape[1], 0, dtype=torch.float32)
    q, k, v = aligned(q), aligned(k), aligned(v)
    index: dict[str, Any] = {"cu_seqlens_q": query_start, "max_seqlen_q": max(2, tokens)}
    if requests == 1:
        index |= {"cu_seqlens_k": query_start, "max_seqlen_k": max(2, tokens)}
        return _run(q, k, v, settings[0], **index)
    lengths, most = query_start.diff(), -(-tokens // TILE)
    work = schedule(
        query_start, lengths, tokens=tokens, group=1, tile=TILE, max_kv=tokens, split=False
    )
    blocks, width = tokens // TILE + requests, k.shape[1] * k.shape[2]
    k_pages, v_pages = (
        torch.empty(blocks, TILE, *k.shape[1:], dtype=k.dtype, device=k.device) for _ in range(2)
    )
    programs(__package__, "gpu_step_kernels").align_keys_kernel[(blocks, TILE // 16)](
        k, v, k_pages, v_pages, query_start, work.walk_start, requests, width, width,
        BN=TILE, ROWS=16, BW=1 << (width - 1).bit_length(), num_warps=8,
    )  # fmt: skip
    each = torch.arange(most, dtype=torch.int32, device=k.device)
    index |= {
        "seqused_k": lengths,
        "block_table": work.walk_start[:-1, None] + each,
        "max_seqlen_k": most * TILE,
    }
    return _run(q, k_pages, v_pages, settings[0], **index)


def check(q: Tensor, settings: Settings, *names: str) -> None:
    """Raise unless this contract covers the call and every one of ``names`` is proved here."""
    _, window, softcap, sinks = settings
    if q.dtype not in device.HALF_DTYPES or q.shape[2] != HEAD_DIM:
        raise ContractError(
            f"attention.flash3 covers bfloat16 and float16 with head size {HEAD_DIM}, not "
            f"{q.dtype} with {q.shape[2]}, where its key tile would follow the rows; name "
            "attention.split1024 in the plan"
        )
    if window or softcap or sinks is not None:
        raise ContractError(
            "attention.flash3 covers plain causal attention, without windows, caps and sinks; "
            "name attention.split1024 in this model's plan"
        )
    why, contract = missing(), contract_id(q.dtype)
    if why:
        raise CapabilityError(
            f"{contract} cannot be served: {why}; install vllm=={RELEASE}, or name "
            "attention.split1024 in the plan"
        )
    refused = [name for name in names if not admitted(contract, name)]
    if refused:
        raise NotCertifiedError(
            f"{', '.join(refused)} did not give the bits of {contract} on this machine; name "
            f"attention.split1024 in the plan (`zm kernels certify {contract}` says where)"
        )


@gpu_operator("zeromismatch::flash3_paged")
def paged_op(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    kv_len: Tensor,
    block_table: Tensor,
    tiles: int,
    few: int,
    scale: float,
) -> Tensor:
    """o [T, H, D]."""
    settings: Settings = (scale, 0, 0.0, None)
    check(q, settings, "flash3-paged", "flash3-alone")
    work = Work(query_start, query_start, tiles, 0, few)
    index = (query_start, kv_len, block_table)
    return tapped("attention", paged_forward(q, k_cache, v_cache, index, work, settings)[0])


@paged_op.register_fake
def _(q: Tensor, *args: Any) -> Tensor:
    return q.new_empty(q.shape)


@gpu_operator("zeromismatch::flash3_packed")
def packed_op(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(o [T, H, D], lse [H, T])."""
    settings: Settings = (scale, 0, 0.0, None)
    check(q, settings, "flash3-packed")
    o, lse = packed_forward(q, k, v, query_start, settings)
    return tapped("attention", o), lse


@packed_op.register_fake
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
