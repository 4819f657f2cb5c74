"""The definition of routing, grouped linear layers and their combination, in plain torch.

    scores   softmax (``logprob.lanes16`` order, IEEE division) or 1 / (1 + exp(-z)), in fp32
    choice   scores + correction bias; a group's rank is the sum of its two best (larger first);
             groups, then experts, by (value descending, index ascending)
    weights  the chosen scores, divided by (their sum in slot order + eps) where normed, times scale
    experts  each slot's row through its own expert: the chain of :mod:`.linear`
    combine  one fp32 FMA chain over a token's slots in slot order, from +0, rounded once

Gradients: dX of a token is the fp32 sum over its slots in slot order, rounded once; dW of an expert
is one chain over its slots in token order; the choice has none.

Frozen: what the fast kernels must equal bit for bit. Legend: T tokens, E experts, K slots, H width,
I inputs, N outputs of an expert.
"""

import torch
from torch import Tensor

from . import linear as chains
from .exp import LANES, exp32, sum_lanes
from .fma import fma32
from .logprob import exp_or_zero


def scores(logits_TE: Tensor, sigmoid: bool) -> Tensor:
    """fp32 [T, E]."""
    if sigmoid:
        return 1.0 / (1.0 + exp32(0.0 - logits_TE))
    terms = exp_or_zero(logits_TE - logits_TE.amax(dim=1, keepdim=True))
    lanes = torch.zeros(len(terms), LANES, dtype=torch.float32, device=terms.device)
    for e in range(0, terms.shape[1], LANES):
        part = terms[:, e : e + LANES]
        lanes[:, : part.shape[1]] = lanes[:, : part.shape[1]] + part
    return terms / sum_lanes(lanes)[:, None]


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest, ties by lower index."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def topk(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    groups: int,
    groups_kept: int,
    sigmoid: bool,
) -> Tensor:
    """int64 [T, K], best first."""
    values = scores(logits_TE, sigmoid)
    if bias_E is not None:
        values = values + bias_E
    if groups_kept < groups:
        by_group = values.unflatten(1, (groups, -1))
        two = by_group.gather(2, _best(by_group, 2))
        kept = _best(two[..., 0] + two[..., 1], groups_kept)
        allowed = torch.zeros_like(by_group[..., 0]).scatter_(1, kept, 1.0).bool()
        values = torch.where(allowed[..., None], by_group, float("-inf")).flatten(1)
    return _best(values, top_k)


def _chosen(logits_TE: Tensor, chosen_TK: Tensor, sigmoid: bool) -> tuple[Tensor, Tensor]:
    """The chosen scores, and their sum in slot order."""
    picked = scores(logits_TE, sigmoid).gather(1, chosen_TK)
    total = torch.zeros_like(picked[:, 0])
    for k in range(picked.shape[1]):
        total = total + picked[:, k]
    return picked, total[:, None]


