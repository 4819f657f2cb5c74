"""The adopted contract on a GPU: FlashAttention 3 of vLLM at a head size that fixes its tile."""

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.accumulation import Accumulators
from zeromismatch.kernels.attention import gpu
from zeromismatch.kernels.attention import gpu_flash3 as flash3
from zeromismatch.kernels.errors import ContractError

from .conftest import Scene, ints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LENGTHS = (3300, 1, 17, 1024, 1025, 129)


@pytest.fixture(scope="module", autouse=True)
def library():
    if flash3.missing():
        pytest.skip(flash3.missing())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (7, 1), (4, 4), (32, 8)])
def test_every_phase_has_the_same_bits(dtype, heads, kv_heads):
    scene, contract = Scene(128, heads, kv_heads, LENGTHS, dtype), flash3.contract_id(dtype)
    whole = gpu.packed_attention(
        scene.q, scene.k, scene.v, ints(scene.start), scale=scene.scale, contract=contract
    )
    alone = gpu.packed_attention(
        *(each[:3300] for each in (scene.q, scene.k, scene.v)), ints([0, 3300]), scale=scene.scale,
        contract=contract,
    )  # fmt: skip
    assert bits.equal(alone, whole[:3300])
    calls = {
        "prefill": [(r, 0, n) for r, n in enumerate(LENGTHS)],
        "chunk from 1000": [(0, 1000, 3300), (3, 512, 1024)],
        "chunk of 40": [(0, 3000, 3040), (4, 1000, 1025), (2, 3, 17)],
        "decode": [(r, n - 1, n) for r, n in enumerate(LENGTHS)],
        "mixed": [(0, 3298, 3300), (1, 0, 1), (3, 100, 1024), (5, 127, 129)],
    }
    for position in (0, 15, 16, 127, 128, 383, 384, 1023, 1024, 2047, 3072):
        calls[f"decode at {position}"] = [(0, position, position + 1)]
    for name, slices in calls.items():
        index, out = scene.call(slices, contract=contract)
        assert bits.equal(out, whole[index]), (name, bits.first_difference(out, whole[index]))
    own = gpu.packed_attention(scene.q, scene.k, scene.v, ints(scene.start), scale=scene.scale)
    assert not bits.equal(own, whole)  # another contract, never in its place


def test_the_same_kernel_at_head_size_64_fails_the_same_test():
    scene = Scene(64, 8, 2, (3300,))
    settings = (scene.scale, 0, 0.0, None)
    whole, _ = flash3.packed_forward(scene.q, scene.k, scene.v, ints(scene.start), settings)
    pages, last = scene.cache, 3299
    gpu.write_kv(pages, scene.k, scene.v, scene.slots(0, 0, 3300))
    work = gpu.Work(ints([0]), ints([0]), 0, 0, 4)
    index = (ints([0, 1]), ints([3300]), scene.table)
    row, _ = flash3.paged_forward(scene.q[last:], pages.k, pages.v, index, work, settings)
    assert not bits.equal(row, whole[last:])


def test_accuracy_and_gradients_are_those_of_fp64():
    scene, contract = Scene(128, 8, 2, (700, 300)), flash3.contract_id(torch.bfloat16)
    do = torch.randn_like(scene.q)
    wide = [t.double().requires_grad_() for t in (scene.q, scene.k, scene.v)]
    outs = []
    for a, b in ((0, 700), (700, 1000)):
        q, k, v = (t[a:b].transpose(0, 1)[None] for t in wide)
        k, v = (t.repeat_interleave(4, 1) for t in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        outs.append(out[0].transpose(0, 1))
    torch.cat(outs).backward(do.double())
    first = None
    for _ in range(3):
        leaves = [t.clone().requires_grad_() for t in (scene.q, scene.k, scene.v)]
        o = gpu.packed_attention(*leaves, ints(scene.start), scale=scene.scale, contract=contract)
        o.backward(do)
        assert (o.double() - torch.cat(outs)).norm() <= 1e-2 * torch.cat(outs).norm()
        for mine, true in zip(leaves, wide, strict=True):
            assert (mine.grad.double() - true.grad).norm() <= 2e-2 * true.grad.norm()
        first = first or [t.grad for t in leaves]
        assert all(bits.equal(t.grad, g) for t, g in zip(leaves, first, strict=True))


def test_captured_decode_follows_lengths_and_pages():
    scene, contract = Scene(128, 8, 2, (2000, 2000)), flash3.contract_id(torch.bfloat16)
    index, whole = scene.call([(0, 0, 2000), (1, 0, 2000)], contract=contract)
    assert index.numel() == 4000
    q, lens = scene.q[:2].clone(), ints([1, 1])
    work = gpu.Work(lens, lens, 0, 0, 4)

    def run():
        return flash3.paged_op(
            q, scene.cache.k, scene.cache.v, ints_once, lens, scene.table, work.tiles, work.few,
            scene.scale,
        )  # fmt: skip

    ints_once = ints([0, 1, 2])
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for at in ((5, 1999), (1023, 384)):
        rows = torch.tensor([at[0], 2000 + at[1]], device="cuda")
        lens.copy_(ints([p + 1 for p in at]))
        q.copy_(scene.q[rows])
        graph.replay()
        assert bits.equal(out, whole[rows])


@pytest.mark.parametrize(
    ("size", "options"), [(64, {}), (256, {}), (128, {"window": 50}), (128, {"softcap": 3.0})]
)
def test_what_it_does_not_cover_is_refused(size, options):
    scene, contract = Scene(size, 4, 2, (40,)), flash3.contract_id(torch.bfloat16)
    packed = (scene.q, scene.k, scene.v, ints(scene.start))
    with pytest.raises(ContractError, match=r"attention[.]split1024 in"):
        gpu.packed_attention(*packed, scale=1.0, contract=contract, **options)
    with pytest.raises(ContractError, match="no attention contract"):
        gpu.packed_attention(*packed, scale=1.0, contract="attention.other.v1")


def test_gradients_leave_accumulators_alone():
    scene, contract = Scene(128, 4, 2, (200,)), flash3.contract_id(torch.bfloat16)
    leaves = [t.clone().requires_grad_() for t in (scene.q, scene.k, scene.v)]
    with Accumulators({"q": leaves[0]}).micro_batch():
        o = gpu.packed_attention(*leaves, ints(scene.start), scale=1.0, contract=contract)
        o.sum().backward()
    assert all(t.grad is not None for t in leaves)
