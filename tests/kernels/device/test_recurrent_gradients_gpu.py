"""Gradients of recurrent layers on a GPU: against fp64, any company, repeats, micro-batches."""

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.accumulation import Accumulators
from zeromismatch.kernels.convolution import packed_convolution
from zeromismatch.kernels.gated_norm import gated_rmsnorm, l2norm
from zeromismatch.kernels.gates import decay_gate, discretised, sigmoid_mul, skip, time_step
from zeromismatch.kernels.recurrence import packed_recurrence
from zeromismatch.kernels.reference import gated_norm as norms_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SIZES = {  # key heads, value heads, key size, value size, chunk
    "gated_delta": (2, 4, 128, 128, 64),
    "ssd": (1, 4, 128, 64, 128),
    "kda": (2, 2, 128, 128, 64),
}
LENGTHS = (150, 0, 1, 64, 65)


def drawn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def inputs(kind, rows, seed):
    hk, hv, k, v, _ = SIZES[kind]
    unit = torch.nn.functional.normalize
    gates = (hv, k) if kind == "kda" else (hv,)
    return (
        *(unit(drawn(rows, hk, k, seed=seed + i), dim=-1) for i in (1, 2)),
        drawn(rows, hv, v, seed=seed + 3), -drawn(rows, *gates, seed=seed + 4).square(),
        None if kind == "ssd" else drawn(rows, hv, seed=seed + 5).sigmoid(),
    )  # fmt: skip


def plain(kind, rows, start):
    """Token by token in fp64."""
    q, k, v, g, beta = rows
    group, out = v.shape[1] // k.shape[1], []
    q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    for first, last in zip(start[:-1].tolist(), start[1:].tolist(), strict=True):
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        for t in range(first, last):
            state = state * (g[t].exp()[..., None] if kind == "kda" else g[t].exp()[:, None, None])
            u = v[t]
            if beta is not None:
                u = beta[t][:, None] * (u - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][..., None] * u[:, None]
            out.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out)


def gradients(kind, rows, start, up, dtype=torch.float32):
    leaves = [None if x is None else x.clone().requires_grad_() for x in rows]
    out = packed_recurrence(kind, *leaves, start, SIZES[kind][4], dtype=dtype)
    return torch.autograd.grad(out, [x for x in leaves if x is not None], up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SIZES)
def test_a_recurrences_gradients_against_fp64_in_any_company(kind, dtype):
    start = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)
    *rows, g, beta = inputs(kind, sum(LENGTHS), 7)
    rows = (*(x.to(dtype).float() for x in rows), g, beta)
    up = drawn(*rows[2].shape, seed=1)
    leaves = [None if x is None else x.double().requires_grad_() for x in rows]
    kept = [x for x in leaves if x is not None]
    got = gradients(kind, rows, start, up, dtype)
    wanted = torch.autograd.grad(plain(kind, leaves, start), kept, up.double())
    rtol = 5e-6 if dtype == torch.float32 else 1e-2  # the states in blocks are of bf16 products
    for name, a, b in zip("qkvgB", got, wanted, strict=False):
        assert float((a - b).abs().max() / b.abs().max()) < rtol, name
    for a, b in zip(got, gradients(kind, rows, start, up, dtype), strict=True):
        assert bits.equal(a, b)
    for first, last in zip(start[:-1].tolist(), start[1:].tolist(), strict=True):
        own = tuple(None if x is None else x[first:last] for x in rows)
        index = torch.tensor([0, last - first], device="cuda")
        alone = gradients(kind, own, index, up[first:last], dtype)
        for a, b in zip(got, alone, strict=True):
            assert bits.equal(a[first:last].contiguous(), b)


def layers(x, dt, weights):
    """Every row operator of these layers, in one sum."""
    taps, bias, rate, shift, scale, norm = weights
    rows = len(x)
    start = torch.tensor([0, rows // 2, rows], device=x.device)
    y = packed_convolution(x, taps, bias, "silu", start)
    y = sigmoid_mul(y, x)
    heads = y.view(rows, 4, -1)
    step = time_step(dt, shift)
    v, g = discretised(heads, step, rate)
    out = skip(v, heads, scale).flatten(1)
    out = gated_rmsnorm(out, x, norm, 1e-6, order="silu_before", group=32)
    out = out.float().sum() + g.sum() + decay_gate(dt, rate, shift).sum()
    return out + l2norm(y, 1e-6, divide=False, scale=0.5)[:, ::3].sum()


def drawn_layers(dtype, rows):
    weights = (
        drawn(64, 4, seed=2, dtype=dtype), drawn(64, seed=3, dtype=dtype), drawn(4, seed=4),
        drawn(4, seed=5), drawn(4, seed=6), drawn(64, seed=7, dtype=dtype),
    )  # fmt: skip
    return drawn(rows, 64, seed=8, dtype=dtype), drawn(rows, 4, seed=9, dtype=dtype), weights


def test_row_operators_agree_with_the_cpus_gradients():
    x, dt, weights = drawn_layers(torch.float32, 37)
    found = []
    for device in ("cuda", "cpu"):
        leaves = [each.to(device).detach().requires_grad_() for each in (x, dt, *weights)]
        layers(leaves[0], leaves[1], leaves[2:]).backward()
        found.append([each.grad.cpu() for each in leaves])
    for a, b in zip(*found, strict=True):
        assert float((a - b).norm() / b.norm()) < 2e-5
    gate, weight, up = (drawn(*shape, seed=3).cpu() for shape in ((37, 64), (64,), (37, 64)))
    given = (x.cpu(), gate, weight, 1e-6, 64, "sigmoid_after")
    wanted = norms_reference.gated_rmsnorm_grad(up, *given)
    leaves = [each.cuda().requires_grad_() for each in given[:3]]
    out = gated_rmsnorm(*leaves, 1e-6, order="sigmoid_after")
    for a, b in zip(torch.autograd.grad(out, leaves, up.cuda()), wanted, strict=True):
        assert float((a.cpu() - b).norm() / b.norm()) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_sums_are_fp32_chains_that_name_their_owner(dtype):
    x, dt, weights = drawn_layers(dtype, 40)
    names = "taps", "bias", "rate", "shift", "scale", "norm"
    leaves = {name: each.requires_grad_() for name, each in zip(names, weights, strict=True)}
    single = {name: leaves[name] for name in names if name not in ("rate", "shift")}
    sums = Accumulators(single)  # rate and shift are used twice here
    for _ in range(2):
        with sums.micro_batch():
            layers(x, dt, list(leaves.values())).backward()
    for name in single:
        total = sums.gradient(name)
        assert total is not None
        assert total.dtype == torch.float32
        assert leaves[name].grad is None
    assert leaves["rate"].grad is not None
