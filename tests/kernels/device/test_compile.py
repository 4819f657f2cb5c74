"""Every Triton kernel compiles for the GPUs we name, with Triton's own compiler and no GPU at hand.

The product's own launch functions run on CPU tensors; a stand-in driver names the target and every
launch stops after compilation. On sm_90 the code is also read: no spilled matrix loop, matrix
instructions of the kind the contract names. Bits are proved on sm_90 only; elsewhere this shows
compilation, nothing more.
"""

import contextlib
import re

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from zeromismatch.kernels.attention import gpu as attention  # noqa: E402
from zeromismatch.kernels.attention import gpu_launch as launch  # noqa: E402
from zeromismatch.kernels.attention import gpu_split as splits  # noqa: E402
from zeromismatch.kernels.convolution import gpu as convolution  # noqa: E402
from zeromismatch.kernels.embedding import gpu as embedding  # noqa: E402
from zeromismatch.kernels.gated import gpu as gated  # noqa: E402
from zeromismatch.kernels.gated_norm import gpu as norms  # noqa: E402
from zeromismatch.kernels.gates import gpu as gates  # noqa: E402
from zeromismatch.kernels.gpu import device, digest, digest_many  # noqa: E402
from zeromismatch.kernels.linear import gpu_gemm as linear  # noqa: E402
from zeromismatch.kernels.linear.gpu_table import FP32, FP32_SMALL, LARGE, REFERENCE, ROWS  # noqa: E402
from zeromismatch.kernels.logprob import gpu as logprob  # noqa: E402
from zeromismatch.kernels.moe import gpu as moe  # noqa: E402
from zeromismatch.kernels.moe import gpu_launch as moe_launch  # noqa: E402
from zeromismatch.kernels.recurrence import gpu as recurrence  # noqa: E402
from zeromismatch.kernels.recurrence import gpu_blocks as blocks  # noqa: E402
from zeromismatch.kernels.recurrence import gpu_gradient as gradient  # noqa: E402
from zeromismatch.kernels.recurrence.pages import packed_rows  # noqa: E402
from zeromismatch.kernels.rmsnorm import gpu as rmsnorm  # noqa: E402
from zeromismatch.kernels.rotary import gpu as rotary  # noqa: E402
from zeromismatch.kernels.rotary import gpu_fused  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
BF16 = torch.bfloat16


class Stand:
    """A driver that names a target and owns no GPU."""

    def __init__(self, name):
        self.target, self.device = TARGETS[name], name

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.device

    def get_current_stream(self, _):
        return 0


@contextlib.contextmanager
def compiling(monkeypatch, name):
    """Launches compile for ``name`` and return; yields {kernel name: compiled kernels}."""
    compiled = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.setdefault(self.__name__, []).append(kernel)
        return kernel

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(device, "num_multiprocessors", lambda index=0: 132)
        for module in (linear, splits):
            patch.setattr(module, "num_multiprocessors", lambda index=0: 132)
        patch.setattr(splits, "overlaps", lambda: name in ("sm_90", "sm_100"))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        active = driver._active if hasattr(driver, "_active") else None
        driver.set_active(Stand(name))
        try:
            yield compiled
        finally:
            if active is not None:
                driver.set_active(active)
            else:
                driver._active = None


def products(whole):
    """Every tile in every form, or one of each kind."""
    a, b = torch.zeros(64, 256, dtype=BF16), torch.zeros(512, 256, dtype=BF16)
    a_t, b_t = a.t().contiguous(), b.t().contiguous()
    tiles = {tile for _, *pair in ROWS for tile in pair} | {LARGE, REFERENCE}
    for tile in tiles if whole else (ROWS[0][1], LARGE, REFERENCE):
        linear.run_tile(tile, "nt", a, b, None, torch.empty(64, 512, dtype=BF16))
        if whole:
            linear.run_tile(tile, "nn", a, b_t, None, torch.empty(64, 512))
            linear.run_tile(tile, "tn", a_t, b_t, None, torch.empty(64, 512))
    bias = b[:, 0].float().contiguous()
    for tile in (FP32, FP32_SMALL):
        linear.run_tile(tile, "nt", a.float(), b.float(), bias, torch.empty(64, 512))


