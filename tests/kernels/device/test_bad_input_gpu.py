"""What a GPU operator is handed wrongly: a clear error or the same bits, never other bits."""

import pytest
import torch

from zeromismatch.kernels import adversarial, bits, certificates
from zeromismatch.kernels.accumulation import Accumulators
from zeromismatch.kernels.attention import gpu as attention
from zeromismatch.kernels.attention import gpu_launch, gpu_split
from zeromismatch.kernels.attention.gpu_table import Shape
from zeromismatch.kernels.contract import get_contract, implementations
from zeromismatch.kernels.embedding import embedding
from zeromismatch.kernels.errors import CapabilityError, ContractError, NotCertifiedError
from zeromismatch.kernels.gated import silu_mul
from zeromismatch.kernels.gpu import device
from zeromismatch.kernels.linear import linear
from zeromismatch.kernels.logprob import lm_head_logprob, logprob
from zeromismatch.kernels.rmsnorm import rmsnorm

from .conftest import Scene, ints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def noise(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_unsupported_dtypes_are_named(dtype):
    x = torch.zeros(4, 64, device="cuda").to(dtype)
    heads, start = x.view(4, 1, 64), ints([0, 4])
    for call in (
        lambda: linear(x, x),
        lambda: rmsnorm(x, x[0], 1e-6),
        lambda: silu_mul(x, x),
        lambda: attention.packed_attention(heads, heads, heads, start, scale=1.0),
        lambda: logprob(x, ints([0, 0, 0, 0]).long()),
    ):
        with pytest.raises(ContractError, match=r"no GPU contract for|convert"):
            call()


def test_head_sizes_devices_and_shapes_are_named():
    q = noise(4, 2, 257)
    with pytest.raises(ContractError, match="head size up to 256"):
        attention.packed_attention(q, q, q, ints([0, 4]), scale=1.0)
    with pytest.raises(ContractError, match="head size from 1 to 256"):
        attention.new_cache(4, 2, 257, dtype=torch.bfloat16)
    x, w = noise(4, 64), noise(8, 64)
    with pytest.raises(ContractError, match="one device"):
        linear(x, w.cpu())
    with pytest.raises(ContractError, match="one device"):
        rmsnorm(x, w[0].cpu(), 1e-6)
    with pytest.raises(ContractError):
        linear(x, noise(8, 63))
    with pytest.raises(ContractError, match="whole groups"):
        attention.packed_attention(
            noise(4, 3, 64), noise(4, 2, 64), noise(4, 2, 64), ints([0, 4]), scale=1.0
        )


def test_a_gpu_without_proof_is_refused(monkeypatch):
    x, w = noise(4, 64), noise(8, 64)
    monkeypatch.setattr(device, "PROVED_ARCHITECTURES", ("sm100",))
    monkeypatch.setattr(device, "_SERVED", set())  # what this process found out before
    with pytest.raises(CapabilityError, match="sm90 has no proved contract"):
        linear(x, w)


def test_another_release_of_triton_voids_proofs_and_the_hopper_kernel(monkeypatch):
    import triton

    scene = Scene(128, 4, 2, (400, 70))
    packed = (scene.q, scene.k, scene.v, ints(scene.start))
    served = attention.packed_attention(*packed, scale=scene.scale)
    contract = get_contract(attention.contract_id(torch.bfloat16))
    walk = next(each for each in implementations(contract.id) if each.name == "triton-walk")
    held = certificates.load(contract, walk, ())
    assert held is not None
    here = certificates.environment("sm90")
    other = held.model_copy(update={"environment": here.model_copy(update={"triton": "3.5.1"})})
    assert "triton: 3.5.1 is now" in str(certificates.void(other, contract, walk))
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    gpu_launch.has_gluon.cache_clear()
    try:
        assert not gpu_launch.hopper_serves(scene.q, 0, 0.0, None)
        assert bits.equal(attention.packed_attention(*packed, scale=scene.scale), served)
    finally:
        monkeypatch.undo()
        gpu_launch.has_gluon.cache_clear()


def test_attention_takes_strided_and_misaligned_tensors():
    scene = Scene(128, 4, 2, (400, 70))
    start, scale = ints(scene.start), scene.scale
    whole = attention.packed_attention(scene.q, scene.k, scene.v, start, scale=scale)
    wide = torch.cat((scene.q, scene.k, scene.v), 1).split((4, 2, 2), dim=1)
    assert bits.equal(attention.packed_attention(*wide, start, scale=scale), whole)
    shifted = [adversarial.misaligned(each) for each in (scene.q, scene.k, scene.v)]
    assert bits.equal(attention.packed_attention(*shifted, start, scale=scale), whole)
    _, decoded = scene.call([(0, 399, 400)])
    scene.q = torch.cat((scene.q, scene.q), 1)[:, 4:]
    index, again = scene.call([(0, 399, 400)])
    assert bits.equal(again, decoded)
    assert bits.equal(again, whole[index])


def test_zero_rows_give_zero_rows_and_zero_gradients():
    w, head = noise(8, 64).requires_grad_(), noise(50, 64).requires_grad_()
    none, ids = noise(0, 64), torch.zeros(0, dtype=torch.int64, device="cuda")
    assert linear(none, w).shape == (0, 8)
    assert lm_head_logprob(none, head, ids).shape == (0,)
    assert embedding(ids, head).shape == (0, 64)
    linear(none, w).sum().backward()
    lm_head_logprob(none, head, ids).sum().backward()
    assert not w.grad.any()
    assert not head.grad.any()
    q = noise(0, 4, 64).requires_grad_()
    attention.packed_attention(q, q, q, ints([0, 0]), scale=1.0).sum().backward()
    assert q.grad.shape == q.shape


def test_an_unproved_operator_is_refused_inside_a_capture():
    from zeromismatch.kernels import dispatch

    x, weight = noise(4, 64), noise(64)
    rmsnorm(x, weight, 1e-6)
    dispatch.forget()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NotCertifiedError, match="before capturing"), torch.cuda.graph(graph):
        rmsnorm(x, weight, 1e-6)
    torch.cuda.synchronize()
    rmsnorm(x, weight, 1e-6)


