"""A transformer block with taps in its operators: eager = captured = compiled, digest by digest."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zeromismatch.kernels import bits
from zeromismatch.kernels.attention import packed_attention
from zeromismatch.kernels.embedding import embedding
from zeromismatch.kernels.gated import silu_mul
from zeromismatch.kernels.linear import linear
from zeromismatch.kernels.logprob import lm_head_logprob
from zeromismatch.kernels.rmsnorm import rmsnorm, rmsnorm_residual
from zeromismatch.kernels.rotary import apply_rotary
from zeromismatch.kernels.taps import Taps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
T, HIDDEN, INNER, SIZE, HEADS, KV_HEADS, VOCABULARY = 96, 256, 512, 64, 4, 2, 5000
KINDS = ["embedding.0", "rmsnorm.0", "linear.0", "rotary.0", "rotary.1", "attention.0", "linear.1",
         "rmsnorm.1", "linear.2", "gated.0", "linear.3", "logprob.0"]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Callable[[Tensor, Tensor], Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def noise(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, device="cuda") * 0.05
        return x.to(torch.bfloat16).requires_grad_()

    width = (HEADS + 2 * KV_HEADS) * SIZE
    table, qkv, o = noise(VOCABULARY, HIDDEN), noise(width, HIDDEN), noise(HIDDEN, HEADS * SIZE)
    up, down, norm = noise(2 * INNER, HIDDEN), noise(HIDDEN, INNER), noise(HIDDEN)
    angle = torch.rand(T, SIZE // 2, generator=generator, device="cuda") * 6
    cos, sin = (f(torch.cat((angle, angle), 1)) for f in (torch.cos, torch.sin))
    start = torch.tensor([0, 30, T], dtype=torch.int32, device="cuda")

    def run(ids: Tensor, targets: Tensor) -> Tensor:
        x = embedding(ids, table)
        heads = linear(rmsnorm(x, norm, 1e-6), qkv).view(T, -1, SIZE)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        mixed = packed_attention(q, k, v, start, scale=SIZE**-0.5)
        y, s = rmsnorm_residual(linear(mixed.reshape(T, -1), o), x, norm, 1e-6)
        gate, rest = linear(y, up).chunk(2, dim=-1)
        return lm_head_logprob(s + linear(silu_mul(gate, rest), down), table, targets)

    return run


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return tuple(torch.randint(0, VOCABULARY, (T,), device="cuda") for _ in range(2))  # type: ignore[return-value]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(bits.equal(a[name], b[name]) for name in a)


def test_traces_survive_compile_and_replay(model: Callable[[Tensor, Tensor], Tensor]) -> None:
    first, second = inputs(1), inputs(2)
    taps = Taps(calls=16, rows=T, device="cuda")
    eager: list[dict[str, Tensor]] = []
    with torch.no_grad():
        for each in (first, second):
            with taps.recording():
                model(*each)
            eager.append(taps.read())
        assert list(eager[0]) == KINDS
        assert not equal(*eager)
        compiled = torch.compile(model, fullgraph=True)
        compiled(*first)
        for each, expected in zip((first, second), eager, strict=True):
            with taps.recording():
                compiled(*each)
            assert equal(taps.read(), expected)
        held = [each.clone() for each in first]
        graph = torch.cuda.CUDAGraph()
        with taps.recording(), torch.cuda.graph(graph):
            model(*held)
        for each, expected in zip((second, first), reversed(eager), strict=True):
            for place, value in zip(held, each, strict=True):
                place.copy_(value)
            graph.replay()
            assert equal(taps.read(), expected)


def test_compiled_gradients_are_the_eager_ones(model: Callable[[Tensor, Tensor], Tensor]) -> None:
    ids, targets = inputs(3)
    leaves = [cell.cell_contents for cell in model.__closure__ or ()]
    leaves = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
    grads: list[list[Tensor]] = []
    for run in (model, torch.compile(model, fullgraph=True)):
        for leaf in leaves:
            leaf.grad = None
        run(ids, targets).sum().backward()
        grads.append([leaf.grad.clone() for leaf in leaves])
    assert len(leaves) == 6
    assert [bits.equal(a, b) for a, b in zip(*grads, strict=True)] == [True] * 6
