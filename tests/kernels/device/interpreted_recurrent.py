"""Run by ``test_interpreter.py`` under TRITON_INTERPRET=1: recurrences and their convolution.

``interpreted.py`` does the rest. Against the CPU's references, on the certification cases; each is
also cut at another place, which may not change a bit here either.
"""

from itertools import pairwise

import interpreted  # sets the interpreter up
import torch

from zeromismatch.kernels import bits, cases_recurrent, dispatch
from zeromismatch.kernels.certify import cases_of
from zeromismatch.kernels.contract import get_contract
from zeromismatch.kernels.convolution import gpu as convolution
from zeromismatch.kernels.gated_norm import gpu as norms
from zeromismatch.kernels.gates import gpu as gates
from zeromismatch.kernels.recurrence import gpu, gpu_gradient
from zeromismatch.kernels.recurrence import gpu_blocks as block_units
from zeromismatch.kernels.recurrence.pages import packed_rows
from zeromismatch.kernels.reference import convolution as convolution_reference
from zeromismatch.kernels.reference import gated_norm as norms_reference
from zeromismatch.kernels.reference import gates as gates_reference
from zeromismatch.kernels.reference import recurrence as reference
from zeromismatch.kernels.reference import recurrence_grad as gradient_reference

near = interpreted.near


def case(kind: str, counts: list[int], before: list[int]):
    data = cases_recurrent._Data(get_contract(f"recurrence.{kind}.float32.cpu.v1"), 1)
    return cases_recurrent._paged(data, kind, (4, 1, 2, 5, 17), counts, before, 0)


def recurrences() -> None:
    for kind in ("ssd", "gated_delta", "kda"):
        arguments = case(kind, [1, 6, 0, 4], [0, 3, 2, 8])
        mine, true = gpu.functional(*arguments), reference.recurrence(*arguments)
        for a, b in zip(mine, true, strict=True):
            near(a, b, 1e-5)
        for a, b in zip(mine, gpu.reference(*arguments), strict=True):
            assert bits.equal(a, b)
        rows, (length, table) = arguments[:5], arguments[10:]  # request 1 again, without company
        one = [None if x is None else x[1:7] for x in rows]
        alone = gpu.functional(
            *one, *arguments[5:9], torch.tensor([0, 6], dtype=torch.int32), length[1:2], table[1:2]
        )
        assert bits.equal(alone[0], mine[0][1:7].contiguous())


def convolutions() -> None:
    contract = get_contract("convolution.taps.float32.cpu.v1")
    for one in cases_recurrent.convolution(contract, True, 1, ()):
        x, weight, bias, silu, pages, start, length, table = one.arguments
        keep = int(start[4])  # the long last request would only take time
        cut = (x[:keep], weight, bias, silu, pages, start[:5], length[:4], table[:4])
        near(convolution.functional(*cut), convolution_reference.convolution(*cut), 1e-6)


