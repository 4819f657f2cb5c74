"""Run by ``test_interpreter.py`` under TRITON_INTERPRET=1: the kernels' logic at small sizes,
without a GPU.

Numbers come from numpy here, so this shows indexing, masks and formulas; bits are a GPU's business.
"""

from typing import Any

import torch
from triton.runtime import interpreter

from zeromismatch.kernels import bits
from zeromismatch.kernels.attention import gpu as attention
from zeromismatch.kernels.attention import gpu_launch as launch
from zeromismatch.kernels.attention.batch import PAGE
from zeromismatch.kernels.embedding import gpu as embedding
from zeromismatch.kernels.gated import gpu as gated
from zeromismatch.kernels.gpu import digest
from zeromismatch.kernels.linear import gpu as linear
from zeromismatch.kernels.linear.gpu_table import Tile
from zeromismatch.kernels.logprob import gpu as logprob
from zeromismatch.kernels.reference.digest import digest_rows
from zeromismatch.kernels.rmsnorm import gpu as rmsnorm
from zeromismatch.kernels.rotary import gpu as rotary

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
launch.num_multiprocessors = linear.num_multiprocessors = lambda index=0: 4


def near(mine: torch.Tensor, true: torch.Tensor, rtol: float) -> None:
    error, size = (mine.double() - true.double()).norm(), true.double().norm()
    assert bool(torch.isfinite(mine).all())
    assert error <= rtol * size, (float(error), float(size))


def products() -> None:
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


def row_operators() -> None:
    x, w, dy = torch.randn(11, 300), torch.randn(300), torch.randn(11, 300)
    y, s = rmsnorm.rmsnorm_op(x, dy, w, 1e-6, True)
    near(y, rmsnorm.reference(s, w, 1e-6, True), 1e-6)
    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    torch.nn.functional.rms_norm(leaf, (300,), weight, 1e-6).backward(dy)
    for mine, true in zip(
        rmsnorm.backward(x, w, dy, None, 1e-6, False), (leaf.grad, weight.grad), strict=True
    ):
        near(mine, true, 1e-5)
    heads, angle = torch.randn(5, 3, 20), torch.randn(5, 20)
    near(
        rotary.rotary_op(heads, angle, angle.flip(1), False),
        rotary.reference(heads, angle, angle.flip(1)),
        1e-6,
    )
    near(gated.gated_op(x, dy, False), torch.nn.functional.silu(x) * dy, 1e-5)
    near(gated.gated_op(x, dy, True), torch.nn.functional.gelu(x, approximate="tanh") * dy, 1e-5)
    ids = torch.randint(0, 5, (200,))
    grads = torch.randn(200, 24)
    near(embedding.grad_weight(grads, ids, 7), embedding.reference(grads, ids, 7), 1e-6)
    z, targets = torch.randn(3, 5000), torch.tensor([0, 4999, 77])
    lp = logprob._forward(z, targets, torch.full((3,), 0.5))[0]
    near(lp, torch.log_softmax(z.double() * 2, -1).gather(1, targets[:, None])[:, 0], 1e-5)
    out = torch.zeros(11, 2, dtype=torch.int64)
    digest.digest_into_op(x, out)
    assert bits.equal(out, digest_rows(x))


def attentions() -> None:
    size, heads, kv_heads, lengths = 64, 4, 2, (150, 1, 33)
    total, start = sum(lengths), torch.tensor([0, 150, 151, 184], dtype=torch.int32)
    q, k, v = (torch.randn(total, h, size).half() for h in (heads, kv_heads, kv_heads))
    true = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *(
                    t[a:b].double().transpose(0, 1).repeat_interleave(heads // t.shape[1], 0)
                    for t in (q, k, v)
                ),
                is_causal=True,
            ).transpose(0, 1)
            for a, b in zip(start[:-1].tolist(), start[1:].tolist(), strict=True)
        ]
    )
    near(attention.packed_attention_op(q, k, v, start, size**-0.5, 0, 0.0, None)[0], true, 2e-3)
    cache = attention.new_cache(30, kv_heads, size, dtype=torch.float16, device="cpu")
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    table = torch.randperm(30).to(torch.int32).view(3, 10)
    for request, (a, length) in enumerate(zip(start.tolist(), lengths, strict=False)):
        at = torch.arange(length)
        slot = table[request].long()[at // PAGE] * PAGE + at % PAGE
        attention.write_kv_op(cache.k, cache.v, k[a : a + length], v[a : a + length], slot)
    last, kv_len = start[1:].long() - 1, torch.tensor(lengths, dtype=torch.int32)
    one = torch.arange(4, dtype=torch.int32)
    work = attention.schedule(
        one, kv_len, tokens=3, group=2, head_dim=size, max_kv=160, max_query=1
    )
    out = attention.paged_attention_op(
        q[last],
        cache.k,
        cache.v,
        one,
        kv_len,
        table,
        work.walk_start,
        work.split_start,
        work.tiles,
        work.chunks,
        work.few,
        size**-0.5,
        0,
        0.0,
        None,
    )[0]
    near(out, true[last], 2e-3)


if __name__ == "__main__":
    for part in (products, row_operators, attentions):
        part()
        print(part.__name__, "ok", flush=True)
