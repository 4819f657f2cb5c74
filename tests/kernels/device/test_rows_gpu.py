"""Row operators on a GPU: bits of the definition, gradients near fp64, nothing depends on the
batch.
"""

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.embedding import gpu as embedding
from zeromismatch.kernels.gated import gpu as gated
from zeromismatch.kernels.gpu import digest
from zeromismatch.kernels.logprob import gpu as logprob
from zeromismatch.kernels.logprob import gpu_head
from zeromismatch.kernels.reference.digest import digest_rows
from zeromismatch.kernels.rmsnorm import gpu as rmsnorm
from zeromismatch.kernels.rotary import gpu as rotary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows(m, n, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(m, n, generator=generator, device="cuda")
    x *= torch.exp2(torch.randint(-6, 7, (m, n), generator=generator, device="cuda").float())
    return x.to(dtype)


def near(mine, true, rtol):
    return (mine.double() - true).norm() <= rtol * true.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 80, 128, 576, 2048, 4096, 5120, 8192])
@pytest.mark.parametrize("offset", [False, True])
def test_rmsnorm_equals_its_definition(dtype, width, offset):
    x, w = rows(37, width, dtype), rows(1, width, dtype, 1)[0]
    out = rmsnorm.rmsnorm(x, w, 1e-6, unit_offset=offset)
    expected = rmsnorm.reference(x, w, 1e-6, offset)
    assert bits.equal(out, expected), bits.first_difference(out, expected)
    for m in (1, 2, 3, 5, 16, 17, 36):
        assert bits.equal(rmsnorm.rmsnorm(x[-m:], w, 1e-6, unit_offset=offset), out[-m:])
    spoiled = x.clone()
    spoiled[::2] = float("nan")
    assert bits.equal(rmsnorm.rmsnorm(spoiled, w, 1e-6, unit_offset=offset)[1::2], out[1::2])
    shifted = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view_as(x).copy_(x)
    assert bits.equal(rmsnorm.rmsnorm(shifted, w, 1e-6, unit_offset=offset), out)
    r = rows(37, width, dtype, 2)
    y, s = rmsnorm.rmsnorm_residual(x, r, w, 1e-6, unit_offset=offset)
    assert bits.equal(s, (x.float() + r.float()).to(dtype))
    assert bits.equal(y, rmsnorm.reference(s, w, 1e-6, offset))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "heads", "first"), [(128, 16, 0), (128, 8, 2048), (64, 9, 4)])
def test_heads_are_normed_where_they_lie_in_wider_rows(dtype, width, heads, first):
    fused, w = rows(37, width * heads + 4096, dtype), rows(1, width, dtype, 1)[0]
    x = fused[:, first : first + heads * width].unflatten(1, (heads, width))
    out = rmsnorm.rmsnorm_heads(x, w, 1e-6)
    assert out.is_contiguous()
    expected = rmsnorm.reference(x.reshape(-1, width), w, 1e-6)
    assert bits.equal(out.view(-1, width), expected)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
def test_rmsnorm_gradients(dtype, rtol):
    x, r, w = (
        t.requires_grad_()
        for t in (rows(300, 576, dtype), rows(300, 576, dtype, 1), rows(1, 576, dtype, 2)[0])
    )
    y, s = rmsnorm.rmsnorm_residual(x, r, w, 1e-6)
    (y.float().sum() + (s.float() * 0.5).sum()).backward()
    xd, rd, wd = (t.detach().double().requires_grad_() for t in (x, r, w))
    sd = xd + rd
    yd = sd * torch.rsqrt(sd.pow(2).mean(-1, keepdim=True) + 1e-6) * wd
    (yd.sum() + 0.5 * sd.sum()).backward()
    assert near(x.grad, xd.grad, rtol)
    assert near(w.grad, wd.grad, rtol)
    assert bits.equal(x.grad, r.grad)
    first = w.grad.clone()
    for _ in range(3):
        w.grad = x.grad = r.grad = None
        y, s = rmsnorm.rmsnorm_residual(x, r, w, 1e-6)
        (y.float().sum() + (s.float() * 0.5).sum()).backward()
        assert bits.equal(w.grad, first)


