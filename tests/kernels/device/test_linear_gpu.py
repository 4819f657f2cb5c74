"""GEMM class L on a GPU: every implementation gives the reference's bits, whatever the rows."""

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.dispatch import choose
from zeromismatch.kernels.gpu import cublaslt
from zeromismatch.kernels.linear import gpu as operators
from zeromismatch.kernels.linear import gpu_gemm as gpu
from zeromismatch.kernels.linear.gpu_table import FP32, FP32_SMALL, LARGE, REFERENCE, ROWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HALVES = (torch.bfloat16, torch.float16)
TILES = {tile for _, *pair in ROWS for tile in pair} | {LARGE, REFERENCE}


def operands(form, m, n, k, dtype, seed=0):
    device = torch.device("cuda", 0)
    a = gpu._adversarial(m, k, dtype, 2 * seed, device)
    b = gpu._adversarial(n, k, dtype, 2 * seed + 1, device)
    return (a.t().contiguous() if form == "tn" else a), (b if form == "nt" else b.t().contiguous())


def poison():
    """Leave NaN in freed memory, so that an element nobody writes is not right by luck."""
    torch.full((1 << 26,), float("nan"), device="cuda")


@pytest.mark.parametrize("form", ["nt", "nn", "tn"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 64, 32), (7, 200, 200), (130, 1000, 4096), (257, 512, 6144), (64, 96, 13)]
)
def test_every_tile_has_the_reference_bits(form, dtype, m, n, k):
    a, b = operands(form, m, n, k, dtype)
    bias = torch.randn(n, device="cuda").to(dtype)
    for out_dtype in (dtype, torch.float32):
        expected = gpu.reference(form, a, b, bias, out_dtype)
        for tile in TILES:
            poison()
            out = gpu.run_tile(tile, form, a, b, bias, torch.empty_like(expected))
            assert bits.equal(out, expected), (tile.name, bits.first_difference(out, expected))


@pytest.mark.parametrize(("m", "n", "k"), [(3, 65, 77), (70, 256, 2048), (65, 33, 300)])
def test_float32_is_short_chains_of_ieee_fmas_as_on_the_cpu(m, n, k):
    a, b = operands("nt", m, n, k, torch.float32)
    expected = gpu.reference("nt", a, b)
    on_cpu = choose("linear.chain.float32.cpu.v1").run(a.cpu(), b.cpu())
    assert bits.equal(expected.cpu(), on_cpu)
    one_chain = choose("linear_grad_weight.chain.float32.cpu.v1").run
    differs = not bits.equal(on_cpu, one_chain(a.t().contiguous().cpu(), b.t().contiguous().cpu()))
    assert differs == (k > 128)
    for tile in (FP32, FP32_SMALL):
        assert bits.equal(
            gpu.run_tile(tile, "nt", a, b, None, torch.empty_like(expected)), expected
        )
    assert bits.equal(gpu.gemm("nt", a, b), expected)


def edges():
    tiles = [e + d for e in (128, 256, 512, 1024, 2048, 4096, 8192) for d in (-1, 0, 1)]
    return [*range(1, 261), *tiles]


@pytest.mark.parametrize(("n", "k"), [(1024, 6144), (768, 4096)])
def test_a_row_has_the_same_bits_in_every_batch(n, k):
    x, w = operands("nt", 8193, n, k, torch.bfloat16)
    whole = gpu.reference("nt", x, w)
    poison()
    for m in edges():
        out = gpu.gemm("nt", x[8193 - m :], w)
        assert bits.equal(out, whole[8193 - m :]), m
    assert any(d.serves.startswith("lt") for d in gpu.decisions())


def test_stock_matmul_fails_the_same_test():
    x, w = operands("nt", 8193, 1024, 6144, torch.bfloat16)
    whole = gpu.reference("nt", x, w)
    assert not all(bits.equal(x[:m] @ w.t(), whole[:m]) for m in (1, 7, 16, 64, 128))


def test_order_neighbours_offsets_and_strides_do_not_matter():
    x, w = operands("nt", 100, 512, 4096, torch.bfloat16)
    bias = torch.randn(512, device="cuda").to(torch.bfloat16)
    expected = gpu.gemm("nt", x, w, bias)
    order = torch.randperm(100, device="cuda")
    assert bits.equal(gpu.gemm("nt", x[order], w, bias), expected[order])
    spoiled = x.clone()
    spoiled[1::2] = float("nan")
    assert bits.equal(gpu.gemm("nt", spoiled, w, bias)[::2], expected[::2])
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x)
    assert bits.equal(gpu.gemm("nt", shifted, w, bias), expected)
    assert bits.equal(gpu.gemm("nt", x.t().contiguous().t(), w, bias), expected)
    assert gpu.gemm("nt", x[:0], w, bias).shape == (0, 512)


def test_cublaslt_without_a_pinned_proof_is_refused_when_wrong(monkeypatch):
    run = cublaslt.Problem.run

    def spoil(self, algorithm, a, b, c, **options):
        run(self, algorithm, a, b, c, **options)
        bits.int_view(c).view(-1)[3] ^= 1

    monkeypatch.setattr(cublaslt.Problem, "run", spoil)
    x, w = operands("nt", 96, 320, 1280, torch.bfloat16)
    out = gpu.gemm("nt", x, w)
    decision = next(d for d in gpu.decisions() if d.shape[:4] == ("nt", 96, 320, 1280))
    assert decision.serves.startswith("triton")
    assert decision.refused
    assert bits.equal(out, gpu.reference("nt", x, w))


def test_eager_graph_and_compiled_agree():
    x, w = operands("nt", 48, 1024, 2048, torch.bfloat16)
    expected = gpu.reference("nt", x, w)
    assert bits.equal(torch.compile(operators.linear)(x, w), expected)
    for warm in (False, True):  # a capture that meets an unproved shape runs the class's own kernel
        rows = x[: 47 - warm]
        if warm:
            operators.linear(rows, w)
        else:
            gpu.run_tile(
                gpu.own_tile(47, 1024, x.dtype),
                "nt",
                rows,
                w,
                None,
                torch.empty_like(expected[:47]),
            )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = operators.linear(rows, w)
        graph.replay()
        assert bits.equal(out, expected[: 47 - warm])


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
def test_gradients_agree_with_fp64(dtype, rtol):
    x, w, b = (
        torch.randn(s, device="cuda").to(dtype).requires_grad_()
        for s in ((300, 256), (512, 256), (512,))
    )
    g = torch.randn(300, 512, device="cuda").to(dtype)
    operators.linear(x, w, b).backward(g)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    torch.nn.functional.linear(*wide).backward(g.double())
    for mine, true in zip((x, w, b), wide, strict=True):
        assert (mine.grad.double() - true.grad).norm() <= rtol * true.grad.norm()


def test_weight_gradient_continues_over_blocks_of_tokens(monkeypatch):
    monkeypatch.setattr(operators, "DW_CHUNK", 256)
    g, x = operands("tn", 128, 96, 1024, torch.bfloat16)
    whole = operators.weight_grad(g, x)
    total = torch.zeros_like(whole)
    for start in (0, 256, 768):
        stop = {0: 256, 256: 768, 768: 1024}[start]
        operators.weight_grad(g[start:stop], x[start:stop], total, out=total)
    assert bits.equal(total + 0.0, whole + 0.0)