def row_operators():
    x, w = torch.zeros(8, 2048, dtype=BF16), torch.zeros(2048, dtype=BF16)
    rmsnorm.forward(x, w, 1e-6)
    rmsnorm.forward(x, w, 1e-6, True, x.clone())
    rmsnorm.forward(x[:, 64:192].unflatten(1, (2, 64)), w[:64], 1e-6)
    rmsnorm.backward(x, x.clone(), w, 1e-6, False, x.clone())
    cos = torch.zeros(8, 128)
    rotary.rotate(x.view(8, 16, 128), cos, cos.clone())
    rotary.rotate(x.view(8, 16, 128), cos, cos.clone(), transposed=True)
    heads, where = x.view(8, 16, 128), torch.zeros(8, dtype=torch.int64)
    gpu_fused.forward(heads, w[:128], w[:128], 1e-6, where, cos, cos.clone(), 8)
    for gelu in (False, True):
        gated.forward(gelu, x, x.clone())
        gated.backward(gelu, x, x.clone(), x.clone())
    gated.cap_forward(x.float(), 30.0)
    gated.cap_backward(x.float(), x.float(), 30.0)
    embedding.grad_weight(x, torch.arange(8), 32)
    embedding.gather(torch.arange(8), x)
    z, t = torch.zeros(4, 5000), torch.ones(4)
    lp, row_max, log_sum = logprob.forward(z, torch.zeros(4, dtype=torch.int64), t)
    saved = (torch.zeros(4, dtype=torch.int64), t, row_max, log_sum, lp)
    logprob.d_logits(z, *saved, torch.empty_like(z, dtype=BF16))
    for dtype in (torch.uint8, BF16, torch.float32):
        digest.launch(x.to(dtype), torch.zeros(8, 2, dtype=torch.int64))
        digest_many.DigestMany([x.to(dtype)])


def hopper():
    q, k = torch.zeros(256, 8, 128, dtype=BF16), torch.zeros(256, 2, 128, dtype=BF16)
    start = torch.tensor([0, 100, 256], dtype=torch.int32)
    attention.packed_forward(q, k, k.clone(), start, (0.1, 0, 0.0, None), specialised=True)