@pytest.mark.parametrize("width", [128, 576, 4096])
def test_a_norms_weight_gradient_continues_between_blocks_of_rows(width):
    block, many = rmsnorm.DW_ROWS, 2 * rmsnorm.DW_ROWS + 130
    x, dy, w = (rows(m, width, torch.bfloat16, m) for m in (many, many + 1, 1))
    dy, w = dy[:many], w[0]
    whole = rmsnorm.rmsnorm_backward(dy, x, w, 1e-6)[1]
    assert bits.equal(whole, rmsnorm.reference_grad(dy, x, w, 1e-6)[1])
    for cut, equal in ((block, True), (2 * block, True), (block - 1, False)):
        first = rmsnorm.rmsnorm_backward(dy[:cut], x[:cut], w, 1e-6)[1]
        rmsnorm.rmsnorm_backward(dy[cut:], x[cut:], w, 1e-6, accumulate_into=first)
        assert bits.equal(first, whole) == equal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 128])
def test_rotary_equals_torch_and_its_gradient_is_the_transpose(dtype, size):
    x = rows(33 * 6, size, dtype).view(33, 6, size).requires_grad_()
    angle = torch.rand(33, size // 2, device="cuda") * 6
    cos, sin = (f(torch.cat((angle, angle), 1)) for f in (torch.cos, torch.sin))
    y = rotary.apply_rotary(x, cos, sin)
    assert bits.equal(y.detach(), rotary.reference(x.detach(), cos, sin))
    assert bits.equal(rotary.apply_rotary(x[5:6], cos[5:6], sin[5:6]).detach(), y[5:6].detach())
    sliced = torch.cat((x, x), 1).detach()[:, 6:]
    assert bits.equal(rotary.apply_rotary(sliced, cos, sin), y.detach())
    g = torch.randn_like(y)
    y.backward(g)
    xd = x.detach().double().requires_grad_()
    a, b = xd.chunk(2, -1)
    (xd * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]).backward(g.double())
    assert near(x.grad, xd.grad, 1e-2 if dtype != torch.float32 else 1e-6)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gated_activations(dtype, rtol, name):
    both = rows(50, 2 * 1100, dtype)
    gate, up = both[:, :1100], both[:, 1100:]
    fused = getattr(gated, f"{name}_mul")
    alone = getattr(gated, name)
    y = fused(gate, up)
    assert bits.equal(y, (alone(gate).float() * up.float()).to(dtype))
    assert bits.equal(fused(gate[7:8], up[7:8]), y[7:8])
    act = {
        "silu": torch.nn.functional.silu,
        "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }[name]
    gate, up = (t.clamp(-8, 8).contiguous().requires_grad_() for t in (gate, up))
    out = fused(gate, up)
    g = torch.randn_like(out)
    out.backward(g)
    wide = [t.detach().double().requires_grad_() for t in (gate, up)]
    true = act(wide[0]) * wide[1]
    true.backward(g.double())
    assert near(out, true, rtol)
    assert near(gate.grad, wide[0].grad, rtol)
    assert near(up.grad, wide[1].grad, rtol)


def test_embedding_gradient_has_one_order():
    ids = torch.randint(0, 40, (3000,), device="cuda")
    ids[:700] = 7
    ids[1000:1200] = 11
    ids[1200:1264] = 12
    dy = rows(3000, 600, torch.bfloat16)
    dw = embedding.grad_weight(dy, ids, 50, out_dtype=torch.bfloat16)
    assert bits.equal(dw, embedding.reference_grad(dy, ids, 50).to(torch.bfloat16))
    one = embedding.grad_weight(dy[ids == 7], ids[ids == 7], 50, out_dtype=torch.bfloat16)
    assert bits.equal(one[7], dw[7])
    weight = rows(50, 600, torch.bfloat16, 3).requires_grad_()
    embedding.embedding(ids.view(30, 100), weight).backward(dy.view(30, 100, 600))
    assert bits.equal(weight.grad, dw)


@pytest.mark.parametrize("vocabulary", [1000, 4096, 49152, 151936])
def test_logprob_depends_on_its_row_alone(vocabulary):
    z = rows(70, vocabulary, torch.float32) * 0.1
    targets = torch.randint(0, vocabulary, (70,), device="cuda")
    t = torch.rand(70, device="cuda") + 0.5
    lp = logprob.logprob(z, targets, t)
    true = torch.log_softmax(z.double() / t.double()[:, None], -1).gather(1, targets[:, None])[:, 0]
    assert (lp.double() - true).abs().max() < 1e-5 + 1e-6 * true.abs().max()
    for m in (1, 3, 64):
        assert bits.equal(logprob.logprob(z[-m:], targets[-m:], t[-m:]), lp[-m:])


@pytest.mark.parametrize("kept", [0.0, 0.46, 0.92])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_head_has_the_unfused_bits_and_gradients_near_fp64(dtype, kept, monkeypatch):
    monkeypatch.setattr(gpu_head, "ROWS", 96)
    monkeypatch.setattr(gpu_head, "CHUNK", 4096)
    monkeypatch.setattr(gpu_head, "KEPT", kept)
    h = (torch.randn(250, 256, device="cuda") * 0.3).to(dtype).requires_grad_()
    w = (torch.randn(9001, 256, device="cuda") * 0.3).to(dtype).requires_grad_()
    targets = torch.randint(0, 9001, (250,), device="cuda")
    lp = gpu_head.lm_head_logprob(h, w, targets, None, 0.7)
    plain = logprob.logprob(logprob.lm_head(h.detach(), w.detach()), targets, 0.7)
    assert bits.equal(lp.detach(), plain)
    g = torch.randn(250, device="cuda")
    lp.backward(g)
    hd, wd = (t.detach().double().requires_grad_() for t in (h, w))
    (
        torch.log_softmax(hd @ wd.t() / 0.7, -1).gather(1, targets[:, None])[:, 0] * g.double()
    ).sum().backward()
    rtol = 2e-2 if dtype == torch.bfloat16 else 1e-3
    assert near(h.grad, hd.grad, rtol)
    assert near(w.grad, wd.grad, rtol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_digest_tap_equals_the_definition_and_survives_replay_and_compile(dtype):
    x = torch.randint(0, 200, (33, 5, 700), device="cuda").to(dtype)
    out = torch.zeros(33, 2, dtype=torch.int64, device="cuda")
    assert bits.equal(digest.digest_into(x, out), digest_rows(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        digest.digest_into(x, out)
    x += 1
    graph.replay()
    assert bits.equal(out, digest_rows(x))
    if dtype == torch.float32:
        tapped = torch.compile(lambda x, out: (digest.digest_into(x * 2, out), x * 2)[1])
        doubled = tapped(x, out)
        assert bits.equal(out, digest_rows(doubled))


def test_compiled_and_captured_rows_equal_eager():
    x, w = rows(65, 2048, torch.bfloat16), rows(1, 2048, torch.bfloat16, 1)[0]

    def block(x):
        y, s = rmsnorm.rmsnorm_residual(x, x, w, 1e-6)
        return gated.silu_mul(y[:, :1024], y[:, 1024:]), s

    eager = block(x)
    compiled = torch.compile(block)(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = block(x)
    graph.replay()
    for each in (compiled, captured):
        assert bits.equal(each[0], eager[0])
        assert bits.equal(each[1], eager[1])


def test_more_than_two_to_the_31_elements():
    x = rows(1, 32768, torch.bfloat16).expand(66000, -1).contiguous()
    y = gated.silu(x)
    assert bits.equal(y[-1:], gated.silu(x[:1]))
    assert bits.equal(y[65534:65536], y[:2])
    del y
    w = rows(1, 4096, torch.bfloat16, 1)[0]
    y = rmsnorm.rmsnorm(x.view(-1, 4096), w, 1e-6)
    assert bits.equal(y[-8:], rmsnorm.rmsnorm(x[:1].view(-1, 4096), w, 1e-6))
    del x, y
    z = rows(1, 151936, torch.float32).mul(0.1).expand(14200, -1).contiguous()
    targets = torch.full((14200,), 77, device="cuda")
    lp = logprob.logprob(z, targets)
    assert bits.equal(lp[-1:], logprob.logprob(z[:1], targets[:1]))
