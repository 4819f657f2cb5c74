"""Run by ``test_interpreter.py`` under TRITON_INTERPRET=1: the kernels' logic at small sizes,
without a GPU.

Numbers come from numpy here, so this shows indexing, masks and formulas; bits are a GPU's business.
"""

from itertools import pairwise
from typing import Any

import torch
from triton.runtime import interpreter

from zeromismatch.kernels import bits
from zeromismatch.kernels.attention import gpu as attention
from zeromismatch.kernels.attention import gpu_contract as contract
from zeromismatch.kernels.attention import gpu_launch as launch
from zeromismatch.kernels.attention import gpu_split as splits
from zeromismatch.kernels.embedding import gpu as embedding
from zeromismatch.kernels.gated import gpu as gated
from zeromismatch.kernels.gpu import digest, digest_many
from zeromismatch.kernels.linear import gpu_gemm as linear
from zeromismatch.kernels.linear.gpu_table import Tile
from zeromismatch.kernels.logprob import gpu as logprob
from zeromismatch.kernels.reference.digest import digest_rows
from zeromismatch.kernels.rmsnorm import gpu as rmsnorm
from zeromismatch.kernels.rotary import gpu as rotary
from zeromismatch.kernels.rotary import gpu_fused as joined

_set_attr = interpreter._LangPatchScope.set_attr


def set_attr(scope: Any, owner: Any, name: str, value: Any) -> None:
    """numpy 2.4 no longer makes an int of a one-element array, which Triton 3.6's interpreter
    relies on.
    """
    if name == "__index__":
        value = lambda tensor: int(tensor.handle.data.item())  # noqa: E731
    _set_attr(scope, owner, name, value)


interpreter._LangPatchScope.set_attr = set_attr
torch.manual_seed(0)
torch.cuda.is_current_stream_capturing = lambda: False
splits.num_multiprocessors = linear.num_multiprocessors = lambda index=0: 4


def near(mine: torch.Tensor, true: torch.Tensor, rtol: float) -> None:
    error, size = (mine.double() - true.double()).norm(), true.double().norm()
    assert bool(torch.isfinite(mine).all())
    assert error <= rtol * size, (float(error), float(size))


def products() -> None:
    a, b, tile = torch.randn(9, 300), torch.randn(33, 300), Tile(16, 32, 32, 4, 2, tma=False)
    whole, *chains = (  # fp32: chains over 128 values, added in order
        linear.run_tile(
            tile, "nt", a[:, k].contiguous(), b[:, k].contiguous(), None, torch.empty(9, 33)
        )
        for k in (slice(300), slice(128), slice(128, 256), slice(256, 300))
    )
    assert bits.equal(whole, chains[0] + chains[1] + chains[2])
    a, b, bias = torch.randn(37, 70), torch.randn(45, 70), torch.randn(45)
    for swap in (False, True):
        tile = Tile(16, 32, 16, 4, 2, tma=False, swap=swap)
        for form, left, right in (
            ("nt", a, b),
            ("nn", a, b.t().contiguous()),
            ("tn", a.t().contiguous(), b.t().contiguous()),
        ):
            near(
                linear.run_tile(tile, form, left, right, bias, torch.empty(37, 45)),
                a @ b.t() + bias,
                1e-6,
            )
    tile = Tile(32, 32, 16, 4, 2, tma=True, subtile=True)
    left, right = torch.randn(40, 64), torch.randn(48, 64)
    near(
        linear.run_tile(tile, "nt", left, right, None, torch.empty(40, 48)), left @ right.t(), 1e-6
    )