def test_every_way_of_decode_has_the_same_bits(monkeypatch):
    scene = Scene(128, 8, 2, (3300, 1, 129, 1025))
    decodes = [(0, 3299, 3300), (1, 0, 1), (2, 128, 129), (3, 1024, 1025)]
    index, first = scene.call(decodes)
    whole = attention.packed_attention(
        scene.q, scene.k, scene.v, ints(scene.start), scale=scene.scale
    )
    assert bits.equal(first, whole[index])
    monkeypatch.setattr(gpu_split, "overlaps", lambda: False)
    for warps, stages, per_sm in ((4, 2, 3), (8, 2, 1)):
        shape = Shape(16, warps, stages, per_sm)
        monkeypatch.setattr(gpu_split, "shape_of", lambda *_, shape=shape: shape)
        assert bits.equal(scene.call(decodes)[1], first), shape


def test_keys_beyond_two_to_the_31_elements():
    pages, heads = 132_000, 8
    cache = attention.new_cache(pages, heads, 128, dtype=torch.bfloat16)
    assert cache.k.numel() > 1 << 31
    k, v, q = noise(300, heads, 128), noise(300, heads, 128), noise(300, heads, 128)
    start = ints([0, 300])
    whole = attention.packed_attention(q, k, v, start, scale=0.1)
    table = torch.arange(pages - 19, pages, dtype=torch.int32, device="cuda")[None]
    slot = torch.arange(300, device="cuda") + 16 * (pages - 19)
    attention.write_kv(cache, k, v, slot)
    batch = attention.AttentionBatch(ints([0, 1]), ints([300]), table, slot[-1:])
    assert bits.equal(attention.paged_attention(q[-1:], cache, batch, scale=0.1), whole[-1:])
    every = attention.AttentionBatch(start, ints([300]), table, slot)
    assert bits.equal(attention.paged_attention(q, cache, every, scale=0.1), whole)


def test_products_and_tables_beyond_two_to_the_31_elements():
    x, w = noise(64, 64), noise(131_100, 64)
    rows = x.repeat(257, 1)
    y = linear(rows, w)
    assert y.numel() > 1 << 31
    assert bits.equal(y[-64:], linear(x, w))
    del y
    table = torch.empty(1_100_000, 2048, dtype=torch.bfloat16, device="cuda")
    table[-3:] = noise(3, 2048)
    assert table.numel() > 1 << 31
    ids = torch.tensor([1_099_999, 1_099_997], device="cuda")
    assert bits.equal(embedding(ids, table), table[ids])


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_micro_batches_on_the_grid_have_the_bits_of_the_whole(monkeypatch, bias):
    from zeromismatch.kernels.linear import gpu

    monkeypatch.setattr(gpu, "DW_CHUNK", 256)
    weights = {"w": noise(96, 64), "head": noise(3000, 96), "norm": noise(64)}
    weights |= {"b": noise(96)} if bias else {}
    x, ids, g = noise(1024, 64), torch.randint(0, 3000, (1024,), device="cuda"), noise(1024).float()

    def summed(cuts):
        leaves = {name: each.clone().requires_grad_() for name, each in weights.items()}
        sums = Accumulators(leaves)
        for a, b in zip([0, *cuts], [*cuts, 1024], strict=True):
            with sums.micro_batch():
                h = linear(rmsnorm(x[a:b], leaves["norm"], 1e-6), leaves["w"], leaves.get("b"))
                lm_head_logprob(h, leaves["head"], ids[a:b]).backward(g[a:b])
        assert leaves["w"].grad is None
        assert leaves["head"].grad is None
        return {name: sums.gradient(name) for name in leaves}

    whole, parts, other = summed([]), summed([256, 768]), summed([200, 700])
    for name in whole.keys() - {"norm"}:
        assert whole[name].dtype == torch.float32
        assert bits.equal(whole[name], parts[name]), name
    assert not bits.equal(whole["w"], other["w"])
    error = (whole["norm"] - parts["norm"]).norm()
    assert error <= 1e-5 * whole["norm"].norm()
