"""Recurrent layers on a GPU beside vLLM's own kernels, at public shapes, in one run.

    python benchmarks/gpu_recurrent.py --only gated_delta --out some.json

Qwen3-Next (gated delta rule, 16 / 32 heads of 128 x 128), Nemotron-H 8B (Mamba-2, 8 groups, 128
heads of 128 x 64), Kimi-Linear (KDA, 32 heads of 128 x 128), and Qwen3-Next's convolution. Prefill
stands beside vLLM's chunk kernels, decode (requests in the middle of a chunk) beside its recurrent
ones. Medians of CUDA graph replays in turn (of events where a call cannot be captured); ratio is
vLLM's time / ours; vLLM's kernels tune themselves first. Processes of one ``--lock`` compile side
by side and time in turn.
"""

# ruff: noqa: E402  (its parts and the package are found beside it)

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
sys.path.insert(0, str(HERE))

from gpu_measure import eager_median, medians
from gpu_tuning import alone, compiling_ahead

from zeromismatch.kernels.convolution import gpu as convolution
from zeromismatch.kernels.recurrence import gpu_blocks
from zeromismatch.kernels.recurrence.gpu_blocks import Shape, shape_of
from zeromismatch.kernels.recurrence.pages import slots_of

BF16, DEVICE = torch.bfloat16, "cuda"
Call = Callable[[], Any]
SIZES = {  # key heads, value heads, key size, value size, chunk
    "gated_delta": (16, 32, 128, 128, 64),
    "kda": (32, 32, 128, 128, 64),
    "ssd": (8, 128, 128, 64, 128),
}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def inputs(kind: str, rows: int) -> tuple[Any, ...]:
    hk, hv, k, v, _ = SIZES[kind]
    unit = torch.nn.functional.normalize
    gates = (hv, k) if kind == "kda" else (hv,)
    q, key = (unit(drawn(rows, hk, k), dim=-1) for _ in range(2))
    beta = None if kind == "ssd" else drawn(rows, hv).sigmoid()
    return q, key, drawn(rows, hv, v), -drawn(rows, *gates).square() * 0.05, beta


