"""Row operators on a GPU: a row has one set of bits whatever rows are beside it, how many, where,
and whoever launched: eager, compiled, or a captured graph.
"""

import pytest
import torch

from zeromismatch.kernels import adversarial, bits
from zeromismatch.kernels.embedding import embedding
from zeromismatch.kernels.gated import gelu_mul, silu, silu_mul, softcap
from zeromismatch.kernels.linear import linear
from zeromismatch.kernels.logprob import lm_head_logprob, logprob
from zeromismatch.kernels.rmsnorm import rmsnorm, rmsnorm_residual, rmsnorm_wide
from zeromismatch.kernels.rotary import apply_rotary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DEVICE, MOST, WIDTH = "cuda", 8193, 256


def drawn(rows, width, seed, dtype=torch.bfloat16, scale=1.0):
    return adversarial.rows(rows, width, seed=seed, dtype=dtype, device=DEVICE, scale=scale)


def ids(rows, most, seed):
    return adversarial.integers((rows,), most, seed=seed, device=DEVICE)


def operators():
    """name: (operator of row tensors, those tensors)."""
    w, x, r = drawn(1, WIDTH, 1)[0], drawn(MOST, WIDTH, 2), drawn(MOST, WIDTH, 3)
    table, head = drawn(700, WIDTH, 4), drawn(1000, WIDTH, 5, scale=0.1)
    angle = drawn(MOST, 32, 6, torch.float32).remainder(6.0)
    cos, sin = (f(torch.cat((angle, angle), 1)) for f in (torch.cos, torch.sin))
    logits = drawn(MOST, 1000, 7, torch.float32)
    targets, tokens = ids(MOST, 1000, 8), ids(MOST, 700, 9)
    return {
        "rmsnorm": (lambda x: rmsnorm(x, w, 1e-6), (x,)),
        "rmsnorm + 1": (lambda x: rmsnorm(x, w, 1e-6, unit_offset=True), (x,)),
        "rmsnorm residual": (lambda x, r: torch.cat(rmsnorm_residual(x, r, w, 1e-6), 1), (x, r)),
        "rmsnorm wide": (lambda x: rmsnorm_wide(x, w, 1e-6), (x,)),
        "rmsnorm heads": (lambda x: rmsnorm(x.view(-1, 4, 64), w[:64].contiguous(), 1e-6), (x,)),
        "rotary": (lambda x, c, s: apply_rotary(x.view(-1, 4, 64), c, s), (x, cos, sin)),
        "silu_mul": (silu_mul, (x, r)),
        "gelu_mul": (gelu_mul, (x, r)),
        "silu": (silu, (x,)),
        "softcap": (lambda z: softcap(z, 30.0), (logits,)),
        "embedding": (lambda i: embedding(i, table), (tokens,)),
        "linear": (lambda x: linear(x, head), (x,)),
        "logprob": (lambda z, t: logprob(z, t, 0.7), (logits, targets)),
        "head": (lambda x, t: lm_head_logprob(x, head, t), (x, targets)),
    }


@pytest.fixture(scope="module")
def table():
    return operators()


NAMES = (
    "rmsnorm", "rmsnorm + 1", "rmsnorm residual", "rmsnorm wide", "rmsnorm heads", "rotary",
    "silu_mul", "gelu_mul", "silu", "softcap", "embedding", "linear", "logprob", "head",
)  # fmt: skip


def edges():
    tiles = [e + d for e in (512, 1024, 2048, 4096, 8192) for d in (-1, 0, 1)]
    return [*range(1, 261), *tiles]


def poison(like):
    """Leave NaN in freed memory, so that an element nobody writes is not right by luck."""
    for _ in range(3):
        bits.int_view(torch.empty_like(like)).fill_(-1)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_number_of_rows_does_not_matter(table, name):
    run, tensors = table[name]
    poison(run(*tensors))
    whole = run(*tensors)
    for m in edges():
        part = [each[MOST - m :] for each in tensors]
        poison(whole[MOST - m :])
        assert bits.equal(run(*part), whole[MOST - m :]), m


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_order_neighbours_and_offsets_do_not_matter(table, name):
    run, tensors = table[name][0], [each[:1000] for each in table[name][1]]
    whole = run(*tensors)
    order = torch.randperm(1000, device=DEVICE)
    assert bits.equal(run(*(each[order] for each in tensors)), whole[order])
    spoiled = [each.clone() for each in tensors]
    for each in spoiled:
        each[::2] = float("nan") if each.is_floating_point() else 0
    assert bits.equal(run(*spoiled)[1::2], whole[1::2])
    shifted = [adversarial.misaligned(each) for each in tensors]
    assert bits.equal(run(*shifted), whole)
    strided = [
        torch.cat((each, each), 1)[:, : each.shape[1]] if each.dim() > 1 else each
        for each in tensors
    ]
    if name not in ("rmsnorm heads", "rotary"):  # those take a view of whole rows
        assert bits.equal(run(*strided), whole)
    assert run(*(each[:0] for each in tensors)).shape[0] == 0


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_eager_compiled_and_captured_agree(table, name):
    run, tensors = table[name][0], [each[:65].clone() for each in table[name][1]]
    others = [each[65:130] for each in table[name][1]]
    eager, second = run(*tensors), run(*others)
    torch._dynamo.reset()
    assert bits.equal(torch.compile(run, fullgraph=True)(*tensors), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*tensors)
    graph.replay()
    assert bits.equal(out, eager)
    for place, value in zip(tensors, others, strict=True):
        place.copy_(value)
    bits.int_view(out).fill_(-1)
    graph.replay()
    assert bits.equal(out, second)


@torch.no_grad()
def test_stock_operators_fail_the_same_test(table):
    _, (x,) = table["linear"]
    w = drawn(4096, 4096, 11)
    x = drawn(600, 4096, 12)
    whole = x @ w.t()
    assert any(not bits.equal(x[:m] @ w.t(), whole[:m]) for m in (1, 2, 7, 16, 33, 64, 128))
