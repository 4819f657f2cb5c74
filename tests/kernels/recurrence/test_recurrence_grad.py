"""The chunked backward: against fp64 autograd of the plain recurrence; alone as in a pack."""

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
