"""On an H200: class L's kernels give the bits of the CPU model of Hopper's arithmetic."""

import pytest
import torch
from torch import Tensor

from zeromismatch.kernels import adversarial, bits
from zeromismatch.kernels.linear import gpu_gemm as gpu
from zeromismatch.kernels.linear.gpu_table import LARGE, REFERENCE, ROWS
from zeromismatch.kernels.reference import hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TILES = sorted({tile for _, *pair in ROWS for tile in pair} | {LARGE, REFERENCE}, key=repr)


def test_every_kernel_gives_the_models_bits(
    hopper_cases: list[tuple[str, Tensor, Tensor, Tensor]],
) -> None:
    for name, x, weight, bias in hopper_cases:
        expected = hopper.linear(x, weight, bias, torch.float32)
        a, b, c = x.cuda(), weight.cuda(), bias.cuda()
        for tile in TILES:
            out = torch.full(expected.shape, float("nan"), device="cuda")
            got = gpu.run_tile(tile, "nt", a, b, c, out).cpu()
            assert bits.equal(got, expected), (
                name,
                tile.name,
                bits.first_difference(got, expected),
            )
        got = gpu.gemm("nt", a, b, c, out_dtype=torch.float32).cpu()  # whoever serves the shape
        assert bits.equal(got, expected), (name, bits.first_difference(got, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["nt", "nn", "tn"])
def test_larger_products_in_every_form(form: str, dtype: torch.dtype) -> None:
    m, n, k = 130, 96, 2048
    scale = 2.0**-6 if dtype == torch.float16 else 1.0
    x, weight = (
        adversarial.rows(rows, k, seed=seed, scale=scale).to(dtype)
        for rows, seed in ((m, 41), (n, 42))
    )
    expected = hopper.chain(x, weight.t())
    a = x.t().contiguous().cuda() if form == "tn" else x.cuda()
    b = weight.cuda() if form == "nt" else weight.t().contiguous().cuda()
    got = gpu.gemm(form, a, b, out_dtype=torch.float32).cpu()
    assert bits.equal(got, expected), bits.first_difference(got, expected)
    assert bits.equal(gpu.gemm(form, a, b).cpu(), expected.to(dtype))