def norms(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> None:
    y, s = rmsnorm.forward(x, w, 1e-6, True, dy)
    near(y, rmsnorm.reference(s, w, 1e-6, True), 1e-6)
    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    torch.nn.functional.rms_norm(leaf, (w.numel(),), weight, 1e-6).backward(dy)
    for mine, true in zip(rmsnorm.backward(dy, x, w, 1e-6), (leaf.grad, weight.grad), strict=True):
        near(mine, true, 1e-5)
    for mine, true in zip(
        rmsnorm.backward(dy, x, w, 1e-6, True, dy, w),
        rmsnorm.reference_grad(dy, x, w, 1e-6, True, dy, w),
        strict=True,
    ):
        near(mine, true, 1e-5)
    near(rmsnorm.forward(x, w, 1e-6, wide=True), rmsnorm.reference(x, w, 1e-6, wide=True), 1e-6)
    for mine, true in zip(
        rmsnorm.backward(dy, x, w, 1e-6, wide=True),
        rmsnorm.reference_grad(dy, x, w, 1e-6, wide=True),
        strict=True,
    ):
        near(mine, true, 1e-5)


def heads_where_they_lie() -> None:
    """Heads inside wider rows, at an offset: the bits of a contiguous copy."""
    for width, first in ((64, 128), (300, 8)):
        fused, w = torch.randn(7, 5 * width + 16), torch.randn(width)
        x = fused[:, first : first + 3 * width].unflatten(1, (3, width))
        assert not x.is_contiguous()
        y = rmsnorm.forward(x, w, 1e-6)
        assert bits.equal(y, rmsnorm.forward(x.reshape(-1, width), w, 1e-6))


def norms_and_rotation_in_one() -> None:
    """The bits of the two operators in sequence; a wrong order of the sum shows."""
    for size, heads, kv_heads in ((64, 3, 2), (16, 2, 1), (128, 1, 1)):
        fused, where = torch.randn(7, (heads + 2 * kv_heads) * size), torch.randint(0, 9, (7,))
        x = fused[:, : (heads + kv_heads) * size].unflatten(1, (heads + kv_heads, size))
        cos, sin, *weights = (torch.randn(*s) for s in ((9, size), (9, size), (size,), (size,)))
        for pair in (weights, (None, None)):
            found = joined.forward(x, *pair, 1e-6, where, cos, sin, heads)
            for part, weight, y in zip((x[:, :heads], x[:, heads:]), pair, found, strict=True):
                if weight is not None:
                    part = rmsnorm.forward(part, weight, 1e-6).view(part.shape)
                assert bits.equal(rotary.rotate(part, cos[where], sin[where]), y), (size, pair)


def norm_chain() -> None:
    """dw by blocks of rows: continued at a block's edge, it has the whole's bits."""
    own = rmsnorm.DW_ROWS
    for width, block in ((100, 256), (300, 64)):
        rmsnorm.DW_ROWS, rows = block, 2 * block + 22
        x, w, dy = torch.randn(rows, width), torch.randn(width), torch.randn(rows, width)
        whole = rmsnorm.backward(dy, x, w, 1e-6)[1]
        near(whole, rmsnorm.reference_grad(dy, x, w, 1e-6)[1], 1e-5)
        for cut, equal in ((block, True), (2 * block, True), (block - 3, False)):
            first = rmsnorm.backward(dy[:cut], x[:cut], w, 1e-6)[1]
            halves = rmsnorm.backward(dy[cut:], x[cut:], w, 1e-6, initial=first)[1]
            assert bits.equal(whole, halves) == equal, (width, cut)
    rmsnorm.DW_ROWS = own


def row_operators() -> None:
    norm_chain()
    heads_where_they_lie()
    norms_and_rotation_in_one()
    for width in (100, 300):
        norms(torch.randn(37, width), torch.randn(width), torch.randn(37, width))
    x, dy = torch.randn(11, 300), torch.randn(11, 300)
    heads, angle = torch.randn(5, 3, 20), torch.randn(5, 12)
    near(
        rotary.rotate(heads, angle, angle.flip(1)),
        rotary.reference(heads, angle, angle.flip(1)),
        1e-6,
    )
    near(gated.forward(False, x, dy), torch.nn.functional.silu(x) * dy, 1e-5)
    near(gated.forward(True, x, dy), torch.nn.functional.gelu(x, approximate="tanh") * dy, 1e-5)
    wide = torch.linspace(-40, 40, 333).requires_grad_()
    capped = 7 * torch.tanh(wide / 7)
    near(gated.cap_forward(wide.detach(), 7.0), capped.detach(), 1e-6)
    capped.backward(wide.detach())
    near(gated.cap_backward(wide.detach(), wide.detach(), 7.0), wide.grad, 1e-5)
    ids = torch.randint(0, 5, (200,))
    grads = torch.randn(200, 24)
    near(embedding.grad_weight(grads, ids, 7), embedding.reference_grad(grads, ids, 7), 1e-6)
    assert bits.equal(embedding.gather(ids[:9], grads), grads[ids[:9]])
    z, targets = torch.randn(3, 5000), torch.tensor([0, 4999, 77])
    lp = logprob.forward(z, targets, torch.full((3,), 0.5))[0]
    near(lp, torch.log_softmax(z.double() * 2, -1).gather(1, targets[:, None])[:, 0], 1e-5)
    out = torch.zeros(11, 2, dtype=torch.int64)
    digest.launch(x, out)
    assert bits.equal(out, digest_rows(x))
    many = [torch.randn(40, 577).bfloat16(), torch.randn(1024 * 33 + 1).half(), torch.randn(3, 5)]
    many += [torch.randn(1024 * 16), torch.arange(2000), torch.ones(1025, dtype=torch.uint8)]
    many[0][3, 4], many[1][-1], many[2][0, 0] = float("nan"), float("inf"), -float("inf")
    lanes, spoiled = digest_many.DigestMany(many).read()
    assert spoiled == [1, 1, 1, 0, 0, 0]
    for each, found in zip(many, lanes, strict=True):
        wanted = digest_rows(each.reshape(1, -1))[0].tolist()
        assert [value % (1 << 64) for value in wanted] == list(found)


def attentions() -> None:
    for dtype, size, options in (
        (torch.float16, 64, (0, 0.0, None)),
        (torch.float32, 48, (40, 9.0, torch.tensor([0.5, -1.0, 2.0, 0.0]))),
    ):
        heads, kv_heads, total = 4, 2, 104
        start = torch.tensor([0, 70, 71, 104], dtype=torch.int32)
        q, k, v = (torch.randn(total, h, size).to(dtype) for h in (heads, kv_heads, kv_heads))
        leaves = [t.double().requires_grad_() for t in (q, k, v)]
        true = exact(*leaves, start.tolist(), *options)
        do = torch.randn(total, heads, size).to(dtype)
        true.backward(do.double())
        settings = (size**-0.5, *options)
        o, lse = attention.packed_forward(q, k, v, start, settings, specialised=False)
        rtol = 2e-3 if dtype == torch.float16 else 1e-5
        near(o, true.detach(), rtol)
        near(contract.over_pages((1, 40, 41), False, q, k, v, start, *settings), o, rtol)
        grads = launch.backward(do, q, k, v, o, lse, start, *settings[:3])
        for mine, leaf in zip(grads[:3], leaves, strict=True):
            near(mine, leaf.grad, 4 * rtol)
        for mine, again in zip(
            contract.reference_grad(do, q, k, v, o, lse, start, *settings[:3]), grads, strict=True
        ):
            near(mine, again, rtol)


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: list[int],
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    outs = []
    for a, b in pairwise(start):
        one, keys, values = (t[a:b].transpose(0, 1) for t in (q, k, v))
        group = one.shape[0] // keys.shape[0]
        s = one @ keys.repeat_interleave(group, 0).transpose(1, 2) * q.shape[2] ** -0.5
        s = softcap * torch.tanh(s / softcap) if softcap else s
        at = torch.arange(b - a)
        gap = at[:, None] - at[None]
        s = s.masked_fill((gap < 0) | ((gap >= window) & (window > 0)), float("-inf"))
        if sinks is not None:
            s = torch.cat((s, sinks.double()[:, None, None].expand(-1, b - a, 1)), -1)
        p = s.softmax(-1)[..., : b - a]
        outs.append((p @ values.repeat_interleave(group, 0)).transpose(0, 1))
    return torch.cat(outs)


if __name__ == "__main__":
    for part in (products, row_operators, attentions):
        part()
        print(part.__name__, "ok", flush=True)
