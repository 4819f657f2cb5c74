"""The causal convolution: one set of bits for every cut over pages; gradients; refusals."""

import random

import pytest
import torch
from torch.nn import functional

from zeromismatch.kernels import bits
from zeromismatch.kernels.accumulation import Accumulators
from zeromismatch.kernels.convolution import (
    new_convolution_cache,
    packed_convolution,
    paged_convolution,
)
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.recurrence import RowBatch

CHUNK, CHANNELS = 8, 21
LENGTHS = (1, 2, 27, 0, 20)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0)
DTYPES = (torch.float32, torch.bfloat16)


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stock(x, weight, bias, silu):
    """Transformers' way, in the dtype of its arguments."""
    parts = []
    for first, last in zip(STARTS[:-1].tolist(), STARTS[1:].tolist(), strict=True):
        if last > first:
            z = functional.conv1d(
                x[first:last].t()[None], weight[:, None], bias, padding=weight.shape[1] - 1,
                groups=len(weight),
            )[0, :, : last - first]  # fmt: skip
            parts.append((functional.silu(z) if silu else z).t())
    return torch.cat(parts)


def served(x, weight, bias, activation, *, seed=0):
    """Every request in random pieces, mixed batches, on shuffled pages full of NaN."""
    chance, cache = random.Random(seed), new_convolution_cache(16, CHUNK, CHANNELS, dtype=x.dtype)
    cache.rows.fill_(float("nan"))
    free = chance.sample(range(16), 16)
    tables = [[free.pop() for _ in range(-(-length // CHUNK))] for length in LENGTHS]
    done, out = [0] * len(LENGTHS), torch.full_like(x, float("nan"))
    while done != list(LENGTHS):
        rows, slot, start, length = [], [], [0], []
        for r, (before, total) in enumerate(zip(done, LENGTHS, strict=True)):
            after = min(before + chance.choice((0, 1, 1, 3, 9)), total)
            rows += range(int(STARTS[r]) + before, int(STARTS[r]) + after)
            slot += [tables[r][p // CHUNK] * CHUNK + p % CHUNK for p in range(before, after)]
            start.append(len(rows))
            length.append(after)
            done[r] = after
        table = [(pages + [10**6] * 4)[:4] for pages in tables]
        ints = (torch.tensor(each, dtype=torch.int32) for each in (start, length, table))
        batch, index = RowBatch(*ints, torch.tensor(slot).long()), torch.tensor(rows).long()
        out[index] = paged_convolution(x[index], weight, bias, activation, cache, batch)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_every_cut_over_pages_gives_the_bits_of_the_packed_forward(dtype, taps, activation):
    x, weight = drawn(50, CHANNELS, dtype=dtype), drawn(CHANNELS, taps, dtype=dtype, seed=1)
    bias = drawn(CHANNELS, dtype=dtype, seed=2) if taps != 3 else None
    wanted = packed_convolution(x, weight, bias, activation, STARTS)
    for seed in range(3):
        assert bits.equal(served(x, weight, bias, activation, seed=seed), wanted)
    exact = stock(x.double(), weight.double(), None if bias is None else bias.double(), activation)
    own, theirs = ((each.double() - exact).abs().max() for each in
                   (wanted, stock(x, weight, bias, activation)))  # fmt: skip
    assert float(own) <= 2 * float(theirs)


def test_gradients_against_fp64_and_in_micro_batches():
    tensors = drawn(50, CHANNELS), drawn(CHANNELS, 4, seed=1), drawn(CHANNELS, seed=2)
    x, weight, bias = (each.requires_grad_() for each in tensors)
    up = drawn(50, CHANNELS, seed=3)
    got = torch.autograd.grad(
        packed_convolution(x, weight, bias, "silu", STARTS), (x, weight, bias), up
    )
    wide = [each.detach().double().requires_grad_() for each in tensors]
    wanted = torch.autograd.grad(stock(*wide, True), wide, up.double())
    for a, b in zip(got, wanted, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < 1e-6
    kept = weight.detach()[:, None].requires_grad_()  # as modules hold it: [D, 1, W]
    sums = Accumulators({"w": kept, "b": bias})
    for first, last in ((0, 2), (2, 5)):  # whole requests each
        rows = slice(int(STARTS[first]), int(STARTS[last]))
        start = STARTS[first : last + 1] - STARTS[first]
        with sums.micro_batch():
            packed_convolution(x[rows], kept[:, 0], bias, "silu", start).backward(up[rows])
    for name, whole in (("w", got[1][:, None]), ("b", got[2])):
        assert bits.equal(sums.gradient(name), whole)


def test_what_does_not_fit_is_refused():
    x, weight = drawn(4, CHANNELS), drawn(CHANNELS, 4)
    start = torch.tensor([0, 4])
    with pytest.raises(ContractError, match="1 to 4 taps"):
        packed_convolution(x, drawn(CHANNELS, 5), None, None, start)
    with pytest.raises(ContractError, match="of one dtype"):
        packed_convolution(x, weight.bfloat16(), None, None, start)
    with pytest.raises(ContractError, match="one per channel"):
        packed_convolution(x, weight, drawn(3), None, start)
    with pytest.raises(ContractError, match="no contract for the activation 'gelu'"):
        packed_convolution(x, weight, None, "gelu", start)
    with pytest.raises(ContractError, match="take at least 3"):
        new_convolution_cache(4, 2, CHANNELS, dtype=torch.float32)
    ints = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1], [6], [[0]]))
    inside = RowBatch(*ints, torch.tensor([5]))  # nobody wrote the five rows before
    cache = new_convolution_cache(2, CHUNK, CHANNELS, dtype=torch.float32)
    with pytest.raises(ContractError, match="0 rows are there"):
        paged_convolution(x[:1], weight, None, None, cache, inside)
