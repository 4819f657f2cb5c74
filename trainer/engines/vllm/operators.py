"""The contracts' operators as torch operators that ``torch.compile`` leaves alone.

vLLM traces a model once and replays it as compiled code and CUDA graphs. Each operator here is
opaque to that: shapes are looked up when it is launched, so which implementation serves a shape is
decided by certified dispatch at run time, never frozen while tracing. They have no gradient; the
trainer calls the kernels themselves.

On a GPU, rows are padded: above 8 to a multiple of 8, above 512 to one of 128. A server that sees
every batch size and prompt length then certifies a few hundred shapes and not thousands. vLLM's
captured sizes are of that kind already. Padding rows change no bit.

Legend: T rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ....kernels import moe
from ....kernels.gated import silu_mul
from ....kernels.linear import linear
from ....kernels.logprob import lm_head
from ....kernels.rmsnorm import rmsnorm, rmsnorm_residual
from ....kernels.rmsnorm.gpu import rmsnorm_heads
from ....kernels.rotary import apply_rotary, gpu_fused
from .graph_tap import tapped, watching

GRID = ((8, 1), (512, 8))  # up to so many rows: a multiple of
COARSE = 128

_LIBRARY = torch.library.Library("zeromismatch_rollout", "DEF")


def _define(schema: str, run: Callable[..., object], fake: Callable[..., object]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zeromismatch_rollout::{name}", fake, lib=_LIBRARY)


def padded_rows(rows: int) -> int:
    """The next number of rows on the grid."""
    step = next((step for most, step in GRID if rows <= most), COARSE)
    return -(-rows // step) * step


def _padded(x: Tensor) -> Tensor:
    rows = x.shape[0]
    if not x.is_cuda or padded_rows(rows) == rows:
        return x
    padded = x.new_zeros(padded_rows(rows), x.shape[1])
    padded[:rows] = x
    return padded


def _plain(x: Tensor) -> Tensor:
    """The same memory and version; vLLM's classes of parameters send every question through Python.

    Not ``.data``: its version would hide a publication from weights that are kept packed on a CPU.
    """
    return x if type(x) is Tensor else x.detach()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight, bias = _plain(weight), None if bias is None else _plain(bias)
    y = linear(_padded(x), weight, bias)[: x.shape[0]]
    tapped("linear", y, weight)
    return y


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _lm_head(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight, bias = _plain(weight), None if bias is None else _plain(bias)
    return lm_head(_padded(x), weight, bias)[: x.shape[0]]


def _lm_head_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads = x.dim() == 3 and x.is_cuda  # queries or keys inside the rows of a fused projection
    y = rmsnorm_heads(x, weight, eps) if heads else rmsnorm(x, weight, eps)
    tapped("norm", y, weight)
    return y


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, total = rmsnorm_residual(x, residual, weight, eps)
    tapped("norm", y, weight)
    tapped("sum", total, weight)
    return y, total


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    y = silu_mul(gate, up)
    tapped("gated", y)
    return y


def _silu_mul_fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _experts(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normed: bool
) -> Tensor:
    routing = moe.Routing(num_experts=len(router), top_k=top_k, scoring="softmax", normed=normed)
    rows = _padded(x)
    logits = moe.router_logits(rows, router)
    chosen = moe.topk(logits, routing)
    gate, up = moe.grouped_linear(rows, chosen, gate_up).chunk(2, dim=-1)
    slots = moe.grouped_linear(silu_mul(gate, up), chosen, down)
    y = moe.combine(slots, moe.topk_weights(logits, chosen, routing))[: x.shape[0]]
    tapped("combine", y, router)
    return y


def _rotary(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """``q, k [T, heads, D]``, normed where there are weights, then turned by rows of the tables."""
    weights = (q_weight, k_weight)
    joined = gpu_fused.serves(q, k, cos) and gpu_fused.proved(q.dtype)
    normed = [
        x if weight is None or (joined and not watching()) else _rms_norm(x, weight, eps)
        for x, weight in zip((q, k), weights, strict=True)
    ]  # fused norms have no output, so what watches gets the norm's own
    if joined:
        both = gpu_fused.side_by_side(q, k)
        turned = gpu_fused.norm_rotary(both, *weights, eps, positions, cos, sin, q.shape[1])
    else:
        table = cos.index_select(0, positions), sin.index_select(0, positions)
        turned = apply_rotary(normed[0], *table), apply_rotary(normed[1], *table)
    for part, x in zip(("rotary_q", "rotary_k"), turned, strict=True):
        tapped(part, x)
    return turned


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors)


_define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear, _linear_fake)
_define("lm_head(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _lm_head, _lm_head_fake)
_define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    _rms_norm,
    lambda x, weight, eps: _like(x)[0],
)
_define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    _add_rms_norm,
    lambda x, residual, weight, eps: _like(x, residual),
)
_define(
    "experts(Tensor x, Tensor router, Tensor gate_up, Tensor down, int top_k, bool normed)"
    " -> Tensor",
    _experts,
    lambda x, *_: _like(x)[0],
)
_define("silu_mul(Tensor gate_up) -> Tensor", _silu_mul, _silu_mul_fake)
_define(
    "rotary(Tensor q, Tensor k, Tensor positions, Tensor cos, Tensor sin, Tensor? q_weight,"
    " Tensor? k_weight, float eps) -> (Tensor, Tensor)",
    _rotary,
    lambda q, k, *_: _like(q, k),
)
OPERATORS = torch.ops.zeromismatch_rollout
