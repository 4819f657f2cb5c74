"""Attention on a GPU: prefill, chunks, decode, prefix hits, packed training: one set of bits."""

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.attention import gpu
from zeromismatch.kernels.attention.batch import AttentionBatch

from .conftest import Scene, ints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # torch's own, from the fp64 reference's first product in autograd's thread
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
# (head size, query heads, kv heads, window, softcap, sinks)
KINDS = [
    (128, 8, 2, None, None, False),
    (128, 7, 1, None, None, False),
    (128, 4, 4, 700, None, True),
    (64, 8, 1, None, 30.0, False),
    (64, 6, 3, 333, None, False),
    (80, 4, 2, None, None, False),
    (96, 4, 2, None, None, False),
    (256, 4, 2, 1500, 50.0, False),
    (256, 8, 1, None, None, True),
    (48, 6, 2, 100, 9.0, False),
]
LENGTHS = (3300, 1, 17, 1024, 1025, 129)


FP32_KINDS = [(64, 4, 2, None, None, False), (128, 4, 1, 200, 30.0, True)]


@pytest.mark.parametrize(
    ("dtype", "size", "heads", "kv_heads", "window", "softcap", "with_sinks"),
    [(torch.bfloat16, *kind) for kind in KINDS] + [(torch.float32, *kind) for kind in FP32_KINDS],
)
def test_every_phase_has_the_same_bits(dtype, size, heads, kv_heads, window, softcap, with_sinks):
    scene = Scene(size, heads, kv_heads, LENGTHS, dtype)
    sinks = torch.randn(heads, device="cuda") if with_sinks else None
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    whole = gpu.packed_attention(
        scene.q, scene.k, scene.v, ints(scene.start), scale=scene.scale, **options
    )
    assert bool(torch.isfinite(whole).all())
    calls = {
        "prefill": [(r, 0, n) for r, n in enumerate(LENGTHS)],
        "chunk from 1000": [(0, 1000, 3300), (3, 512, 1024)],
        "chunk of 40": [(0, 3000, 3040), (4, 1000, 1025), (2, 3, 17)],
        "decode": [(r, n - 1, n) for r, n in enumerate(LENGTHS)],
        "decode early": [(0, p, p + 1) for p in (0,)] + [(3, 1023, 1024), (4, 1023, 1024)],
        "mixed": [(0, 3298, 3300), (1, 0, 1), (3, 100, 1024), (5, 127, 129)],
    }
    for position in (15, 16, 127, 128, 1023, 1024, 1025, 2047, 2048, 3071, 3072):
        calls[f"decode at {position}"] = [(0, position, position + 1)]
    for name, slices in calls.items():
        index, out = scene.call(slices, **options)
        assert bits.equal(out, whole[index]), (name, bits.first_difference(out, whole[index]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accuracy_is_that_of_the_stock_operator(dtype):
    scene = Scene(128, 8, 2, (1500,), dtype)
    out = gpu.packed_attention(scene.q, scene.k, scene.v, ints(scene.start), scale=scene.scale)
    q, k, v = (t.transpose(0, 1)[None] for t in (scene.q, scene.k, scene.v))
    k, v = (t.repeat_interleave(4, 1) for t in (k, v))
    true = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    )
    stock = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    error = (out.double() - true[0].transpose(0, 1)).norm()
    assert error <= 2 * (stock.double() - true).norm()


def test_stock_attention_fails_the_same_test():
    scene = Scene(128, 8, 8, (3300,))
    q, k, v = (t.transpose(0, 1)[None] for t in (scene.q, scene.k, scene.v))
    attend = torch.nn.functional.scaled_dot_product_attention
    whole = attend(q, k, v, is_causal=True)
    alone = attend(q[:, :, -1:], k, v)
    assert not bits.equal(alone, whole[:, :, -1:])


def true_gradients(scene, do, window, softcap, sinks):
    size, group = scene.q.shape[2], scene.q.shape[1] // scene.k.shape[1]
    wide = [t.double().requires_grad_() for t in (scene.q, scene.k, scene.v)]
    outs = []
    for start, stop in zip(scene.start[:-1], scene.start[1:], strict=True):
        q, k, v = (t[start:stop].transpose(0, 1) for t in wide)
        k, v = (t.repeat_interleave(group, 0) for t in (k, v))
        s = q @ k.transpose(1, 2) * size**-0.5
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        at = torch.arange(stop - start, device="cuda")
        seen = at[:, None] >= at[None]
        if window:
            seen &= at[:, None] - at[None] < window
        s = s.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            s = torch.cat((s, sinks.double()[:, None, None].expand(-1, stop - start, 1)), -1)
            outs.append((s.softmax(-1)[..., :-1] @ v).transpose(0, 1))
        else:
            outs.append((s.softmax(-1) @ v).transpose(0, 1))
    torch.cat(outs).backward(do.double())
    return torch.cat(outs), [t.grad for t in wide]


@pytest.mark.parametrize(
    ("dtype", "size", "heads", "kv_heads", "window", "softcap", "with_sinks"),
    [(torch.bfloat16, *kind) for kind in KINDS] + [(torch.float32, *kind) for kind in FP32_KINDS],
)
def test_gradients_agree_with_fp64_and_repeat(
    dtype, size, heads, kv_heads, window, softcap, with_sinks
):
    scene = Scene(size, heads, kv_heads, (700, 1, 130, 65), dtype)
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    sinks = torch.randn(heads, device="cuda") if with_sinks else None
    do = torch.randn_like(scene.q)
    out, expected = true_gradients(scene, do, window, softcap, sinks)
    first = None
    for _ in range(3):
        leaves = [t.clone().requires_grad_() for t in (scene.q, scene.k, scene.v)]
        o = gpu.packed_attention(
            *leaves,
            ints(scene.start),
            scale=scene.scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        o.backward(do)
        grads = [t.grad for t in leaves]
        if first is None:
            first = grads
            assert (o.double() - out).norm() <= rtol * out.norm()
            for mine, true in zip(grads, expected, strict=True):
                assert (mine.double() - true).norm() <= 2 * rtol * true.norm()
        assert all(bits.equal(a, b) for a, b in zip(grads, first, strict=True))


def test_gradients_of_a_request_do_not_depend_on_the_pack():
    scene = Scene(128, 8, 2, (400, 300))
    do = torch.randn_like(scene.q)

    def grads(part, start):
        leaves = [t[part].clone().requires_grad_() for t in (scene.q, scene.k, scene.v)]
        gpu.packed_attention(*leaves, ints(start), scale=scene.scale).backward(do[part])
        return [t.grad for t in leaves]

    both, alone = grads(slice(None), scene.start), grads(slice(400, 700), [0, 300])
    assert all(bits.equal(a[400:], b) for a, b in zip(both, alone, strict=True))


def test_captured_decode_follows_lengths_on_the_device():
    scene = Scene(128, 8, 2, (2000, 2000, 2000))
    whole = gpu.packed_attention(scene.q, scene.k, scene.v, ints(scene.start), scale=scene.scale)
    for request in range(3):
        base = scene.start[request]
        gpu.write_kv(
            scene.cache,
            scene.k[base : base + 2000],
            scene.v[base : base + 2000],
            scene.slots(request, 0, 2000),
        )
    q, lens = scene.q[[0, 1, 2]].clone(), ints([1, 1, 1])
    batch = AttentionBatch(
        ints([0, 1, 2, 3]), lens, scene.table, torch.zeros(3, dtype=torch.int64, device="cuda")
    )

    def run():
        work = gpu.schedule(
            batch.query_start,
            lens,
            tokens=3,
            group=4,
            tile=gpu.walk_tile(q),
            max_kv=2048,
            max_query=1,
        )
        return gpu.paged_attention(q, scene.cache, batch, scale=scene.scale, work=work)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for at in ((0, 5, 1999), (1500, 1023, 1024)):
        lens.copy_(ints([p + 1 for p in at]))
        index = torch.tensor([scene.start[r] + p for r, p in enumerate(at)], device="cuda")
        q.copy_(scene.q[index])
        graph.replay()
        assert bits.equal(out, whole[index])


def test_backward_repeats_a_hundred_times_under_load():
    scene = Scene(128, 8, 2, (1500, 500))
    do = torch.randn_like(scene.q)
    settings = (scene.scale, 0, 0.0)
    o, lse = gpu.packed_attention_op(scene.q, scene.k, scene.v, ints(scene.start), *settings, None)
    first = None
    noise, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(side):
            noise @ noise
        grads = gpu.backward(do, scene.q, scene.k, scene.v, o, lse, ints(scene.start), *settings)
        first = first or grads
        assert all(bits.equal(a, b) for a, b in zip(grads, first, strict=True))
