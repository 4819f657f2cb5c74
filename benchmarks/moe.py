"""A mixture of experts at the shapes of Qwen3-30B-A3B, beside vLLM's fused experts and torch.

    python benchmarks/moe.py --out benchmarks/moe_results.json [--sweep --seconds 300]

One H200, bf16, hidden 2048, 128 experts of 768, top-k 8, a router's skewed loads; medians in one
run, interleaved. *forward*: graph replays from given choices to combined rows, as in vLLM's
``fused_experts`` (``vllm.model_executor.layers.fused_moe``), which takes its own tuned launch
shapes where it ships them. *both*: forward and backward in a graph, beside torch's grouped_mm;
*both, no graph*: as called from Python, with a loop over experts, which no graph can hold.
``--sweep`` times other launch shapes of our products, which have the same bits.
"""

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from zeromismatch.kernels import bits, moe
from zeromismatch.kernels.gated import silu_mul
from zeromismatch.kernels.moe import gpu_launch as launch

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
TOKENS = (1, 2, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BOTH = (512, 2048, 8192)
Tile = launch.GroupedTile
_OPEN = contextlib.ExitStack()
SHAPES = (
    Tile(16, 64, 64, 4, 5), Tile(16, 64, 128, 4, 3), Tile(16, 128, 128, 4, 2),
    Tile(16, 128, 128, 4, 3), Tile(32, 128, 128, 4, 3), Tile(32, 256, 128, 8, 2),
    Tile(64, 128, 64, 4, 3), Tile(64, 128, 64, 4, 4), Tile(64, 256, 64, 8, 4),
    Tile(128, 128, 64, 8, 4, 8), Tile(128, 256, 64, 8, 4), Tile(128, 256, 64, 8, 3),
    Tile(128, 256, 64, 8, 4, 16),
)  # fmt: skip
WEIGHT_SHAPES = (
    Tile(64, 128, 32, 4, 3), Tile(128, 128, 32, 8, 4), Tile(128, 128, 64, 8, 3),
    Tile(128, 256, 32, 8, 4), Tile(128, 256, 64, 8, 3), Tile(64, 256, 64, 8, 3),
)  # fmt: skip


def ours(x: Any, chosen: Any, weights: Any, up: Any, down: Any) -> Any:
    """The experts of one layer."""
    gate, value = moe.grouped_linear(x, chosen, up).chunk(2, dim=-1)
    return moe.combine(moe.grouped_linear(silu_mul(gate, value), chosen, down), weights)


def grouped_mm(x: Any, chosen: Any, weights: Any, up: Any, down: Any) -> Any:
    """transformers' way, by torch's grouped product."""
    owner, order = torch.sort(chosen.flatten())
    ends = torch.searchsorted(owner, torch.arange(EXPERTS, device=x.device), right=True)
    ends = ends.to(torch.int32)
    rows = x[order // TOP_K]
    gate, value = torch.nn.functional.grouped_mm(rows, up.transpose(1, 2), offs=ends).chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * value
    out = torch.nn.functional.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return (out[back].view(*chosen.shape, HIDDEN) * weights[..., None].to(out.dtype)).sum(1)


def loop(x: Any, chosen: Any, weights: Any, up: Any, down: Any) -> Any:
    """One dense product after the other."""
    out = torch.zeros_like(x)
    for expert, (first, second) in enumerate(zip(up.unbind(), down.unbind(), strict=True)):
        token, slot = torch.where(chosen == expert)
        gate, value = torch.nn.functional.linear(x[token], first).chunk(2, -1)
        y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * value, second)
        out.index_add_(0, token, y * weights[token, slot, None].to(y.dtype))
    return out


def vllm_experts() -> tuple[Any, dict[str, Any]]:
    """vLLM's fused experts with the same arguments, and what they run with; None without it."""
    try:
        import vllm
        from vllm.model_executor.layers.fused_moe import fused_experts
        from vllm.model_executor.layers.fused_moe.fused_moe import (
            get_config_file_name,
            get_moe_configs,
        )
    except ImportError as error:
        print("vLLM is not here:", error)
        return None, {"vllm": f"absent: {error}"}
    with contextlib.suppress(Exception):  # some releases ask for a config outside an engine
        from vllm.config import VllmConfig, set_current_vllm_config

        _OPEN.enter_context(set_current_vllm_config(VllmConfig()))
    tuned = get_moe_configs(EXPERTS, INNER, None)
    facts = {
        "vllm": vllm.__version__,
        "vllm_launch_shapes": get_config_file_name(EXPERTS, INNER, None)
        if tuned
        else "vLLM's default, since it ships none for this device",
    }

    def run(x: Any, ids: Any, weights: Any, up: Any, down: Any) -> Any:
        return fused_experts(x, up, down, weights, ids)

    return run, facts


def captured(run: Any, arguments: Any) -> Any:
    """A graph of one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*arguments)
    return graph.replay


def median_us(calls: dict[str, Any], rounds: int = 15, repeat: int = 10) -> dict[str, float]:
    """Medians of interleaved rounds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, call in calls.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(repeat):
                call()
            last.record()
            torch.cuda.synchronize()
            found[name].append(first.elapsed_time(last) * 1000 / repeat)
    return {name: statistics.median(times) for name, times in found.items()}


def normal(*shape: int, seed: int, scale: float = 1.0) -> Any:
    """bf16, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).bfloat16()


def stacks() -> Any:
    """Both stacks of experts."""
    return (
        normal(EXPERTS, 2 * INNER, HIDDEN, seed=1, scale=HIDDEN**-0.5),
        normal(EXPERTS, HIDDEN, INNER, seed=2, scale=INNER**-0.5),
    )


def data(tokens: int, weights_of_experts: Any) -> Any:
    """Inputs, and choices of a router with skewed loads."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    popular = torch.randn(EXPERTS, generator=generator, device="cuda") * 0.7
    z = torch.randn(tokens, EXPERTS, generator=generator, device="cuda") + popular
    weights, chosen = z.softmax(-1).topk(TOP_K)
    weights /= weights.sum(-1, keepdim=True)
    return normal(tokens, HIDDEN, seed=tokens), chosen, weights, *weights_of_experts


def trained(run: Any, arguments: Any) -> Any:
    """Forward and backward."""
    x, chosen, weights, up, down = arguments
    leaves = [each.detach().requires_grad_() for each in (x, weights, up, down)]
    upstream = torch.ones_like(x)

    def call() -> None:
        x, weights, up, down = leaves
        torch.autograd.grad(run(x, chosen, weights, up, down), leaves, upstream)

    return call


def swept(arguments: Any) -> dict[str, float]:
    """Microseconds of the forward by launch shape; the bits of all are compared."""
    own = launch.tile_for
    expected, calls = ours(*arguments), {}
    try:
        for tile in SHAPES:
            launch.tile_for = lambda *_, tile=tile: tile
            assert bits.equal(ours(*arguments), expected), tile
            calls[str((tile.bm, tile.bn, tile.bk, tile.warps, tile.stages, tile.group))] = captured(
                ours, arguments
            )
    finally:
        launch.tile_for = own
    return median_us(calls, rounds=5, repeat=5)


def swept_weights(arguments: Any) -> dict[str, float]:
    """Microseconds of both weight gradients by launch shape."""
    x, chosen, _, up, down = arguments
    slots = chosen.numel()
    pairs = [(normal(slots, 2 * INNER, seed=7), x, up), (normal(slots, HIDDEN, seed=8),
             normal(slots, INNER, seed=9), down)]  # fmt: skip
    outs = [torch.empty_like(stack) for _, _, stack in pairs]
    calls = {}
    for tile in WEIGHT_SHAPES:

        def call(tile: Any = tile) -> None:
            for (grad, rows, _), out in zip(pairs, outs, strict=True):
                launch.grouped_weight(grad, rows, chosen, EXPERTS, out, accumulate=False, tile=tile)

        calls[str((tile.bm, tile.bn, tile.bk, tile.warps, tile.stages))] = call
    return median_us(calls, rounds=3, repeat=2)


def compiled(part: int, parts: int, vllm: Any, shapes: tuple[Tile, ...]) -> None:
    """Compile a share of what is timed, so that several processes warm Triton's cache."""
    weights = stacks()
    x, chosen, _, up, down = data(64, weights)
    slots = chosen.numel()
    wide, narrow = (normal(slots, each, seed=3) for each in (2 * INNER, INNER))
    used = [launch.LARGE, *(tile for _, tile in launch.TILES)]
    for tile in [*used, *(each for each in shapes if each not in used)][part::parts]:
        launch.grouped(x, chosen, up, tile=tile)
        launch.grouped(narrow, chosen, down, tile=tile)
        if tile in used:
            launch.grouped(wide, chosen, up, transposed=True, out_dtype=torch.float32, tile=tile)
    for tile in (WEIGHT_SHAPES if shapes else (launch.WEIGHT_FEW, launch.WEIGHT))[part::parts]:
        out = torch.empty_like(up)
        launch.grouped_weight(wide, x, chosen, EXPERTS, out, accumulate=False, tile=tile)
    for tokens in TOKENS[part::parts] if vllm is not None else ():
        x, chosen, *rest = data(tokens, weights)
        vllm(x, chosen.to(torch.int32), *rest)
    torch.cuda.synchronize()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("moe_results.json"))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only-used", action="store_true", help="compile no shape of the sweep")
    parser.add_argument("--compile", metavar="PART/PARTS", help="fill Triton's cache, time nothing")
    asked = parser.parse_args()
    began = time.perf_counter()
    vllm, facts = vllm_experts()
    if asked.compile:
        part, _, parts = asked.compile.partition("/")
        return compiled(int(part), int(parts), vllm, () if asked.only_used else SHAPES)
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **facts,
    }

    def keep(what: str, tokens: int, times: dict[str, float]) -> None:
        rows.append({"what": what, "tokens": tokens} | times)
        print(f"{time.perf_counter() - began:.0f} s", rows[-1], flush=True)
        asked.out.write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n")

    weights = stacks()
    for tokens in TOKENS:
        arguments = data(tokens, weights)
        calls = {"ours": captured(ours, arguments), "grouped_mm": captured(grouped_mm, arguments)}
        if vllm is not None:  # its router gives int32
            x, chosen, *rest = arguments
            try:
                calls["vllm"] = captured(vllm, (x, chosen.to(torch.int32), *rest))
            except Exception as error:  # noqa: BLE001  reported, and the others are measured
                found["vllm_error"], vllm = f"{type(error).__name__}: {error}"[:500], None
        keep("forward", tokens, median_us(calls))
    for tokens in BOTH:
        arguments = data(tokens, weights)
        runs = {"ours": ours, "grouped_mm": grouped_mm, "loop": loop}
        calls = {name: trained(run, arguments) for name, run in runs.items()}
        graphs = {name: captured(calls[name], ()) for name in ("ours", "grouped_mm")}
        keep("both", tokens, median_us(graphs, rounds=7, repeat=3))
        keep("both, no graph", tokens, median_us(calls, rounds=5, repeat=2))
    for tokens in (8192, 2048, 512, 64, 256, 16, 1) if asked.sweep else ():
        if time.perf_counter() - began > asked.seconds:
            break
        arguments = data(tokens, weights)
        if tokens >= BOTH[0]:
            keep("weight gradients by launch shape", tokens, swept_weights(arguments))
        keep("forward by launch shape", tokens, swept(arguments))


if __name__ == "__main__":
    main()
