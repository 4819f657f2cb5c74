"""Recurrences on a GPU: any cut, company and launch shape, captured graphs, red controls."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.recurrence import gpu, gpu_blocks
from zeromismatch.kernels.recurrence.pages import slots_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SIZES = {  # key heads, value heads, key size, value size, chunk
    "gated_delta": (2, 4, 128, 128, 64),
    "ssd": (1, 4, 128, 64, 128),
    "kda": (2, 2, 128, 128, 64),
}
BLOCKS = tuple(gpu_blocks.CONTRACTS)
OTHER = gpu_blocks.reference.keywords["shape"]
CASES = [*((kind, True) for kind in BLOCKS), *((kind, False) for kind in SIZES)]


def drawn(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda")


def inputs(kind, rows, blocks, seed=0):
    hk, hv, k, v, _ = SIZES[kind]
    unit = torch.nn.functional.normalize
    q, key = (unit(drawn(rows, hk, k, seed=seed + i), dim=-1) for i in (1, 2))
    gates = (hv, k) if kind == "kda" else (hv,)
    given = (
        q, key, drawn(rows, hv, v, seed=seed + 3), -drawn(rows, *gates, seed=seed + 4).square(),
        None if kind == "ssd" else drawn(rows, hv, seed=seed + 5).sigmoid(),
    )  # fmt: skip
    if not blocks:
        return given
    return tuple(x if x is None or i == 3 else x.bfloat16() for i, x in enumerate(given))


def pages(kind, count, blocks):
    hk, hv, k, v, chunk = SIZES[kind]
    dtype = torch.bfloat16 if blocks else torch.float32
    nan = lambda *shape, dtype=torch.float32: torch.full(  # noqa: E731
        shape, float("nan"), dtype=dtype, device="cuda"
    )
    gates = (hv, k) if kind == "kda" else (hv,)
    return (
        nan(count, chunk, hk, k, dtype=dtype), nan(count, chunk, hv, v, dtype=dtype),
        nan(count, chunk, *gates), nan(count, hv, k, v),
    )  # fmt: skip


def step(kind, blocks, given, stores, counts, lengths, table, **shape):
    start = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    where = (start, torch.tensor(lengths, device="cuda").int(), table)
    if blocks:
        return gpu_blocks.launch(*given, *stores, *where, shape=shape.get("shape"))
    return gpu.launch(*given, *stores, *where, slots_of(*where, SIZES[kind][4]), **shape)


def table_of(*rows):
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


def others(kind, given, rows):
    """The reference's launch shape, and the other walks over states that are shipped."""
    shipped = gpu_blocks.shape_of(rows, 1, *given[2:4], kind != "ssd", SIZES[kind][4])
    walks = [replace(shipped, scan=scan) for scan in ((32, 4, 3), (64, 4, 2))]
    return [{"shape": shape} for shape in (OTHER, *walks)]


def part(given, a, b):
    return tuple(None if x is None else x[a:b].contiguous() for x in given)


@pytest.mark.parametrize(("kind", "blocks"), CASES)
def test_every_cut_gives_the_bits_of_the_whole(kind, blocks):
    chunk = SIZES[kind][4]
    rows = 2 * chunk + 3
    given, table = inputs(kind, rows, blocks), table_of([2, 0, 1])
    stores = pages(kind, 3, blocks)
    whole = step(kind, blocks, given, stores, [rows], [rows], table)
    assert bool(torch.isfinite(whole).all())
    for shape in others(kind, given, rows) if blocks else ({"columns": 16, "warps": 1},):
        again = pages(kind, 3, blocks)
        other = step(kind, blocks, given, again, [rows], [rows], table, **shape)
        assert bits.equal(other, whole), shape
        assert bits.equal(again[3][table[0, :2].long()], stores[3][table[0, :2].long()]), shape
    for cuts in (
        [0, 1, 17, chunk - 1, chunk, chunk + 1, 2 * chunk, rows],
        [0, chunk + 5, *range(chunk + 6, chunk + 40), 2 * chunk + 1, rows],
    ):
        kept = pages(kind, 3, blocks)
        for a, b in pairwise(cuts):
            got = step(kind, blocks, part(given, a, b), kept, [b - a], [b], table)
            assert bits.equal(got, whole[a:b].contiguous()), (a, b)
        assert bits.equal(kept[3][table[0, :2].long()], stores[3][table[0, :2].long()])


@pytest.mark.parametrize(("kind", "blocks"), CASES)
def test_company_changes_nothing_and_stock_decode_is_other_bits(kind, blocks):
    chunk = SIZES[kind][4]
    lengths = [chunk + 7, 1, 2 * chunk]
    alone = [inputs(kind, n, blocks, seed=10 * n) for n in lengths]
    tables = table_of([0, 1], [2, 2], [3, 4])
    together = tuple(
        None if parts[0] is None else torch.cat(parts) for parts in zip(*alone, strict=True)
    )
    joint = step(kind, blocks, together, pages(kind, 5, blocks), lengths, lengths, tables)
    at = 0
    for n, given, row in zip(lengths, alone, tables, strict=True):
        one = step(kind, blocks, given, pages(kind, 5, blocks), [n], [n], row[None].contiguous())
        assert bits.equal(joint[at : at + n].contiguous(), one)
        at += n
    # Rows as if the chunk began elsewhere: the same values, other bits.
    late = part(alone[2], 1, 2 * chunk)
    moved = step(
        kind, blocks, late, pages(kind, 5, blocks), [2 * chunk - 1], [2 * chunk - 1],
        tables[2:].contiguous(),
    )  # fmt: skip
    assert not bits.equal(moved[chunk:].contiguous(), joint[-chunk + 1 :].contiguous())


@pytest.mark.parametrize(("kind", "blocks"), CASES)
def test_a_captured_step_has_the_bits_of_an_eager_one(kind, blocks):
    chunk = SIZES[kind][4]
    rows = chunk + 9
    given, table = inputs(kind, rows, blocks), table_of([0, 1])
    kept = pages(kind, 2, blocks)
    step(kind, blocks, part(given, 0, chunk + 5), kept, [chunk + 5], [chunk + 5], table)
    expected = step(
        kind, blocks, part(given, chunk + 5, rows), [x.clone() for x in kept], [4], [rows], table
    )
    last = part(given, chunk + 5, rows)
    start = torch.tensor([0, 4], device="cuda").int()
    length = torch.tensor([rows], device="cuda").int()
    where = (start, length, table)
    slot = slots_of(*where, chunk)
    shape = gpu_blocks.shape_of(4, 1, *given[2:4], kind != "ssd", chunk)
    blocks_index = gpu_blocks.blocks_of(start, length, 4, chunk, shape)

    def call():
        if blocks:
            return gpu_blocks.launch(*last, *kept, *where, blocks_index)
        return gpu.launch(*last, *kept, *where, slot)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.fill_(float("nan"))
    graph.replay()
    assert bits.equal(out, expected)
