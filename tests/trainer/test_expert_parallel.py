"""Experts over 1, 2 and 4 gloo ranks: outputs and gradients of one process, bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from zeromismatch.kernels import bits, cases_moe, moe
from zeromismatch.kernels.errors import UsageError
from zeromismatch.kernels.gated import silu_mul
from zeromismatch.trainer.expert_parallel import expert_parallel, plan_route

TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 24, 8, 4, 40, 24


def layer(dtype):
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    chosen = cases_moe.chosen(TOKENS, EXPERTS, TOP_K, 6)  # expert 7 has none, expert 1 has all
    return (
        normal(TOKENS, HIDDEN), chosen, torch.rand(TOKENS, TOP_K, generator=generator),
        normal(EXPERTS, 2 * INNER, HIDDEN), normal(EXPERTS, HIDDEN, INNER), normal(TOKENS, HIDDEN),
    )  # fmt: skip


def whole(dtype):
    x, chosen, weights, gate_up, down, up = layer(dtype)
    leaves = [each.requires_grad_() for each in (x, weights, gate_up, down)]
    gate, value = moe.grouped_linear(x, chosen, gate_up).chunk(2, dim=-1)
    out = moe.combine(moe.grouped_linear(silu_mul(gate, value), chosen, down), weights)
    return (out.detach(), *torch.autograd.grad(out, leaves, up))


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def share(dtype, rank, ranks):
    """Output and gradients of one rank's tokens and experts."""
    x, chosen, weights, gate_up, down, up = layer(dtype)
    tokens = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    experts = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    parts = (x[tokens], weights[tokens], gate_up[experts], down[experts])
    mine = [each.clone().requires_grad_() for each in parts]
    out = expert_parallel(mine[0], chosen[tokens], mine[1], *mine[2:], silu_mul)
    return (out.detach(), *torch.autograd.grad(out, mine, up[tokens]))


def start(rank, ranks, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )


def uneven(rank):
    """What a rank hears when 8 experts are spread over 3 ranks: 3, 3 and 2."""
    x, chosen, weights, gate_up, down, _ = layer(torch.float32)
    mine = slice(3 * rank, min(3 * rank + 3, EXPERTS))
    try:
        expert_parallel(x, chosen, weights, gate_up[mine], down[mine], silu_mul)
    except UsageError as error:
        return str(error)
    return "accepted"


def uneven_worker(rank, ranks, folder):
    start(rank, ranks, folder)
    try:
        Path(f"{folder}/{rank}.txt").write_text(uneven(rank))
    finally:
        dist.destroy_process_group()


def worker(rank, ranks, folder):
    torch.set_num_threads(1)
    start(rank, ranks, folder)
    try:
        found = {name: share(dtype, rank, ranks) for name, dtype in DTYPES.items()}
        everything_to_last = torch.full((5000, 1), EXPERTS - 1)
        found["blocks"] = plan_route(everything_to_last, EXPERTS // ranks).blocks
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def check(found):
    names = ("output", "d_x", "d_weights", "d_gate_up", "d_down")
    for dtype_name, dtype in DTYPES.items():
        parts = [each[dtype_name] for each in found]
        for name, wanted, *shares in zip(names, whole(dtype), *parts, strict=True):
            assert bits.equal(torch.cat(shares), wanted), (dtype_name, name)


def test_one_rank_has_the_bits_of_plain_experts_and_foreign_experts_are_refused(tmp_path: Path):
    start(0, 1, tmp_path)
    try:
        check([{name: share(dtype, 0, 1) for name, dtype in DTYPES.items()}])
        x, chosen, weights, gate_up, down, _ = layer(torch.float32)
        with pytest.raises(UsageError, match="divides the experts"):
            expert_parallel(x, chosen, weights, gate_up[:4], down[:4], silu_mul)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_bits_of_one_process(tmp_path: Path, ranks):
    mp.spawn(worker, (ranks, str(tmp_path)), nprocs=ranks)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    check(found)
    blocks = torch.arange(5000 * ranks) // moe.TOKEN_BLOCK  # of the whole batch, in its order
    assert bits.equal(torch.cat([each["blocks"] for each in found]), blocks)


@pytest.mark.slow
def test_experts_that_the_ranks_do_not_divide_are_refused_by_every_rank(tmp_path: Path):
    mp.spawn(uneven_worker, (3, str(tmp_path)), nprocs=3)
    for rank in range(3):
        assert "hold 3, 3, 2 experts" in (tmp_path / f"{rank}.txt").read_text()
