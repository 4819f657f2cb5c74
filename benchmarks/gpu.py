"""Speed of the GPU operators beside their competitors, in one run; bits are proved in tests.

    python benchmarks/gpu.py --out benchmarks/gpu_results.json            # everything, about 4
        minutes
    python benchmarks/gpu.py --only gemm decode

Medians of CUDA graph replays; weights are rotated so that no product finds its weights in L2.
Ratios are competitor time / our time (above 1: ours is faster), bandwidths are shares of a measured
large copy. Sections that fail are reported and the rest goes on. ``benchmarks/gpu.md`` holds the
last published table.
"""

# ruff: noqa: B023  (every closure is run before its loop goes on)

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from zeromismatch.kernels.attention import gpu as attention
from zeromismatch.kernels.attention.batch import PAGE
from zeromismatch.kernels.embedding import gpu as embedding
from zeromismatch.kernels.gated import gpu as gated
from zeromismatch.kernels.linear import gpu as linear
from zeromismatch.kernels.linear.gpu_table import Tile
from zeromismatch.kernels.logprob import gpu as logprob
from zeromismatch.kernels.rmsnorm import gpu as rmsnorm
from zeromismatch.kernels.rotary import gpu as rotary

BF16 = torch.bfloat16
LAYERS = {
    "Qwen3-1.7B qkv": (4096, 2048),
    "Qwen3-1.7B o": (2048, 2048),
    "Qwen3-1.7B gate_up": (12288, 2048),
    "Qwen3-1.7B down": (2048, 6144),
    "Llama-8B qkv": (6144, 4096),
    "Llama-8B o": (4096, 4096),
    "Llama-8B gate_up": (28672, 4096),
    "Llama-8B down": (4096, 14336),
    "Qwen3-32B qkv": (10240, 5120),
    "Qwen3-32B o": (5120, 8192),
    "Qwen3-32B gate_up": (51200, 5120),
    "Qwen3-32B down": (5120, 25600),
}
ROW_COUNTS = (1, 16, 32, 64, 128, 256, 512, 2048, 8192)
FIXED_TILE = Tile(128, 128, 64, 8, 4, tma=True)
VOCABULARY = 151936
HEADS, KV_HEADS, SIZE = 32, 8, 128

Call = Callable[[], Any]
Row = dict[str, Any]


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


class Replay:
    """A captured graph of some calls; ``time`` is milliseconds per call."""

    def __init__(self, calls: list[Call]) -> None:
        self.count, self.graph = len(calls), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()
        self.graph.replay()

    def time(self) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / self.count


