"""Attention beside torch's: prefill, decode over pages, backward."""

# ruff: noqa: B023  (every closure is run before its loop goes on)

import importlib

import torch
import torch.nn.functional as F
from gpu_measure import HEADS, KV_HEADS, SIZE, Call, Row, eager_median, medians, randn
from torch.nn.attention import SDPBackend, sdpa_kernel

from zeromismatch.kernels.attention import gpu as attention
from zeromismatch.kernels.attention import gpu_flash3 as flash3
from zeromismatch.kernels.attention.batch import PAGE, KVCache


def packed(length: int) -> tuple[torch.Tensor, ...]:
    q, k, v = (
        randn(length, HEADS, SIZE),
        randn(length, KV_HEADS, SIZE),
        randn(length, KV_HEADS, SIZE),
    )
    return q, k, v, torch.tensor([0, length], dtype=torch.int32, device="cuda")


def stock_heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """[1, heads, T, D], kv heads repeated: what torch's SDPA takes."""
    return [
        t.transpose(0, 1)[None].repeat_interleave(HEADS // t.shape[1], 1).contiguous()
        for t in tensors
    ]


def prefill(_: float) -> list[Row]:
    rows = []
    for length in (2048, 4096, 8192, 16384):
        q, k, v, start = packed(length)
        stock = stock_heads(q, k, v)
        row: Row = {"length": length}
        if flash3.missing() is None:
            library = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func

            def stock_flash3() -> None:  # as vLLM calls it, splits by its own heuristic
                library(
                    q, k, v, cu_seqlens_q=start, cu_seqlens_k=start, max_seqlen_q=length,
                    max_seqlen_k=length, softmax_scale=SIZE**-0.5, causal=True, fa_version=3,
                )  # fmt: skip

            def adopted() -> None:
                flash3.packed_op(q, k, v, start, SIZE**-0.5)

            row["flash3_ms"], row["adopted_ms"] = medians([stock_flash3] * 2, [adopted] * 2)
        ours: list[Call] = [
            lambda: attention.packed_attention_op(q, k, v, start, SIZE**-0.5, 0, 0.0, None)
        ] * 2
        for name, backend in (
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
            ("flash2", SDPBackend.FLASH_ATTENTION),
        ):
            with sdpa_kernel(backend):
                row["ours_ms"], row[f"{name}_ms"] = medians(
                    ours, [lambda: F.scaled_dot_product_attention(*stock, is_causal=True)] * 2
                )
        row["ours_tflops"] = 2 * length**2 * SIZE * HEADS / row["ours_ms"] / 1e9
        rows.append(row)
    return rows


def decode(bandwidth: float) -> list[Row]:
    rows = []
    for batch, length, skewed in (
        (1, 4096, False),
        (1, 8192, False),
        (1, 16384, False),
        (1, 32768, False),
        (16, 4096, False),
        (16, 16384, False),
        (16, 32768, False),
        (128, 4096, False),
        (128, 8192, False),
        (16, 32768, True),
        (128, 32768, True),
    ):
        lengths = [
            max(64, int(length * (i + 1) ** 3 / batch**3)) if skewed else length
            for i in range(batch)
        ]
        tables = -(-length // PAGE)
        counts = [-(-n // PAGE) for n in lengths]
        order = torch.randperm(sum(counts), device="cuda").to(torch.int32)
        table = torch.zeros(batch, tables, dtype=torch.int32, device="cuda")
        for i, held in enumerate(order.split(counts)):
            table[i, : len(held)] = held
        pages = (randn(sum(counts), PAGE, KV_HEADS, SIZE) for _ in range(2))
        cache = KVCache(*pages, KV_HEADS, SIZE)
        q, kv_len = (
            randn(batch, HEADS, SIZE),
            torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        )
        start = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        work = attention.schedule(
            start,
            kv_len,
            tokens=batch,
            group=HEADS // KV_HEADS,
            tile=attention.walk_tile(q),
            max_kv=length,
            max_query=1,
        )

        def run(q=q, cache=cache, start=start, kv_len=kv_len, table=table, work=work) -> None:
            attention.paged_attention_op(
                q,
                cache.k,
                cache.v,
                start,
                kv_len,
                table,
                work.walk_start,
                work.split_start,
                work.tiles,
                work.chunks,
                work.few,
                SIZE**-0.5,
                0,
                0.0,
                None,
            )

        (ms,) = medians([run] * 4)
        row: Row = {"batch": batch, "length": length, "skewed": skewed, "ours_us": ms * 1e3}
        if flash3.missing() is None:
            adopted = (q, cache.k, cache.v, start, kv_len, table, 0, work.few, SIZE**-0.5)
            row["flash3_us"] = 1e3 * medians([lambda: flash3.paged_op(*adopted)] * 4)[0]
        read = 4 * sum(lengths) * KV_HEADS * SIZE
        row["share_of_copy"] = read / ms / 1e6 / bandwidth
        rows.append(row)
    return rows


def attention_backward(_: float) -> list[Row]:
    rows = []
    for length in (2048, 4096, 8192, 16384):
        q, k, v, start = packed(length)
        do = torch.randn_like(q)
        o, lse = attention.packed_attention_op(q, k, v, start, SIZE**-0.5, 0, 0.0, None)
        (ours,) = medians([lambda: attention.backward(do, q, k, v, o, lse, start, SIZE**-0.5)] * 2)
        row: Row = {"length": length, "ours_ms": ours}
        leaves = [t.requires_grad_() for t in stock_heads(q, k, v)]
        (g,) = stock_heads(do)
        for name, backend in (
            ("flash2", SDPBackend.FLASH_ATTENTION),
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ):
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(*leaves, is_causal=True)
                row[f"{name}_ms"] = eager_median(
                    lambda: torch.autograd.grad(out, leaves, g, retain_graph=True)
                )
        rows.append(row)
    return rows
