"""Mixtures of experts on a GPU: the bits of the dense class, ties, capture, gradients."""

import pytest
import torch

from zeromismatch.kernels import bits, cases_moe, moe
from zeromismatch.kernels.moe import gpu
from zeromismatch.kernels.moe import gpu_launch as launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUTINGS = (
    moe.Routing(num_experts=128, top_k=8, scoring="softmax", normed=True),
    moe.Routing(
        num_experts=64, top_k=6, scoring="sigmoid", normed=True, eps=1e-20, scale=2.5, groups=8,
        groups_kept=3,
    ),
)  # fmt: skip


def noise(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device="cuda")
    x *= torch.exp2(torch.randint(-4, 5, shape, generator=generator, device="cuda").float())
    return x.to(dtype)


def parts(count):
    yield from (slice(0, 1), slice(count // 2, count), slice(0, min(count, 33)))
    yield torch.randperm(count, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


@pytest.mark.parametrize("routing", ROUTINGS, ids=["softmax", "groups"])
@pytest.mark.parametrize("tokens", [1, 7, 257, 4097])
def test_routing_does_not_depend_on_company_or_launch(routing, tokens):
    z = noise(tokens, routing.num_experts).round()  # many ties
    bias = noise(routing.num_experts, seed=5) * 0.1 if routing.sigmoid else None
    arguments = (bias, routing.top_k, routing.groups, routing.groups_kept, routing.sigmoid)
    chosen = launch.topk(z, *arguments)
    assert bits.equal(chosen, gpu.reference_topk(z, *arguments))
    if routing.groups == 1:
        order = z.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_k]
        assert (z.gather(1, order) == z.gather(1, chosen)).all()
    options = (routing.sigmoid, routing.normed, routing.eps, routing.scale)
    weights, d = launch.topk_weights(z, chosen, *options), noise(*chosen.shape, seed=9)
    assert bits.equal(weights, gpu.reference_weights(z, chosen, *options))
    grad = launch.topk_weights_grad(d, z, chosen, *options)
    assert bits.equal(grad, gpu.reference_weights_grad(d, z, chosen, *options))
    for part in parts(tokens):
        rows = z[part].contiguous()
        assert bits.equal(launch.topk(rows, *arguments), chosen[part].contiguous())
        got = launch.topk_weights(rows, chosen[part].contiguous(), *options)
        assert bits.equal(got, weights[part].contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 130, 4097])
@pytest.mark.parametrize("load", ["spread", "one expert"])
def test_grouped_products_have_the_bits_of_the_dense_class(dtype, tokens, load):
    experts, top_k, inputs, outputs = (8, 4, 328, 200)
    chosen = cases_moe.chosen(tokens, experts, top_k, 3).cuda()
    if load == "one expert":
        chosen = torch.tensor([[7, 0, 1, 2]], device="cuda").repeat(tokens, 1)
    weight = noise(experts, outputs, inputs, dtype=dtype, seed=2)
    spread = torch.cat((weight,) * launch.SINGLE)  # so many experts that slots are not sorted
    for x in (noise(tokens, inputs, dtype=dtype), noise(tokens, top_k, inputs, dtype=dtype)):
        wanted = gpu.reference_grouped(x, chosen, weight)
        tiles = [None, launch.FP32]
        if dtype != torch.float32:
            tiles += [launch.LARGE, launch.REFERENCE, *(tile for _, tile in launch.TILES)]
        for tile in tiles:
            assert bits.equal(gpu.grouped_linear(x, chosen, weight, tile=tile), wanted), tile
        assert bits.equal(gpu.grouped_linear(x[:1], chosen[:1], spread), wanted[:1]), "unsorted"
        for part in parts(tokens):
            got = gpu.grouped_linear(x[part].contiguous(), chosen[part].contiguous(), weight)
            assert bits.equal(got, wanted[part].contiguous())
        grad = noise(tokens, top_k, outputs, dtype=dtype, seed=4)
        start = noise(*weight.shape, seed=6)
        for initial in (None, start):
            for mine, true in zip(
                gpu.grouped_linear_grad(grad, x, chosen, weight, initial),
                gpu.reference_grouped_grad(grad, x, chosen, weight, initial),
                strict=True,
            ):
                assert bits.equal(mine, true), bits.first_difference(mine, true)


@pytest.mark.parametrize("dtype", DTYPES)
def test_combining_is_one_chain(dtype):
    y, weights = noise(257, 8, 2048, dtype=dtype), noise(257, 8, seed=1)
    out = gpu.combine(y, weights)
    assert bits.equal(out, gpu.reference_combine(y, weights))
    g = noise(257, 2048, dtype=dtype, seed=2)
    for mine, true in zip(
        launch.combine_grad(g, y, weights), gpu.reference_combine_grad(g, y, weights), strict=True
    ):
        assert bits.equal(mine, true)


def block(x, router, up, down, routing):
    z = moe.router_logits(x, router)
    chosen = moe.topk(z, routing)
    hidden = moe.grouped_linear(x, chosen, up)
    return moe.combine(
        moe.grouped_linear(hidden, chosen, down), moe.topk_weights(z, chosen, routing)
    )


@pytest.mark.parametrize("routing", ROUTINGS, ids=["softmax", "groups"])
def test_eager_captured_and_compiled_agree_and_gradients_are_right(routing):
    e = routing.num_experts
    tensors = [
        noise(65, 256), noise(e, 256, seed=1) * 0.003, noise(e, 96, 256, seed=2) * 0.1,
        noise(e, 128, 96, seed=3) * 0.1,
    ]  # fmt: skip
    # logits of a few units: where a sigmoid is 1 in fp32, it has no gradient at all
    half = [each.bfloat16() for each in tensors]
    eager = block(*half, routing)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        block(*half, routing)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = block(*half, routing)
    graph.replay()
    assert bits.equal(captured, eager)
    compiled = torch.compile(block, fullgraph=True)(*half, routing)
    assert bits.equal(compiled, eager)
    leaves = [each.requires_grad_() for each in tensors]
    out = block(*leaves, routing)
    up = noise(*out.shape, seed=7)
    got = torch.autograd.grad(out, leaves, up)
    x, router, first, second = (each.detach().double().requires_grad_() for each in tensors)
    z = x @ router.T
    chosen = moe.topk(moe.router_logits(*tensors[:2]), routing)
    scores = z.sigmoid() if routing.sigmoid else z.softmax(-1)
    picked = scores.gather(1, chosen)
    weights = picked / picked.sum(-1, keepdim=True) * routing.scale
    hidden = torch.einsum("tkni,ti->tkn", first[chosen], x)
    exact = torch.einsum("tk,tkmn,tkn->tm", weights, second[chosen], hidden)
    for mine, true in zip(
        got, torch.autograd.grad(exact, (x, router, first, second), up.double()), strict=True
    ):
        assert (mine.double() - true).norm() <= 1e-4 * true.norm()
