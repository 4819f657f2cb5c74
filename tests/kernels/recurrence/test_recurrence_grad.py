"""Against fp64: the chunked backward, and how exact the forward is; a pack changes no gradient."""

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.recurrence import KINDS, packed_recurrence

LENGTHS = (19, 0, 1, 25, 8)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0)


def gradients(kind, rows, start, chunk, up):
    leaves = [None if x is None else x.clone().requires_grad_() for x in rows]
    out = packed_recurrence(kind, *leaves, start, chunk)
    return torch.autograd.grad(out, [x for x in leaves if x is not None], up)


def plain(kind, rows, start):
    """Token by token in fp64, as the formula is written; no chunks."""
    q, k, v, g, beta = rows
    group, out = v.shape[1] // k.shape[1], []
    q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    for first, last in zip(start[:-1].tolist(), start[1:].tolist(), strict=True):
        state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
        for t in range(first, last):
            decay = g[t].exp()[..., None] if kind == "kda" else g[t].exp()[:, None, None]
            state = state * decay
            u = v[t]
            if beta is not None:
                u = beta[t][:, None] * (u - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][..., None] * u[:, None]
            out.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_gradients_against_fp64_autograd_of_the_plain_recurrence(kit, kind, chunk):
    rows = kit.inputs(kind, sum(LENGTHS), seed=7)
    leaves = [None if x is None else x.double().requires_grad_() for x in rows]
    out = plain(kind, leaves, STARTS)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    kept = [x for x in leaves if x is not None]
    wanted = torch.autograd.grad(out, kept, up.double())
    mine, exact = packed_recurrence(kind, *rows, STARTS, chunk), out.detach()
    assert float((mine - exact).abs().max() / exact.abs().max()) < 1e-6
    got = gradients(kind, rows, STARTS, chunk, up)
    for name, a, b in zip("qkvgB", got, wanted, strict=False):
        assert float((a - b).abs().max() / b.abs().max()) < 2e-6, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_repeats_and_does_not_depend_on_company_or_threads(kit, kind, threads):
    rows = kit.inputs(kind, sum(LENGTHS), seed=8)
    up = torch.randn(rows[2].shape, generator=torch.Generator().manual_seed(2))
    whole = gradients(kind, rows, STARTS, kit.chunk, up)
    for _ in range(3):
        for a, b in zip(whole, gradients(kind, rows, STARTS, kit.chunk, up), strict=True):
            assert bits.equal(a, b)
    for first, last in zip(STARTS[:-1].tolist(), STARTS[1:].tolist(), strict=True):
        own = tuple(None if x is None else x[first:last] for x in rows)
        start = torch.tensor([0, last - first])
        alone = gradients(kind, own, start, kit.chunk, up[first:last])
        for a, b in zip(whole, alone, strict=True):
            assert bits.equal(a[first:last].contiguous(), b)


def stock(kind, rows, chunk):
    """Transformers' chunk form over one request, in fp32."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k, v, g, beta = (None if x is None else x[None] for x in rows)
    if kind == "ssd":
        ones = torch.ones(v.shape[2])  # the step is in v and g already
        return mamba2_chunk_scan(v / -g[..., None], -g, -ones, k, q, chunk)[0]
    form = chunk_kimi_delta_attention if kind == "kda" else torch_chunk_gated_delta_rule
    group = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q * q.shape[-1] ** 0.5, k))
    return form(q, k, v, g, beta, chunk_size=chunk)[0][0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strength", [0.05, 1.0, 8.0], ids=["long", "usual", "strong"])
def test_as_exact_as_the_stock_chunk_form(kit, kind, strength):
    """Decays that forget little and much; stock subtracts their running sums, which costs it."""
    q, k, v, g, beta = kit.inputs(kind, 130, seed=11)
    rows, start = (q, k, v, g * strength, beta), torch.tensor([0, 130])
    exact = plain(kind, [None if x is None else x.double() for x in rows], start)
    own = (packed_recurrence(kind, *rows, start, 64).double() - exact).norm()
    bar = (stock(kind, rows, 64).double() - exact).norm()
    assert float(own) <= 2 * float(bar)
