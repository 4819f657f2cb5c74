"""What each operator means, in torch and without any order: for fp64, and as plain torch.

    formula = FORMULAS["rmsnorm"]
    exact = formula.run(*widened)                  # fp64 arguments give the fp64 answer
    stock = formula.run(*arguments)                # storage arguments give what plain torch does
    formula.differentiable                         # positions of arguments that have gradients

Written apart from references and kernels, with torch's own functions, so that autograd of it is an
independent gradient. Nothing here decides about bits. The gradients' argument lists are those of
the gradient contracts' references; :func:`wanted` turns them into autograd's answer.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .formulas_recurrent import RECURRENT, gradients, time_step_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """An operator by its forward's arguments. ``run`` returns the first output, or several."""

    run: Callable[..., Any]
    differentiable: tuple[int, ...] = ()


def _rmsnorm(
    x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False, residual: Tensor | None = None
) -> Any:
    s = x if residual is None else x + residual
    scale = weight + 1.0 if unit_offset else weight
    y = functional.rms_norm(s, (s.shape[-1],), scale.to(s.dtype), eps)
    return y if residual is None else (y, s)


def _rmsnorm_wide(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
    s = x if residual is None else x + residual
    at = torch.float64 if s.dtype == torch.float64 else torch.float32
    y = functional.rms_norm(s.to(at), (s.shape[-1],), weight.to(at), eps).to(s.dtype)
    return y if residual is None else (y, s)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    y = functional.linear(x, weight, bias)
    return y if out_dtype is None or x.dtype == torch.float64 else y.to(out_dtype)


def _router(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return functional.linear(x, weight, bias).to(wide)


def _logprob(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z = logits / temperature[:, None]
    peak = z.amax(dim=1)
    total = torch.logsumexp(z, dim=1)
    return z.gather(1, targets[:, None])[:, 0] - total, peak, total - peak


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[1]
    turned, kept = x[..., :width], x[..., width:]
    a, b = turned.chunk(2, dim=-1)
    half = torch.cat((-b, a), dim=-1)
    cos, sin = (each[:, None].to(x.dtype) for each in (cos, sin))
    return torch.cat((turned * cos + half * sin, kept), dim=-1)


def _norm_rotary(
    x: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, positions: Tensor,
    cos: Tensor, sin: Tensor, heads: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    def turned(part: Tensor, weight: Tensor | None) -> Tensor:
        normed = part if weight is None else _rmsnorm(part, weight, eps)
        return _rotary(normed, cos[positions], sin[positions])

    return turned(x[:, :heads], q_weight), turned(x[:, heads:], k_weight)


def _rotary_table(inv_freq: Tensor, positions: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    angle = positions.to(inv_freq.dtype)[:, None] * inv_freq[None]
    both = torch.cat((angle, angle), dim=1)
    return torch.cos(both) * scaling, torch.sin(both) * scaling


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """``[N, H, D]`` for the last N of the keys' positions, keys ``[L, HK, D]``."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)[:, None]
    key = torch.arange(k.shape[0], device=q.device)[None]
    seen = (key <= position) & ((key > position - window) if window else (key >= 0))
    scores = scores.masked_fill(~seen[None], float("-inf"))
    if sinks is not None:
        extra = sinks.to(scores.dtype)[:, None, None].expand(-1, q.shape[0], 1)
        return torch.einsum(
            "hnl,lhd->nhd", torch.softmax(torch.cat((scores, extra), dim=-1), dim=-1)[..., :-1], v
        )
    return torch.einsum("hnl,lhd->nhd", torch.softmax(scores, dim=-1), v)


def _paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, query_start: Tensor, kv_len: Tensor,
    block_table: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    parts: list[Tensor] = []
    for b in range(kv_len.numel()):
        pages = block_table[b, : -(-int(kv_len[b]) // 16)].long()
        k = k_pages[pages].permute(0, 3, 1, 2).flatten(0, 1)[: int(kv_len[b])]
        v = v_pages[pages].permute(0, 2, 1, 3).flatten(0, 1)[: int(kv_len[b])]
        rows = q[int(query_start[b]) : int(query_start[b + 1])]
        parts.append(attend(rows, k, v, scale, window, softcap, sinks))
    return torch.cat(parts)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float, window: int,
    softcap: float, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    bounds = query_start.tolist()
    return torch.cat(
        [
            attend(q[low:high], k[low:high], v[low:high], scale, window, softcap, sinks)
            for low, high in itertools.pairwise(bounds)
        ]
    )


def _topk_weights(
    logits: Tensor, chosen: Tensor, sigmoid: bool, normed: bool, eps: float, scale: float
) -> Tensor:
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, dim=-1)
    picked = scores.gather(1, chosen)
    return scale * (picked / (picked.sum(dim=1, keepdim=True) + eps) if normed else picked)


def _grouped_linear(x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    tokens, top_k = chosen.shape
    slots = x[:, None].expand(tokens, top_k, x.shape[-1]) if x.dim() == 2 else x
    products = [
        torch.where((chosen == expert)[..., None], slots, 0.0) @ weight[expert].T
        for expert in range(weight.shape[0])
    ]
    return torch.stack(products).sum(dim=0)


def _combine(y: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("tkh,tk->th", y.to(weights.dtype), weights).to(y.dtype)


FORMULAS: dict[str, Formula] = {
    "rmsnorm": Formula(run=_rmsnorm, differentiable=(0, 1, 4)),
    "rmsnorm_wide": Formula(run=_rmsnorm_wide, differentiable=(0, 1, 3)),
    "router": Formula(run=_router, differentiable=(0, 1, 2)),
    "topk_weights": Formula(run=_topk_weights, differentiable=(0,)),
    "grouped_linear": Formula(run=_grouped_linear, differentiable=(0, 2)),
    "combine": Formula(run=_combine, differentiable=(0, 1)),
    "linear": Formula(run=_linear, differentiable=(0, 1, 2)),
    "lm_head": Formula(run=_linear, differentiable=(0, 1, 2)),
    "embedding": Formula(run=lambda ids, weight: weight[ids], differentiable=(1,)),
    "logprob": Formula(run=_logprob, differentiable=(0,)),
    "activation": Formula(run=functional.silu, differentiable=(0,)),
    "activation_gelu": Formula(run=_gelu, differentiable=(0,)),
    "gated": Formula(run=lambda gate, up: functional.silu(gate) * up, differentiable=(0, 1)),
    "gated_gelu": Formula(run=lambda gate, up: _gelu(gate) * up, differentiable=(0, 1)),
    "softcap": Formula(run=lambda x, cap: cap * torch.tanh(x / cap), differentiable=(0,)),
    "rotary": Formula(run=_rotary, differentiable=(0,)),
    "norm_rotary": Formula(run=_norm_rotary),
    "rotary_table": Formula(run=_rotary_table),
    "attention": Formula(run=_paged),
    "attention_packed": Formula(run=_packed, differentiable=(0, 1, 2)),
    **{name: Formula(run=run, differentiable=at) for name, (run, at) in RECURRENT.items()},
}


def widened(arguments: Sequence[Any]) -> list[Any]:
    """The same arguments in fp64."""
    return [
        each.double() if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in arguments
    ]


def _autograd(run: Callable[..., Any], arguments: list[Any], upstream: Tensor, at: int) -> Tensor:
    """Gradient of ``sum(upstream * first output)`` in argument ``at``."""
    leaf = arguments[at].detach().clone().requires_grad_(True)
    with torch.enable_grad():
        output = run(*arguments[:at], leaf, *arguments[at + 1 :])
        first = output[0] if isinstance(output, tuple) else output
        return torch.autograd.grad(first, leaf, upstream.to(first.dtype))[0]


def wanted(op: str, arguments: Sequence[Any]) -> list[Tensor | None] | None:
    """fp64 gradients in the order of a gradient contract's outputs, or None without a formula.

    ``arguments``: those of the gradient contract's reference, in their storage dtype.
    """
    full = widened(arguments)
    match op:
        case "rmsnorm_grad":
            dy, s, weight, eps, unit, ds, initial = full
            own = [s, weight, eps, unit, None]
            dx, dw = (_autograd(_rmsnorm, own, dy, at) for at in (0, 1))
            return [dx if ds is None else dx + ds, dw if initial is None else dw + initial]
        case "rmsnorm_wide_grad":
            dy, s, weight, eps, ds, initial = full
            dx, dw = (_autograd(_rmsnorm_wide, [s, weight, eps], dy, at) for at in (0, 1))
            return [dx if ds is None else dx + ds, dw if initial is None else dw + initial]
        case "grouped_linear_grad":
            own = list(full[1:4])
            dx, dw = (_autograd(_grouped_linear, own, full[0], at) for at in (0, 2))
            return [dx, dw if full[4] is None else dw + full[4]]
        case "linear_grad_input":
            return [full[0] @ full[1]]
        case "linear_grad_weight":
            dw = full[0].T @ full[1]
            return [dw if full[2] is None else dw + full[2]]
        case "linear_grad_bias":
            db = full[0].sum(dim=0)
            return [db if full[1] is None else db + full[1]]
        case "embedding_grad":
            dy, ids, vocabulary, initial, _ = full
            table = torch.zeros(vocabulary, dy.shape[1], dtype=torch.float64, device=dy.device)
            dw = _autograd(lambda w: functional.embedding(ids, w), [table], dy, 0)
            return [dw if initial is None else dw + initial]
        case "logprob_grad":
            return [_autograd(_logprob, full[:3], full[5], 0)]
        case "attention_grad" if len(full) == 12:
            dout, q, k, v, _, _, _, start, scale, window, softcap, sinks = full
            own = [q, k, v, start, scale, window, softcap, sinks]
            got: list[Tensor | None] = [_autograd(_packed, own, dout, at) for at in range(3)]
            return [*got, None if sinks is None else _autograd(_packed, own, dout, 7)]
        case "time_step_grad":
            return time_step_gradients(arguments)
        case _ if op.removesuffix("_grad") in RECURRENT and op.endswith("_grad"):
            return gradients(op, full)
        case _:
            name = op.removesuffix("_grad")
            if name == op or name not in FORMULAS:
                return None
            formula = FORMULAS[name]
            given = [each for each in full[1:] if each is not None]
            return [_autograd(formula.run, given, full[0], at) for at in formula.differentiable]