def medians(*calls: list[Call], repeats: int = 9) -> list[float]:
    """Median milliseconds per call of each list, replays interleaved."""
    replays = [Replay(each) for each in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for replay, kept in zip(replays, times, strict=True):
            kept.append(replay.time())
    return [sorted(kept)[len(kept) // 2] for kept in times]


def copy_bandwidth() -> float:
    """GB/s read plus written by a large elementwise copy."""
    a = randn(1 << 29, dtype=torch.float32)
    b = torch.empty_like(a)
    (ms,) = medians([lambda: torch.mul(a, 1.0, out=b)] * 3)
    return 8 * a.numel() / ms / 1e6


def gemm(_: float) -> list[Row]:
    rows = []
    for m in ROW_COUNTS:
        for name, (n, k) in LAYERS.items():
            copies = max(1, min(24, 150_000_000 // (2 * n * k) + 1)) if m < 1024 else 1
            weights, x = [randn(n, k) for _ in range(copies)], randn(m, k)
            out = torch.empty(m, n, device="cuda", dtype=BF16)
            ours = [lambda w=w: linear.gemm("nt", x, w, out=out) for w in weights]
            ours[0]()
            times = medians(
                [lambda w=w: torch.mm(x, w.t(), out=out) for w in weights],
                ours,
                [lambda w=w: linear.run_tile(FIXED_TILE, "nt", x, w, None, out) for w in weights],
                [
                    lambda w=w: linear.run_tile(linear.tile_for(m, n), "nt", x, w, None, out)
                    for w in weights
                ],
                repeats=7,
            )
            serves = next(d.serves for d in linear.decisions() if d.shape[:4] == ("nt", m, n, k))
            keys = ("torch_ms", "ours_ms", "fixed_tile_ms", "own_triton_ms")
            rows.append(
                {
                    "m": m,
                    "layer": name,
                    "n": n,
                    "k": k,
                    "serves": serves,
                    **dict(zip(keys, times, strict=True)),
                }
            )
    return rows


def gemm_summary(rows: list[Row]) -> list[Row]:
    summary = []
    for label, low, high in (
        ("M >= 512", 512, 1 << 30),
        ("64 <= M < 512", 64, 512),
        ("M < 64", 0, 64),
    ):
        part = [row for row in rows if low <= row["m"] < high]
        line: Row = {"work": f"GEMM, {label}"}
        for key in ("ours_ms", "own_triton_ms", "fixed_tile_ms"):
            ratios = [row["torch_ms"] / row[key] for row in part]
            line[key[:-3]] = {
                "geomean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
                "worst": min(ratios),
            }
        summary.append(line)
    return summary


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
        for i, pages in enumerate(order.split(counts)):
            table[i, : len(pages)] = pages
        cache = attention.GpuCache(*(randn(sum(counts), PAGE, KV_HEADS, SIZE) for _ in range(2)))
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
            head_dim=SIZE,
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
        read = 4 * sum(lengths) * KV_HEADS * SIZE
        rows.append(
            {
                "batch": batch,
                "length": length,
                "skewed": skewed,
                "ours_us": ms * 1e3,
                "share_of_copy": read / ms / 1e6 / bandwidth,
            }
        )
    return rows


def attention_backward(_: float) -> list[Row]:
    rows = []
    for length in (2048, 4096, 8192, 16384):
        q, k, v, start = packed(length)
        do = torch.randn_like(q)
        o, lse = attention.packed_attention_op(q, k, v, start, SIZE**-0.5, 0, 0.0, None)
        (ours,) = medians(
            [lambda: attention.backward(q, k, v, o, lse, do, start, SIZE**-0.5, 0, 0.0)] * 2
        )
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


def eager_median(call: Call, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times[2:])[repeats // 2]


def row_operators(bandwidth: float) -> list[Row]:
    rows = []

    def add(name: str, moved: int, ours: Call, stock: Call | None = None) -> None:
        times = medians([ours] * 4, *([[stock] * 4] if stock else []))
        rows.append(
            {
                "work": name,
                "ours_us": times[0] * 1e3,
                "torch_us": times[1] * 1e3 if stock else None,
                "share_of_copy": moved / times[0] / 1e6 / bandwidth,
            }
        )

    for m, h in ((4096, 4096), (8192, 2048), (8192, 4096), (16384, 5120)):
        x, r, w = randn(m, h), randn(m, h), randn(h)
        add(
            f"RMSNorm {m}x{h}",
            4 * m * h,
            lambda x=x, w=w: rmsnorm.rmsnorm_op(x, None, w, 1e-6, False),
            lambda x=x, w=w, h=h: F.rms_norm(x, (h,), w, 1e-6),
        )
        add(
            f"RMSNorm + residual {m}x{h}",
            8 * m * h,
            lambda x=x, r=r, w=w: rmsnorm.rmsnorm_op(x, r, w, 1e-6, False),
        )
        add(
            f"RMSNorm backward {m}x{h}",
            6 * m * h,
            lambda x=x, r=r, w=w: rmsnorm.backward(x, w, r, None, 1e-6, False),
        )
    x, w = randn(8192 * 40, 128), randn(128)
    add(
        "RMSNorm per head 8192x40x128",
        4 * x.numel(),
        lambda: rmsnorm.rmsnorm_op(x, None, w, 1e-6, False),
    )
    both = randn(8192, 24576)
    add(
        "SiLU-mul 8192x12288",
        3 * both.numel(),
        lambda: gated.gated_op(both[:, :12288], both[:, 12288:], False),
        lambda: F.silu(both[:, :12288]) * both[:, 12288:],
    )
    q, table = randn(8192, HEADS, SIZE), randn(8192, SIZE, dtype=torch.float32)
    add(
        "rotary 8192x32x128",
        4 * q.numel() + 8 * table.numel(),
        lambda: rotary.rotary_op(q, table, table, False),
    )
    logits = randn(4096, VOCABULARY, dtype=torch.float32)
    targets, t = (
        torch.randint(0, VOCABULARY, (4096,), device="cuda"),
        torch.ones(4096, device="cuda"),
    )
    add(
        "logprob 4096x151936",
        4 * logits.numel(),
        lambda: logprob._forward(logits, targets, t),
        lambda: torch.log_softmax(logits, -1),
    )
    _, peak, log_sum = logprob._forward(logits, targets, t)
    out = torch.empty(4096, VOCABULARY, device="cuda", dtype=BF16)
    add(
        "logprob backward 4096x151936",
        6 * logits.numel(),
        lambda: logprob._d_logits(logits, targets, t, peak, log_sum, t, 0, out),
    )
    return rows


def embedding_backward(_: float) -> list[Row]:
    rows = []
    for tokens in (32768, 131072):
        ids, dy = torch.randint(0, VOCABULARY, (tokens,), device="cuda"), randn(tokens, 2048)
        skewed = (torch.rand(tokens, device="cuda") ** 6 * VOCABULARY).long()
        for name, each in (("uniform", ids), ("skewed", skewed)):
            ours = eager_median(
                lambda each=each, dy=dy: embedding.grad_weight(dy, each, VOCABULARY)
            )
            torch.use_deterministic_algorithms(True)
            stock = eager_median(
                lambda each=each, dy=dy: torch.ops.aten.embedding_dense_backward(
                    dy, each, VOCABULARY, -1, False
                )
            )
            torch.use_deterministic_algorithms(False)
            rows.append({"tokens": tokens, "ids": name, "ours_ms": ours, "torch_ms": stock})
    return rows


def head(_: float) -> list[Row]:
    rows = []
    for hidden in (2048, 4096):
        h, w = (
            (randn(8192, hidden) * 0.5).requires_grad_(),
            (randn(VOCABULARY, hidden) * 0.02).requires_grad_(),
        )
        targets, g = (
            torch.randint(0, VOCABULARY, (8192,), device="cuda"),
            randn(8192, dtype=torch.float32),
        )

        def stock(h=h, w=w, targets=targets) -> torch.Tensor:
            return torch.log_softmax((h @ w.t()).float(), -1).gather(1, targets[:, None])[:, 0]

        def ours(h=h, w=w, targets=targets) -> torch.Tensor:
            return logprob.lm_head_logprob(h, w, targets)

        row: Row = {"hidden": hidden}
        for name, forward in (("ours", ours), ("torch", stock)):

            def step(forward=forward, h=h, w=w, g=g) -> None:
                h.grad = w.grad = None
                forward().backward(g)

            step()
            h.grad = w.grad = None
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            gradients = 2 * (h.numel() + w.numel())
            row[f"{name}_peak_gb"] = (torch.cuda.max_memory_allocated() - base - gradients) / 1e9
            row[f"{name}_ms"] = eager_median(step, 5)
        rows.append(row)
    return rows


SECTIONS = {
    "gemm": gemm,
    "prefill": prefill,
    "decode": decode,
    "attention_backward": attention_backward,
    "row_operators": row_operators,
    "embedding_backward": embedding_backward,
    "head": head,
}


def main() -> None:
    """Run the chosen sections; write JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_results.json"))
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "copy_gbps": copy_bandwidth(),
    }
    print(results, flush=True)
    for name in arguments.only:
        started = time.perf_counter()
        try:
            results[name] = SECTIONS[name](results["copy_gbps"])
            if name == "gemm":
                results["gemm_summary"] = gemm_summary(results["gemm"])
        except Exception as error:  # noqa: BLE001  (a long run on a lent machine keeps its other sections)
            traceback.print_exc()
            results[f"{name}_failed"] = repr(error)
        shown = results.get("gemm_summary" if name == "gemm" else name, ())
        for row in shown:
            print(
                name,
                {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()},
                flush=True,
            )
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
