"""Gradients of row operators for a GPU, which are torch's elementwise operations: here on a CPU.

Against the CPU's frozen references, and bit for bit against their own definitions, row by row or
request by request; sums of parameters continue over micro-batches that end on a block.
"""

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.certify import cases_of
from zeromismatch.kernels.contract import get_contract, implementations
from zeromismatch.kernels.convolution import gpu_gradient as convolution
from zeromismatch.kernels.gated_norm import gpu_gradient as norms
from zeromismatch.kernels.gates import gpu_gradient as gates
from zeromismatch.kernels.gpu import row_gradient
from zeromismatch.kernels.reference import convolution as convolution_reference
from zeromismatch.kernels.reference import gated_norm as norms_reference
from zeromismatch.kernels.reference import gates as gates_reference

OPERATORS = [
    *((op, "", gates, gates_reference) for op in gates.GRADIENTS),
    *((op, ".lanes16", norms, norms_reference) for op in norms.GRADIENTS),
    ("convolution", ".taps", convolution, convolution_reference),
]


def near(mine, true, rtol):
    scale = true.float().abs().amax().clamp(min=1e-30)
    assert float((mine.float() - true.float()).abs().amax() / scale) < rtol


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize(("op", "order", "module", "true"), OPERATORS, ids=lambda x: str(x)[:20])
def test_a_gradient_is_the_references_and_takes_rows_singly(op, order, module, true, storage):
    contract = get_contract(f"{op}_grad{order}.{storage}.cpu.v1")
    (mine,) = implementations(f"{op}_grad.wide.{storage}.sm90.v1")
    name = "reference" if op == "convolution" else f"reference_{op}"
    definition = getattr(module, name)
    for case in cases_of(contract, quick=True, seed=1):
        got = [x for x in mine.run(*case.arguments) if x is not None]
        want = [x for x in getattr(true, f"{op}_grad")(*case.arguments) if x is not None]
        own = [x for x in definition(*case.arguments) if x is not None]
        for a, b, c in zip(got, want, own, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert bits.equal(a, c), case.label
            near(a, b, 2e-6 if storage == "float32" else 1e-2)


def test_sums_over_rows_continue_over_micro_batches_that_end_on_a_block(monkeypatch):
    monkeypatch.setattr(row_gradient, "BLOCK_ROWS", 16)
    parts = torch.randn(45, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, total = row_gradient.chained(parts, None), None
    for first, last in ((0, 16), (16, 32), (32, 45)):
        total = row_gradient.chained(parts[first:last], total)
    assert bits.equal(total, whole)
    assert bits.equal(row_gradient.listed(parts, None), whole)
    other = row_gradient.chained(parts[5:], row_gradient.chained(parts[:5], None))
    assert not bits.equal(other, whole)
