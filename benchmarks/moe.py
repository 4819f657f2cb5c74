"""A mixture of experts at the shapes of Qwen3-30B-A3B, beside vLLM's fused experts and torch.

    python benchmarks/moe.py --out benchmarks/moe_results.json

One H200, bf16, hidden 2048, 128 experts of 768, top-k 8, a router's skewed loads; medians of graph
replays in one run, interleaved. *forward*: sort, two grouped products, gated product, combine,
from given choices, as in vLLM's ``fused_experts`` (with its own tuned launch shapes where it ships
them). *forward + backward*: beside torch's grouped_mm and a loop over experts, by events.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from zeromismatch.kernels import moe
from zeromismatch.kernels.gated import silu_mul

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
TOKENS = (1, 16, 64, 128, 512, 2048, 8192)


def ours(x: Any, chosen: Any, weights: Any, up: Any, down: Any) -> Any:
    """The experts of one layer."""
    gate, value = moe.grouped_linear(x, chosen, up).chunk(2, dim=-1)
    shape = (*chosen.shape, INNER)
    inner = silu_mul(gate.reshape(-1, INNER), value.reshape(-1, INNER)).view(shape)
    return moe.combine(moe.grouped_linear(inner, chosen, down), weights)


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
    for expert in range(EXPERTS):
        token, slot = torch.where(chosen == expert)
        gate, value = torch.nn.functional.linear(x[token], up[expert]).chunk(2, -1)
        y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * value, down[expert])
        out.index_add_(0, token, y * weights[token, slot, None].to(y.dtype))
    return out


def vllm_experts() -> Any:
    """vLLM's fused experts with the same arguments, or None."""
    try:
        from vllm.model_executor.layers.fused_moe import fused_experts
    except ImportError as error:
        print("vLLM is not here:", error)
        return None
    return lambda x, chosen, weights, up, down: fused_experts(
        x, up, down, weights, chosen.to(torch.int32)
    )


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


def data(tokens: int) -> Any:
    """Inputs, and choices of a router with skewed loads."""
    generator = torch.Generator("cuda").manual_seed(tokens)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).bfloat16()

    popular = torch.randn(EXPERTS, generator=generator, device="cuda") * 0.7
    z = torch.randn(tokens, EXPERTS, generator=generator, device="cuda") + popular
    routing = moe.Routing(num_experts=EXPERTS, top_k=TOP_K, scoring="softmax", normed=True)
    chosen = moe.topk(z, routing)
    weights = moe.topk_weights(z, chosen, routing)
    up = normal(EXPERTS, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5)
    down = normal(EXPERTS, HIDDEN, INNER, scale=INNER**-0.5)
    return normal(tokens, HIDDEN), chosen, weights, up, down


def trained(run: Any, arguments: Any) -> Any:
    """Forward and backward."""
    x, chosen, weights, up, down = arguments
    leaves = [each.detach().requires_grad_() for each in (x, weights, up, down)]

    def call() -> None:
        x, weights, up, down = leaves
        out = run(x, chosen, weights, up, down)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    return call


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rows: list[dict[str, Any]] = []
    vllm = vllm_experts()
    for tokens in TOKENS:
        arguments = data(tokens)
        calls = {"ours": captured(ours, arguments), "grouped_mm": captured(grouped_mm, arguments)}
        if vllm is not None:
            calls["vllm"] = captured(vllm, arguments)
        rows.append({"what": "forward", "tokens": tokens} | median_us(calls))
        print(rows[-1], flush=True)
    for tokens in (2048, 8192):
        arguments = data(tokens)
        runs = {"ours": ours, "grouped_mm": grouped_mm, "loop": loop}
        calls = {name: trained(run, arguments) for name, run in runs.items()}
        rows.append({"what": "both", "tokens": tokens} | median_us(calls, rounds=5, repeat=2))
        print(rows[-1], flush=True)
    device = torch.cuda.get_device_name()
    found = {"device": device, "torch": torch.__version__, "rows": rows}
    out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