def attentions(size, window, softcap, dtype=BF16):
    tokens, heads, kv_heads = 300, 8, 2
    q, k, v = (torch.zeros(tokens, h, size, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    start = torch.tensor([0, tokens], dtype=torch.int32)
    settings = (0.1, window, softcap, torch.zeros(heads))
    o, lse = attention.packed_forward(q, k, v, start, settings, specialised=False)
    launch.backward(q.clone(), q, k, v, o, lse, start, *settings[:3])
    cache = attention.new_cache(32, kv_heads, size, dtype=dtype, device="cpu")
    attention.write_kv_op(cache.k, cache.v, k, v, torch.arange(tokens))
    work = attention.schedule(
        start,
        start[1:],
        tokens=tokens,
        group=4,
        tile=attention.walk_tile(q),
        max_kv=512,
        window=window,
    )
    index = (start, start[1:], torch.zeros(1, 32, dtype=torch.int32))
    attention.paged_forward(q, cache.k, cache.v, index, work, settings)


def experts(dtype=BF16):
    z = torch.zeros(5, 64)
    chosen = moe_launch.topk(z, z[0].clone(), 4, 8, 2, True)
    weights = moe_launch.topk_weights(z, chosen, True, True, 1e-20, 1.0)
    moe_launch.topk_weights_grad(weights.clone(), z, chosen, True, True, 1e-20, 1.0)
    x, weight = torch.zeros(5, 128, dtype=dtype), torch.zeros(64, 96, 128, dtype=dtype)
    moe.grouped_linear(x[:1], chosen[:1], weight)
    y = moe.grouped_linear(x, chosen, weight)
    moe.grouped_linear_grad(y, x, chosen, weight)
    moe.combine(y, weights)
    moe_launch.combine_grad(torch.zeros(5, 96, dtype=dtype), y, weights)


def recurrences(whole, chunk=64, key=128, value=128):
    """Qwen3-Next's and Kimi-Linear's head sizes, and Nemotron-H's; or one of them."""
    batch = packed_rows(torch.tensor([0, 5], dtype=torch.int32), chunk)
    index = (batch.query_start, batch.length, batch.table, batch.slot)
    rows, beta = torch.zeros(5, 2, key), torch.zeros(5, 2)
    kinds = ("ssd", value // 2), ("gated_delta", value), ("kda", value)
    for kind, width in kinds if whole else kinds[-1:]:
        v = torch.zeros(5, 2, width)
        g = rows if kind == "kda" else beta
        stores = [x.new_zeros(2, chunk, *x.shape[1:]) for x in (rows, v, g)]
        end = torch.zeros(2, 2, key, width)
        strength = None if kind == "ssd" else beta
        recurrence.launch(rows, rows.clone(), v, g.clone(), strength, *stores, end, *index)
        saved = rows.clone(), v, g.clone(), strength, v.clone(), end[:0]
        gradient.gradient(v.clone(), rows, *saved, batch.query_start, chunk)
        stores = [x.new_zeros(2, chunk, *x.shape[1:]).to(BF16) for x in (rows, v)]
        stores += [g.new_zeros(2, chunk, *g.shape[1:]), end]
        given = rows.to(BF16), rows.to(BF16), v.to(BF16), g, strength
        gradient.block_gradient(v.clone(), *given, end[:0], batch.query_start, chunk)
        few = blocks.shape_of(1, 1, v, g, strength is not None, chunk)
        for shape in (None, few):
            blocks.launch(*given, *stores, *index[:3], shape=shape)
    for dtype in (torch.float32, BF16):
        x, pages = torch.zeros(5, 700, dtype=dtype), torch.zeros(2, chunk, 700, dtype=dtype)
        weight = torch.zeros(700, 4, dtype=dtype)
        convolution.launch(x, weight, weight[:, 0].contiguous(), True, pages, *index)
        gates.elementwise(1, x, x.clone())
        gates.decay(x, weight[:4, 0].contiguous(), weight[:, 0].contiguous())
        gates.time_step(x, weight[:, 0].contiguous(), 0.0, 0.1)
        heads, float_rows = x.view(5, 100, 7), torch.zeros(5, 100, 7)
        gates.discretised(heads, heads[..., 0].contiguous(), weight[:100, 0].contiguous())
        gates.skip(float_rows, heads, weight[:100, 0].contiguous())
        for order, group in (("silu_after", 700), ("sigmoid_after", 700), ("silu_before", 350)):
            norms.gated_rmsnorm(x, x.clone(), torch.zeros(700), 1e-6, group, order)
        norms.l2norm(x, 1e-6, True, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(monkeypatch, target):
    with compiling(monkeypatch, target) as compiled:
        if target == "sm_90":
            hopper()
        else:
            monkeypatch.setattr(launch, "has_gluon", lambda: False)
        products(whole=target == "sm_90")
        row_operators()
        experts()
        recurrences(whole=target == "sm_90")
        attentions(80, 100, 30.0)
    assert len(compiled) >= 20
    if target == "sm_90":
        instructions = {
            name: "".join(k.asm["ptx"] for k in kernels) for name, kernels in compiled.items()
        }
        assert (
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16"
            in instructions["gemm_tma_kernel"]
        )
        assert "cp.async.bulk.tensor" in instructions["gemm_tma_kernel"]
        assert "wgmma" in instructions["attention_walk_kernel"]
        assert not re.search(r"tf32", instructions["gemm_pointer_kernel"])
        assert "fma.rn.f32" not in instructions["rotary_kernel"]
        walk = compiled["recurrence_walk_kernel"]
        walks = walk + compiled["recurrence_grad_walk_kernel"]
        assert all(not re.search(r"\.local", kernel.asm["ptx"]) for kernel in walks)
        assert "ex2.approx" in instructions["recurrence_weights_kernel"]
        assert "mma.sync" in instructions["recurrence_replay_kernel"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "window", "softcap", "dtype"),
    [(64, 0, 0.0, BF16), (128, 0, 30.0, BF16), (256, 0, 0.0, BF16), (48, 0, 0.0, torch.float32)],
)
def test_attention_compiles_for_sm_90_at_other_sizes(monkeypatch, size, window, softcap, dtype):
    with compiling(monkeypatch, "sm_90") as compiled:
        attentions(size, window, softcap, dtype)
    text = "".join(k.asm["ptx"] for kernels in compiled.values() for k in kernels)
    assert ("wgmma" in text) == (dtype == BF16)
    assert "tf32" not in text