def _fp32(value: float, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def topk_weights(
    logits_TE: Tensor, chosen_TK: Tensor, sigmoid: bool, normed: bool, eps: float, scale: float
) -> Tensor:
    """fp32 [T, K]."""
    picked, total = _chosen(logits_TE, chosen_TK, sigmoid)
    weights = picked / (total + _fp32(eps, total)) if normed else picked
    return weights * _fp32(scale, weights)


def topk_weights_grad(
    d_weights_TK: Tensor,
    logits_TE: Tensor,
    chosen_TK: Tensor,
    sigmoid: bool,
    normed: bool,
    eps: float,
    scale: float,
) -> Tensor:
    """d_logits fp32 [T, E]."""
    picked, total = _chosen(logits_TE, chosen_TK, sigmoid)
    total = total + _fp32(eps, total)
    mean, inner = torch.zeros_like(total[:, 0]), torch.zeros_like(total[:, 0])
    for k in range(picked.shape[1]):
        mean = mean + d_weights_TK[:, k] * (picked[:, k] / total[:, 0])
    d_picked = (d_weights_TK - mean[:, None]) / total if normed else d_weights_TK
    d_picked = d_picked * _fp32(scale, d_picked)
    for k in range(picked.shape[1]):
        inner = inner + d_picked[:, k] * picked[:, k]
    if sigmoid:
        start, at = torch.zeros_like(logits_TE), d_picked * (picked * (1.0 - picked))
    else:
        start = -(scores(logits_TE, sigmoid) * inner[:, None])
        at = picked * (d_picked - inner[:, None])
    return start.scatter(1, chosen_TK, at)


def _slots(x: Tensor, experts_TK: Tensor) -> Tensor:
    """One row per slot: [T, I] is shared by a token's slots, [T, K, I] is theirs."""
    tokens, top_k = experts_TK.shape
    rows = x[:, None].expand(tokens, top_k, x.shape[-1]) if x.dim() == 2 else x
    return rows.reshape(tokens * top_k, x.shape[-1])


def grouped_linear(x: Tensor, experts_TK: Tensor, weight_ENI: Tensor) -> Tensor:
    """[T, K, N] in the dtype of x [T, I] or [T, K, I]."""
    rows, owner = _slots(x, experts_TK), experts_TK.flatten()
    out = torch.empty(len(rows), weight_ENI.shape[1], dtype=x.dtype, device=x.device)
    for expert in owner.unique().tolist():
        mine = owner == expert
        out[mine] = chains.linear(rows[mine], weight_ENI[expert])
    return out.unflatten(0, experts_TK.shape)


def grouped_linear_grad(
    grad_TKN: Tensor,
    x: Tensor,
    experts_TK: Tensor,
    weight_ENI: Tensor,
    initial_ENI: Tensor | None = None,
    out_ENI: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dX like x, dW like the weight).

    dW's chains start from ``initial`` (fp32) and end unrounded in ``out`` if given.
    """
    rows, owner = _slots(x, experts_TK), experts_TK.flatten()
    grad = grad_TKN.flatten(0, 1)
    d_rows = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    d_weight = torch.zeros(weight_ENI.shape, dtype=torch.float32, device=x.device)
    if initial_ENI is not None:
        d_weight.copy_(initial_ENI)
    for expert in owner.unique().tolist():
        mine = owner == expert
        d_rows[mine] = chains.grad_input(grad[mine], weight_ENI[expert], torch.float32)
        d_weight[expert] = chains.grad_weight(grad[mine], rows[mine], d_weight[expert])
    d_x = d_rows.unflatten(0, experts_TK.shape)
    if x.dim() == 2:
        total = torch.zeros_like(d_x[:, 0])
        for k in range(d_x.shape[1]):
            total = total + d_x[:, k]
        d_x = total
    if out_ENI is not None:
        return d_x.to(x.dtype), out_ENI.copy_(d_weight)
    return d_x.to(x.dtype), d_weight.to(weight_ENI.dtype)


def combine(y_TKH: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, H] in the dtype of y."""
    total = torch.zeros_like(y_TKH[:, 0], dtype=torch.float32)
    for k in range(y_TKH.shape[1]):
        total = fma32(weights_TK[:, k, None], y_TKH[:, k].float(), total)
    return total.to(y_TKH.dtype)


def combine_grad(grad_TH: Tensor, y_TKH: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """(dY like y, fp32 d_weights [T, K]: 16 lanes of FMA over the width, then the tree)."""
    grad = grad_TH.float()
    lanes = torch.zeros(*weights_TK.shape, LANES, dtype=torch.float32, device=grad.device)
    for h in range(0, grad.shape[1], LANES):
        part = y_TKH[..., h : h + LANES].float()
        width = part.shape[-1]
        up = grad[:, None, h : h + width].expand_as(part)
        lanes[..., :width] = fma32(up, part, lanes[..., :width])
    return (weights_TK[..., None] * grad[:, None]).to(y_TKH.dtype), sum_lanes(lanes)
