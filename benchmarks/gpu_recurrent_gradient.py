"""Forward and backward of the recurrences on a GPU, beside transformers' torch code.

    python benchmarks/gpu_recurrent_gradient.py --rows 2048 --out FILE

Public head sizes (Qwen3-Next, Kimi-Linear, Nemotron-H), one request, fp32 rows, in one process;
medians of CUDA events. transformers' own fused kernels need packages that are no dependency of
ours; what runs without them is its chunk form in torch operations.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES = {  # key heads, value heads, key size, value size, chunk
    "gated_delta": (16, 32, 128, 128, 64),
    "kda": (32, 32, 128, 128, 64),
    "ssd": (8, 128, 128, 64, 128),
}
REPEATS = 5


def inputs(kind: str, rows: int) -> list[Tensor | None]:
    """q, k, v, g and beta that ask for gradients."""
    hk, hv, k, v, _ = SIZES[kind]
    generator = torch.Generator("cuda").manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    gates = (rows, hv, k) if kind == "kda" else (rows, hv)
    unit = torch.nn.functional.normalize
    given: list[Tensor | None] = [
        unit(drawn(rows, hk, k), dim=-1), unit(drawn(rows, hk, k), dim=-1), drawn(rows, hv, v),
        -drawn(*gates).square(), None if kind == "ssd" else drawn(rows, hv).sigmoid(),
    ]  # fmt: skip
    return [None if x is None else x.requires_grad_() for x in given]


def stock(kind: str, rows: list[Any], chunk: int) -> Tensor:
    """transformers' chunk form of one request."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k, v, g, beta = (None if x is None else x[None] for x in rows)
    if kind == "ssd":
        ones = torch.ones(v.shape[2], device="cuda")
        return mamba2_chunk_scan(v / -g[..., None], -g, -ones, k, q, chunk)[0]
    form = chunk_kimi_delta_attention if kind == "kda" else torch_chunk_gated_delta_rule
    group = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q * q.shape[-1] ** 0.5, k))
    return form(q, k, v, g, beta, chunk_size=chunk)[0]


def timed(run: Callable[[], Tensor], leaves: list[Any]) -> dict[str, float]:
    """Median milliseconds of forward and backward."""
    times: list[tuple[float, float]] = []
    for turn in range(REPEATS + 2):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        out = run()
        marks[1].record()
        torch.autograd.grad(out.sum(), [x for x in leaves if x is not None])
        marks[2].record()
        torch.cuda.synchronize()
        if turn > 1:
            times.append((marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])))
    forward, backward = (statistics.median(each) for each in zip(*times, strict=True))
    return {"forward_ms": round(forward, 3), "backward_ms": round(backward, 3)}


def main() -> None:
    """Print and write one record per kind."""
    from zeromismatch.kernels.recurrence import packed_recurrence

    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--only", choices=list(SIZES), nargs="*", default=list(SIZES))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "rows": asked.rows}
    start = torch.tensor([0, asked.rows], device="cuda")
    for kind in asked.only:
        rows, chunk = inputs(kind, asked.rows), SIZES[kind][4]
        ours = timed(lambda r=rows, c=chunk, k=kind: packed_recurrence(k, *r, start, c), rows)  # type: ignore[arg-type]
        found[kind] = {"ours": ours}
        try:
            found[kind]["stock"] = timed(lambda r=rows, c=chunk, k=kind: stock(k, r, c), rows)
        except (RuntimeError, ImportError) as error:
            found[kind]["stock"] = f"{type(error).__name__}: {str(error)[:200]}"
        print(kind, found[kind], file=sys.stderr, flush=True)
        asked.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