def steps() -> None:
    """Row by row in place, as decode does it, against the whole at once."""
    for kind in ("gated_delta", "kda"):
        arguments = case(kind, [9], [0])
        whole, rows, table = gpu.functional(*arguments), arguments[:5], arguments[11]
        stores = [torch.full_like(each, float("nan")) for each in arguments[5:9]]
        for t in range(9):
            slot = torch.tensor([int(table[0, t // 4]) * 4 + t % 4])
            index = (torch.tensor([0, 1], dtype=torch.int32), torch.tensor([t + 1]).int(), table)
            row = [None if x is None else x[t : t + 1] for x in rows]
            out = gpu.launch(*row, *stores, *index, slot)
            assert bits.equal(out, whole[0][t : t + 1].contiguous()), (kind, t)


def gradients() -> None:
    """Against the CPU's reference, at another launch shape, and one request without company."""
    for kind in ("ssd", "gated_delta", "kda"):
        data = cases_recurrent._Data(get_contract(f"recurrence.{kind}.float32.cpu.v1"), 3)
        rows = cases_recurrent._inputs(data, kind, 7, (4, 1, 2, 5, 17))
        start = torch.tensor([0, 1, 1, 7], dtype=torch.int32)
        pages = [x.new_empty(0, 4, *x.shape[1:]) for x in rows[1:4]]
        ends, table = torch.empty(0, 2, 5, 17), torch.zeros(3, 0, dtype=torch.int32)
        _, u, ends = reference.recurrence(*rows, *pages, ends, start, start.diff(), table)
        d_o = data.rows(7, 2, 17, scale=0.1)
        mine = gpu_gradient.gradient(d_o, *rows, u, ends, start, 4)
        true = gradient_reference.recurrence_grad(d_o, *rows, u, ends, start, 4)
        kept = [place for place, each in enumerate(mine) if each is not None]
        assert kept == [0, 1, 2, 3] if kind == "ssd" else [0, 1, 2, 3, 4]
        for place in kept:
            near(mine[place], true[place], 2e-6)
        if kind == "gated_delta":
            other = gpu_gradient.reference(d_o, *rows, u, ends, start, 4)
            assert all(bits.equal(mine[place], other[place]) for place in kept)
        if kind == "kda":
            one = [x[1:7] for x in rows]
            index = torch.tensor([0, 6], dtype=torch.int32)
            alone = gpu_gradient.gradient(d_o[1:7], *one, u[1:7], ends, index, 4)
            assert all(bits.equal(mine[place][1:7].contiguous(), alone[place]) for place in kept)


def blocks() -> None:
    """On matrix units; in fp16, since the interpreter's products take bf16 for integers."""
    for kind in block_units.CONTRACTS:
        data = cases_recurrent._Data(get_contract(f"recurrence.{kind}.float32.cpu.v1"), 1)
        given = list(cases_recurrent._paged(data, kind, (32, 1, 2, 24, 40), [70], [0], 0))
        rounded = [x is not None and i in (0, 1, 2, 5, 6) for i, x in enumerate(given)]
        halves = [x.half() if r else x for x, r in zip(given, rounded, strict=True)]
        true = [x.float() if r else x for x, r in zip(halves, rounded, strict=True)]
        (mine, ends), (o, _, states) = block_units.functional(*halves), reference.recurrence(*true)
        near(mine, o, 2e-3)
        near(ends, states, 2e-3)
        stores = [torch.full_like(each, float("nan")) for each in halves[5:9]]
        for first, last in pairwise((0, 18, 19, 31, 33, 34, 64, 70)):
            one = [None if x is None else x[first:last].contiguous() for x in halves[:5]]
            index = (torch.tensor([0, last - first]).int(), torch.tensor([last]).int())
            if kind == "kda" and first == 31:  # pages as another implementation may leave them
                given = [x.clone() for x in stores]
                given[3].view(torch.half).flatten(2)[halves[11][0, 0], :, 32 * 32 :] = float("nan")
                for form in (block_units.functional, block_units.reference):
                    near(form(*one, *given, *index, halves[11])[0], mine[first:last], 1e-3)
            out = block_units.launch(*one, *stores, *index, halves[11])
            near(out, mine[first:last], 1e-3)  # numpy's sums depend on the tile, a GPU's do not
        near(stores[3][halves[11][0, :2].long()], ends, 3e-4)


def block_gradients() -> None:
    """u again from the states: as if it had been kept; and from the states that blocks leave."""
    for kind, keys in (("ssd", 4), ("kda", 5)):
        data = cases_recurrent._Data(get_contract(f"recurrence.{kind}.float32.cpu.v1"), 3)
        *rows, g, beta = cases_recurrent._inputs(data, kind, 19, (16, 1, 1, keys, 17))
        start = torch.tensor([0, 1, 1, 19], dtype=torch.int32)
        halves = [x.half() for x in rows]
        wide = [x.float() for x in halves]
        pages = [x.new_empty(0, 16, *x.shape[1:]) for x in (*wide[1:], g)]
        ends, table = torch.empty(0, 1, keys, 17), torch.zeros(3, 0, dtype=torch.int32)
        index = start, start.diff(), table
        exact, u, ends = reference.recurrence(*wide, g, beta, *pages, ends, *index)
        d_o = data.rows(19, 1, 17, scale=0.1)
        true = gradient_reference.recurrence_grad(d_o, *wide, g, beta, u, ends, start, 16)
        mine = gpu_gradient.block_gradient(d_o, *halves, g, beta, ends, start, 16)
        dispatch.adopt(block_units.CONTRACTS[kind].id, "triton")  # nothing is proved without a GPU
        # kda's pages are wider than its rows
        o, left = block_units.packed(kind, (*halves, g, beta), packed_rows(start, 16), 16)
        near(o, exact, 3e-3)
        near(left, ends, 2e-3)
        for a, b in zip(mine, true, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                near(a, b, 2e-6)


def row_operators() -> None:
    """Gates and norms against the CPU's references; in bf16 roundings may fall the other way."""
    for mine, true, order in ((gates, gates_reference, ""), (norms, norms_reference, ".lanes16")):
        for op in mine.CONTRACTS:
            for storage, rtol in (("float32", 2e-6), ("bfloat16", 2e-2)):
                contract = get_contract(f"{op}{order}.{storage}.cpu.v1")
                for _, one in zip(range(3), cases_of(contract, quick=True, seed=1), strict=False):
                    got = getattr(mine, f"reference_{op}").func(*parts(mine, op), *one.arguments)
                    again = getattr(mine, f"reference_{op}")(*one.arguments)
                    want = getattr(true, op)(*one.arguments)
                    for a, b, c in zip(*map(tupled, (got, want, again)), strict=True):
                        assert a.dtype == b.dtype
                        assert bits.equal(a, c), (op, storage)
                        near(a, b, rtol)


def parts(module, op: str) -> tuple[int, ...]:
    """What the reference's partial binds in front."""
    return getattr(module, f"reference_{op}").args


def tupled(x) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


recurrences()
convolutions()
row_operators()
blocks()
block_gradients()
steps()
gradients()
print("recurrences ok")