def index(counts: list[int], before: int, chunk: int) -> tuple[torch.Tensor, ...]:
    """(start, length, table) with only the pages that a step touches."""
    start = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    length = torch.tensor([each + before for each in counts]).int().to(DEVICE)
    first, last = max(before // chunk - 1, 0), -(-(before + max(counts)) // chunk)
    each = last - first
    table = torch.zeros(len(counts), last, dtype=torch.int32, device=DEVICE)
    pages = torch.arange(len(counts) * each, dtype=torch.int32, device=DEVICE)
    table[:, first:] = pages.view(len(counts), each)
    return start, length, table


def stores(kind: str, pages: int) -> list[torch.Tensor]:
    hk, hv, k, v, chunk = SIZES[kind]
    gates = (hv, k) if kind == "kda" else (hv,)
    decays = -torch.rand(pages, chunk, *gates, device=DEVICE) * 0.05
    ends = drawn(pages, hv, k, v)
    ends.flatten(2).view(BF16)[..., : chunk * chunk] = 1 / chunk  # T of open chunks
    return [
        drawn(pages, chunk, hk, k).to(BF16) * 0.1, drawn(pages, chunk, hv, v).to(BF16),
        decays.cumsum(1), ends,
    ]  # fmt: skip


def shapes(kind: str, shipped: Shape) -> dict[str, Shape]:
    """Launch shapes to be timed, by name."""
    return {"as shipped": shipped}


def ours(kind: str, counts: list[int], before: int) -> dict[str, Call]:
    """Calls of one step by the name of their launch shape."""
    total, chunk = sum(counts), SIZES[kind][4]
    given, where = inputs(kind, total), index(counts, before, chunk)
    kept = stores(kind, int(where[2].max()) + 1)
    rows = [None if x is None else x if i == 3 else x.to(BF16) for i, x in enumerate(given)]
    calls: dict[str, Call] = {}
    shipped = shape_of(total, len(counts), *given[2:4], kind != "ssd", chunk)
    for name, shape in shapes(kind, shipped).items():
        blocks = gpu_blocks.blocks_of(*where[:2], total, chunk, shape)
        calls[name] = lambda b=blocks, s=shape: gpu_blocks.launch(*rows, *kept, *where, b, s)
    return calls


def vllm_delta(kind: str, counts: list[int], before: int) -> Call:
    from vllm.model_executor.layers.fla.ops import (
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule,
    )

    if kind == "kda":
        from vllm.model_executor.layers.fla.ops.kda import chunk_kda as form
        from vllm.model_executor.layers.fla.ops.kda import fused_recurrent_kda as step
    else:
        form, step = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    _, hv, k, v, _ = SIZES[kind]
    q, key, value, g, beta = (x[None].contiguous() for x in inputs(kind, sum(counts)))
    q, key, value, beta = (x.to(BF16) for x in (q, key, value, beta))
    start = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    if not before:
        state = torch.zeros(len(counts), hv, v, k, device=DEVICE)
        return lambda: form(
            q, key, value, g, beta, initial_state=state, output_final_state=True, cu_seqlens=start
        )
    state = drawn(len(counts) + 1, hv, v, k)
    slots = torch.arange(1, len(counts) + 1, dtype=torch.int32, device=DEVICE)
    more = {"use_qk_l2norm_in_kernel": False}
    return lambda: step(
        q, key, value, g, beta, initial_state=state, inplace_final_state=True, cu_seqlens=start,
        ssm_state_indices=slots, **more,
    )  # fmt: skip


def vllm_ssd(counts: list[int], before: int) -> Call:
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    groups, heads, k, v, chunk = SIZES["ssd"]
    total = sum(counts)
    c, b, x = (drawn(total, n, w).to(BF16) for n, w in ((groups, k), (groups, k), (heads, v)))
    dt, rate = torch.rand(total, heads, device=DEVICE) * 0.1, -torch.ones(heads, device=DEVICE)
    out = torch.empty_like(x)
    if before:
        state = drawn(total + 1, heads, v, k)
        slots = torch.arange(1, total + 1, dtype=torch.int32, device=DEVICE)
        zeros = torch.zeros(heads, device=DEVICE)
        wide_rate = rate[:, None, None].expand(heads, v, k)
        skip, bias = (zeros[:, None].expand(heads, v) for _ in range(2))
        step = dt[:, :, None].expand(total, heads, v)
        return lambda: selective_state_update(
            state, x, step, wide_rate, b, c, skip, dt_bias=bias, state_batch_indices=slots, out=out
        )
    start = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    pieces = torch.arange(0, total + 1, chunk, device=DEVICE, dtype=torch.int32)
    owner = torch.repeat_interleave(
        torch.arange(len(counts), device=DEVICE), torch.tensor(counts, device=DEVICE) // chunk
    ).int()
    last = (torch.tensor(counts).cumsum(0) // chunk - 1).to(DEVICE)
    return lambda: mamba_chunk_scan_combined_varlen(
        x, dt, rate, b, c, chunk, start, pieces, last, owner, out, state_dtype=torch.float32
    )


Work = tuple[str, dict[str, Call], Callable[[], Call]]
"""A row's name, calls of ours, and what makes vLLM's call."""


def recurrences(kind: str) -> Iterator[Work]:
    middle = 4 * SIZES[kind][4] + SIZES[kind][4] // 2
    other = vllm_ssd if kind == "ssd" else lambda *rest: vllm_delta(kind, *rest)
    for name, counts, before in (
        ("prefill 8192", [8192], 0), ("decode 256", [1] * 256, middle),
        ("decode 64", [1] * 64, middle), ("prefill 8 x 2048", [2048] * 8, 0),
    ):  # fmt: skip
        if kind == "kda" and sum(counts) > 8192:
            counts, name = [1024] * 4, "prefill 4 x 1024"
        yield name, ours(kind, counts, before), partial(other, counts, before)


def convolutions() -> Iterator[Work]:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import (
        causal_conv1d_fn,
        causal_conv1d_update,
    )

    channels, chunk, taps = 8192, 64, 4
    weight = drawn(channels, taps).to(BF16)
    for name, counts, before in (("prefill 8192", [8192], 0), ("decode 256", [1] * 256, 100)):
        where = index(counts, before, chunk)
        x = drawn(sum(counts), channels).to(BF16)
        pages = drawn(int(where[2].max()) + 1, chunk, channels).to(BF16)
        slot = slots_of(*where, chunk)
        calls: dict[str, Call] = {
            f"{columns} columns": lambda c=columns, x=x, p=pages, w=where, s=slot: (
                convolution.launch(x, weight, None, True, p, *w, s, columns=c)
            )
            for columns in (256, 512, 1024)
        }
        state = drawn(len(counts) + 1, channels, taps - 1).to(BF16)
        slots = torch.arange(1, len(counts) + 1, dtype=torch.int32, device=DEVICE)
        fresh = torch.zeros(len(counts), dtype=torch.bool, device=DEVICE)
        if before:
            stock = lambda x=x, s=state, i=slots: causal_conv1d_update(  # noqa: E731
                x, s, weight, None, "silu", conv_state_indices=i
            )
        else:
            stock = lambda x=x, s=state, i=slots, f=fresh, w=where: causal_conv1d_fn(  # noqa: E731
                x.t(), weight, None, s, w[0], cache_indices=i, has_initial_state=f
            )
        yield name, calls, lambda stock=stock: stock


def attempt(name: str, call: Call, failed: list[str]) -> bool:
    """Whether a first call ends well; what it says otherwise is kept."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  (the others are still worth their time)
        traceback.print_exc()
        failed.append(f"{name}: {error!r}"[:300])
        return False
    return True


def measured(calls: dict[str, Call], row: dict[str, Any]) -> None:
    """Microseconds of each call into ``row``: graph replays in turn, or events, which it says."""
    try:
        times = medians(*([call] * 4 for call in calls.values()), repeats=7)
        row["timed by"] = "graph replays"
    except Exception as error:  # noqa: BLE001  (one that cannot be captured)
        torch.cuda.synchronize()
        times = [eager_median(call) for call in calls.values()]
        row["timed by"] = f"events, since {error!r}"[:300]
    took = {name: ms * 1e3 for name, ms in zip(calls, times, strict=True)}
    if "vllm" in took:
        row["vllm_us"] = took.pop("vllm")
        row["ratio"] = row["vllm_us"] / min(took.values())
    row["ours_us"] = took


def main() -> None:
    """Compile, then time a row at a time; the JSON is written after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*SIZES, "convolution"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lock", type=Path, default=Path("/tmp/zm-gpu.lock"))
    parser.add_argument("--threads", type=int, default=4)
    arguments = parser.parse_args()
    works = convolutions() if arguments.only == "convolution" else recurrences(arguments.only)
    results: dict[str, Any] = {"card": torch.cuda.get_device_name(), "rows": {}, "failed": []}
    began = time.perf_counter()

    def say(*what: object) -> None:
        arguments.out.write_text(json.dumps(results, indent=1))
        print(f"{time.perf_counter() - began:.0f} s", arguments.only, *what, flush=True)

    with torch.no_grad(), open(arguments.lock, "w") as lock:
        for name, calls, other in works:
            row, failed = results["rows"].setdefault(name, {}), results["failed"]
            calls = {k: call for k, call in calls.items() if attempt(f"{name}, {k}", call, failed)}
            say(name, "ours compiled")
            with alone(lock):
                measured(calls, row)
            say(name, row)
            try:
                stock = other()
            except Exception as error:  # noqa: BLE001  (ours are timed all the same)
                failed.append(f"{name}, vllm: {error!r}"[:300])
                continue
            with compiling_ahead(arguments.threads, lambda: alone(lock)):
                if not attempt(f"{name}, vllm", stock, failed):
                    continue
            say(name, "vLLM's compiled and tuned")
            with alone(lock):
                measured({**calls, "vllm": stock}, row)
            say(name, row)


if __name__ == "__main__":
    main()
