"""Every GPU operator can be traced without a GPU: checks and fakes, on fake CUDA tensors.

Backward passes need a device's own thread in autograd: ``test_taps_gpu.py`` compiles those on a
GPU.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from zeromismatch.kernels import moe
from zeromismatch.kernels.attention import packed_attention
from zeromismatch.kernels.convolution import new_convolution_cache, paged_convolution
from zeromismatch.kernels.embedding import embedding
from zeromismatch.kernels.gated import gelu, silu_mul, softcap
from zeromismatch.kernels.gpu import device
from zeromismatch.kernels.linear import linear
from zeromismatch.kernels.logprob import lm_head, lm_head_logprob, logprob
from zeromismatch.kernels.recurrence import RowBatch, new_recurrence_cache, paged_recurrence
from zeromismatch.kernels.rmsnorm import rmsnorm, rmsnorm_residual, rmsnorm_wide
from zeromismatch.kernels.rotary import apply_rotary

T, H, V = 12, 64, 500


def _tables() -> tuple[Tensor, Tensor]:
    return torch.empty(T, 32, device="cuda"), torch.empty(T, 32, device="cuda")


def _vector() -> Tensor:
    return torch.empty(H, dtype=torch.bfloat16, device="cuda")


def _attend(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    q, k, v = (linear(x, w).view(T, 2, H // 2) for _ in range(3))
    start = torch.empty(3, dtype=torch.int32, device="cuda")
    return packed_attention(q, k, v, start, scale=1.0, sinks=torch.empty(2, device="cuda"))


def _rows() -> RowBatch:
    start, length, table = (
        torch.empty(shape, dtype=torch.int32, device="cuda") for shape in ((3,), (2,), (2, 4))
    )
    return RowBatch(start, length, table, torch.empty(T, dtype=torch.int64, device="cuda"))


def _recur(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    rows, gate = x.view(T, 2, H // 2), torch.empty(T, 2, device="cuda")
    cache = new_recurrence_cache(4, 8, 2, 2, H // 2, H // 2, device="cuda")
    return paged_recurrence("gated_delta", rows, rows, rows, gate, gate, cache, _rows())


def _convolve(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    cache = new_convolution_cache(4, 8, H, dtype=x.dtype, device="cuda")
    return paged_convolution(x, x.new_empty(H, 4), None, "silu", cache, _rows())


def _experts(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    routing = moe.Routing(num_experts=H, top_k=4, scoring="softmax", normed=True)
    stack = x.new_empty(H, H, H)
    logits = moe.router_logits(x, w)
    chosen = moe.topk(logits, routing)
    y = moe.grouped_linear(moe.grouped_linear(x, chosen, stack), chosen, stack)
    return moe.combine(y, moe.topk_weights(logits, chosen, routing))


CASES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "linear": (lambda x, w, ids: linear(x, w, _vector()), (T, H)),
    "lm_head": (lambda x, w, ids: lm_head(x, w), (T, H)),
    "rmsnorm": (lambda x, w, ids: rmsnorm(x, _vector(), 1e-6), (T, H)),
    "rmsnorm_residual": (lambda x, w, ids: sum(rmsnorm_residual(x, x, _vector(), 1e-6)), (T, H)),  # type: ignore[return-value]
    "rmsnorm_wide": (lambda x, w, ids: rmsnorm_wide(x, _vector().float(), 1e-6), (T, H)),
    "silu_mul": (lambda x, w, ids: silu_mul(x, x), (T, H)),
    "gelu": (lambda x, w, ids: gelu(x), (T, H)),
    "softcap": (lambda x, w, ids: softcap(x.float(), 30.0), (T, H)),
    "rotary": (lambda x, w, ids: apply_rotary(x.view(T, 1, H), *_tables()), (T, 1, H)),
    "embedding": (lambda x, w, ids: embedding(ids, w), (T, H)),
    "attention": (_attend, (T, 2, H // 2)),
    "experts": (_experts, (T, H)),
    "recurrence": (_recur, (T, 2, H // 2)),
    "convolution": (_convolve, (T, H)),
    "logprob": (lambda x, w, ids: logprob(x.float(), ids), (T,)),
    "lm_head_logprob": (lambda x, w, ids: lm_head_logprob(x, w, ids), (T,)),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_traces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "missing", lambda: None)
    run, shape = CASES[name]
    with FakeTensorMode():
        x, w = (torch.empty(n, H, dtype=torch.bfloat16, device="cuda") for n in (T, H))
        y = run(x, w, torch.empty(T, dtype=torch.int64, device="cuda"))
    assert tuple(y.shape) == shape
    assert y.is_cuda


@torch.no_grad()
def test_gradient_operators_have_fakes() -> None:
    with FakeTensorMode():
        x, w = (torch.empty(n, H, dtype=torch.bfloat16, device="cuda") for n in (T, H))
        ids = torch.empty(T, dtype=torch.int64, device="cuda")
        row, kept = torch.empty(T, device="cuda"), torch.empty(0, T, 4, device="cuda")
        start = torch.empty(3, dtype=torch.int32, device="cuda")
        ops = torch.ops.zeromismatch
        heads, lse = x.view(T, 2, H // 2), torch.empty(2, T, device="cuda")
        shapes = {
            "rmsnorm": ops.rmsnorm_grad(x, x, _vector(), 1e-6, False, x, torch.bfloat16),
            "linear": ops.linear_grad(x, x, w, w.dtype, [True, True, False]),
            "gated": ops.gated_grad(x, x, x, True),
            "embedding": (ops.embedding_grad(x, ids, V, torch.bfloat16),),
            "logprob": (ops.logprob_grad(x.float(), ids, row, row, row, row),),
            "head": ops.lm_head_logprob_grad(
                row, x, w, ids, None, row, row, row, kept, [True, True, False]
            ),
            "attention": ops.packed_attention_grad(
                heads, heads, heads, heads, heads, lse, start, 1.0, 0, 0.0
            ),
        }
    found = {name: [tuple(each.shape) for each in got] for name, got in shapes.items()}
    assert shapes["rmsnorm"][1].dtype == torch.bfloat16
    assert found == {
        "rmsnorm": [(T, H), (H,)],
        "linear": [(T, H), (H, H), (0,)],
        "gated": [(T, H), (T, H)],
        "embedding": [(V, H)],
        "logprob": [(T, H)],
        "head": [(T, H), (H, H), (0,)],
        "attention": [(T, 2, H // 2)] * 3 + [(2, T)],
    }
