"""Products beside torch's: GEMM by row count and layer, and the LM head with its logprob."""

# ruff: noqa: B023  (every closure is run before its loop goes on)

import math

import torch
from gpu_measure import BF16, VOCABULARY, Row, eager_median, medians, randn

from zeromismatch.kernels.linear import gpu_gemm as linear
from zeromismatch.kernels.linear.gpu_table import Tile, tile_for
from zeromismatch.kernels.logprob import gpu_head as logprob

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
                    lambda w=w: linear.run_tile(tile_for(m, n), "nt", x, w, None, out)
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
