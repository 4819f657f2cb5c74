"""Experts over several ranks against one rank that holds them all: differing bits, counted.

    torchrun --nproc-per-node 2 benchmarks/moe_parallel.py --out OUT.json     # NCCL, a GPU a rank
    torchrun --nproc-per-node 4 benchmarks/moe_parallel.py --out OUT.json --device cpu    # gloo

One mixture (16 experts, top-k 4, and the widths of Qwen3-30B-A3B's on GPUs), tokens split unevenly
over the ranks. Every rank computes its share; the first also computes everything alone, and
compares outputs and the gradients of tokens, weights and both stacks of experts.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeromismatch.kernels import bits, moe
from zeromismatch.kernels.gated import silu_mul
from zeromismatch.trainer.expert_parallel import expert_parallel

EXPERTS, TOP_K = 16, 4
NAMES = ("output", "d_x", "d_weights", "d_gate_up", "d_down")
CASES = {  # name -> (tokens on a GPU, on a CPU)
    "skewed loads": (1025, 65),
    "4,097 tokens": (4097, 129),
    "all tokens to one group of experts": (513, 33),
    "one token": (1, 1),
    "ties in every row": (257, 33),
}


def layer(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """x, chosen, weights, gate_up, down and the gradient of the output; equal on every rank."""
    on_gpu = device.type == "cuda"
    hidden, inner = (2048, 768) if on_gpu else (72, 40)
    tokens = CASES[name][0 if on_gpu else 1]
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    logits = torch.randn(tokens, EXPERTS, generator=generator)
    logits += torch.linspace(-1.0, 1.0, EXPERTS)
    if "one group" in name:
        logits[:, :TOP_K] += 100.0
    if "ties" in name:
        logits = torch.zeros_like(logits)
        logits[:, EXPERTS // 2 - 2 :] = 1.0
    routing = moe.Routing(num_experts=EXPERTS, top_k=TOP_K, scoring="softmax", normed=True)
    logits = logits.to(device)
    chosen = moe.topk(logits, routing)
    weights = moe.topk_weights(logits, chosen, routing)
    return (
        normal(tokens, hidden), chosen, weights, normal(EXPERTS, 2 * inner, hidden, scale=0.03),
        normal(EXPERTS, hidden, inner, scale=0.03), normal(tokens, hidden),
    )  # fmt: skip


def whole(given: tuple[Tensor, ...]) -> list[Tensor]:
    """Everything on one rank, by the operators that a model calls."""
    x, chosen, weights, gate_up, down, upstream = given
    leaves = [each.clone().requires_grad_() for each in (x, weights, gate_up, down)]
    gate, up = moe.grouped_linear(leaves[0], chosen, leaves[2]).chunk(2, dim=-1)
    out = moe.combine(moe.grouped_linear(silu_mul(gate, up), chosen, leaves[3]), leaves[1])
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def share(given: tuple[Tensor, ...], rank: int, ranks: int) -> list[Tensor]:
    """This rank's tokens and experts; the first rank owns two thirds of the tokens."""
    x, chosen, weights, gate_up, down, upstream = given
    bounds = [0, *(-(-2 * len(x) // 3) + i * (len(x) // (3 * ranks)) for i in range(ranks - 1))]
    tokens = slice(bounds[rank], (*bounds, len(x))[rank + 1])
    experts = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    parts = (x[tokens], weights[tokens], gate_up[experts], down[experts])
    mine = [each.clone().requires_grad_() for each in parts]
    out = expert_parallel(mine[0], chosen[tokens], mine[1], mine[2], mine[3], silu_mul)
    return [out.detach(), *torch.autograd.grad(out, mine, upstream[tokens])]


def main() -> None:
    """Compute, gather, compare, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device(asked.device, local) if asked.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows: list[dict[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float32):
        for name in CASES:
            given = layer(name, dtype, device)
            mine = [each.cpu() for each in share(given, rank, ranks)]
            held: list[Any] = [None] * ranks
            dist.gather_object(mine, held if rank == 0 else None)
            if rank:
                continue
            for what, wanted, *parts in zip(NAMES, whole(given), *held, strict=True):
                got, wanted = torch.cat(parts), wanted.cpu()
                differing = int((bits.int_view(got) != bits.int_view(wanted)).sum())
                rows.append(
                    {"dtype": str(dtype), "case": name, "what": what, "elements": got.numel(),
                     "differing": differing, "nonzero": int((wanted != 0).sum())}
                )  # fmt: skip
                print(rows[-1], flush=True)
            found = {
                "ranks": ranks, "backend": dist.get_backend(), "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "elements": sum(row["elements"] for row in rows),
                "differing": sum(row["differing"] for row in rows), "rows": rows,
            }  # fmt: skip
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
