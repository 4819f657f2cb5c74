"""Mixtures of experts on the CPU: contracts, and the compiled core's variants.

Signatures are those of ``kernels/reference/moe.py``. A grouped linear layer sorts its slots by
expert (stable, so tokens stay in order) and runs each expert's rows through the linear chain: which
tokens share an expert, and how many, is schedule.

Legend: T tokens, E experts, K slots per token, H width, I inputs, N outputs of an expert.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..cpu.load import core
from ..cpu.register import is_bf16, register_core
from ..linear import cpu as chains
from ..logprob.cpu import lm_head


def topk(
    variant: str,
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    groups: int,
    groups_kept: int,
    sigmoid: bool,
) -> Tensor:
    """int64 [T, K], best first."""
    tokens, experts = logits_TE.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int64)
    core(variant).call(
        "topk", logits_TE, bias_E, chosen, tokens, experts, top_k, groups, groups_kept, sigmoid,
        torch.get_num_threads(),
    )  # fmt: skip
    return chosen


def topk_weights(
    variant: str,
    logits_TE: Tensor,
    chosen_TK: Tensor,
    sigmoid: bool,
    normed: bool,
    eps: float,
    scale: float,
) -> Tensor:
    """fp32 [T, K]."""
    (tokens, experts), top_k = logits_TE.shape, chosen_TK.shape[1]
    weights = torch.empty(tokens, top_k)
    core(variant).call(
        "topk_weights", logits_TE, chosen_TK, weights, tokens, experts, top_k, sigmoid, normed,
        float(eps), float(scale), torch.get_num_threads(),
    )  # fmt: skip
    return weights


def topk_weights_grad(
    variant: str,
    d_weights_TK: Tensor,
    logits_TE: Tensor,
    chosen_TK: Tensor,
    sigmoid: bool,
    normed: bool,
    eps: float,
    scale: float,
) -> Tensor:
    """d_logits fp32 [T, E]."""
    (tokens, experts), top_k = logits_TE.shape, chosen_TK.shape[1]
    d_logits = torch.empty(tokens, experts)
    core(variant).call(
        "topk_weights_grad", d_weights_TK, logits_TE, chosen_TK, d_logits, tokens, experts, top_k,
        sigmoid, normed, float(eps), float(scale), torch.get_num_threads(),
    )  # fmt: skip
    return d_logits


def slots_by_expert(experts_TK: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """(expert, its slots in token order), for every expert that has any."""
    owner = experts_TK.flatten()
    order = torch.argsort(owner, stable=True)
    first = 0
    for expert, count in enumerate(torch.bincount(owner, minlength=num_experts).tolist()):
        if count:
            yield expert, order[first : first + count]
            first += count


def _rows(x: Tensor, slots: Tensor, top_k: int) -> Tensor:
    """The inputs of some slots: [T, I] is shared by a token's slots, [T, K, I] is theirs."""
    return x[slots // top_k] if x.dim() == 2 else x.flatten(0, 1)[slots]


def grouped_linear(variant: str, x: Tensor, experts_TK: Tensor, weight_ENI: Tensor) -> Tensor:
    """[T, K, N] in the dtype of x."""
    top_k = experts_TK.shape[1]
    out = torch.empty(experts_TK.numel(), weight_ENI.shape[1], dtype=x.dtype)
    for expert, slots in slots_by_expert(experts_TK, len(weight_ENI)):
        out[slots] = chains.linear(variant, _rows(x, slots, top_k), weight_ENI[expert])
    return out.unflatten(0, experts_TK.shape)


def grouped_linear_grad(
    variant: str,
    grad_TKN: Tensor,
    x: Tensor,
    experts_TK: Tensor,
    weight_ENI: Tensor,
    initial_ENI: Tensor | None = None,
    out_ENI: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dX like x, dW like the weight), dW from ``initial`` (fp32) and into ``out`` where given."""
    top_k = experts_TK.shape[1]
    d_weight = torch.zeros_like(weight_ENI) if out_ENI is None else out_ENI
    if initial_ENI is not None and initial_ENI is not out_ENI:
        d_weight.copy_(initial_ENI)
    grad = grad_TKN.flatten(0, 1)
    d_slots = torch.empty(experts_TK.numel(), weight_ENI.shape[2], dtype=torch.float32)
    for expert, slots in slots_by_expert(experts_TK, len(weight_ENI)):
        up = grad[slots]
        d_slots[slots] = chains.grad_input(variant, up, weight_ENI[expert], torch.float32)
        start = None if initial_ENI is None else initial_ENI[expert]
        chains.grad_weight(variant, up, _rows(x, slots, top_k), start, out_NK=d_weight[expert])
    d_x = d_slots.unflatten(0, experts_TK.shape)
    if x.dim() == 2:
        total = torch.zeros_like(d_x[:, 0])
        for k in range(top_k):
            total += d_x[:, k]
        d_x = total
    return d_x.to(x.dtype), d_weight


def combine(variant: str, y_TKH: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, H] in the dtype of y."""
    tokens, top_k, width = y_TKH.shape
    out = torch.empty(tokens, width, dtype=y_TKH.dtype)
    core(variant).call(
        "combine", y_TKH, weights_TK, out, tokens, top_k, width, is_bf16(y_TKH),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def combine_grad(
    variant: str, grad_TH: Tensor, y_TKH: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """(dY like y, d_weights fp32 [T, K])."""
    tokens, top_k, width = y_TKH.shape
    d_y, d_weights = torch.empty_like(y_TKH), torch.empty(tokens, top_k)
    core(variant).call(
        "combine_grad", grad_TH, y_TKH, weights_TK, d_y, d_weights, tokens, top_k, width,
        is_bf16(y_TKH), torch.get_num_threads(),
    )  # fmt: skip
    return d_y, d_weights


_REFERENCE = "zeromismatch.kernels.reference.moe:"
_SCORES = "softmax in the order of logprob.lanes16, or 1 / (1 + exp(-z))"
_FUNCTIONS = "exp.cpu.v1, IEEE division"
_TIES = "by (value descending, index ascending)"

ROUTER = register_core(
    lm_head,
    name="router.chain",
    op="router",
    formula="logits = sum_k x[t, k] W[e, k]",
    order=chains.SHORT_CHAINS.format(axis="inputs k"),
    rounding="operands widened exactly, sums in fp32, no further rounding",
    functions="fma",
    reference="zeromismatch.kernels.reference.logprob:lm_head",
    gradient_rtol=2e-2,
)
TOPK = register_core(
    topk,
    name="topk.scores",
    storages=("float32",),
    op="topk",
    formula="the K largest of scores + correction bias, within the best groups",
    order=f"{_SCORES}; a group ranks by the sum of its two best; all choices {_TIES}",
    rounding="fp32 throughout",
    functions=_FUNCTIONS,
    reference=f"{_REFERENCE}topk",
    gradient_rtol=1e-5,
)
WEIGHTS = register_core(
    topk_weights,
    name="topk_weights.slots",
    storages=("float32",),
    op="topk_weights",
    formula="w = score / (sum over slots + eps) where normed, times scale",
    order=f"{_SCORES}; the sum over slots in slot order",
    rounding="fp32 throughout",
    functions=_FUNCTIONS,
    reference=f"{_REFERENCE}topk_weights",
    gradient_rtol=1e-5,
)
WEIGHTS_GRADIENT = register_core(
    topk_weights_grad,
    name="topk_weights_grad.slots",
    storages=("float32",),
    op="topk_weights_grad",
    formula="d_logits of topk_weights; the choice itself has no gradient",
    order="sums over slots in slot order",
    rounding="fp32 throughout",
    functions=_FUNCTIONS,
    reference=f"{_REFERENCE}topk_weights_grad",
    gradient_rtol=1e-5,
)
GROUPED = register_core(
    grouped_linear,
    name="grouped_linear.chain",
    op="grouped_linear",
    formula="y[t, k] = round(W[expert of slot k] x[t])",
    order=chains.SHORT_CHAINS.format(axis="inputs i"),
    rounding="operands widened exactly, sums in fp32, one rounding",
    functions="fma",
    reference=f"{_REFERENCE}grouped_linear",
    gradient_rtol=2e-2,
)
GROUPED_GRADIENT = register_core(
    grouped_linear_grad,
    name="grouped_linear_grad.chain",
    op="grouped_linear_grad",
    formula="dX = sum over slots of dY W[expert]; dW[expert] = sum over its slots of dY^T X",
    order="short chains over outputs, then slots in order; dW one chain over slots in token order",
    rounding="fp32 inside, one rounding at the end",
    functions="fma",
    reference=f"{_REFERENCE}grouped_linear_grad",
    gradient_rtol=2e-2,
)
COMBINE = register_core(
    combine,
    name="combine.slots",
    op="combine",
    formula="y[t] = round(sum_k w[t, k] y[t, k])",
    order="one FMA chain over slots in slot order, from +0",
    rounding="fp32 inside, one rounding at the end",
    functions="fma",
    reference=f"{_REFERENCE}combine",
    gradient_rtol=2e-2,
)
COMBINE_GRADIENT = register_core(
    combine_grad,
    name="combine_grad.slots",
    op="combine_grad",
    formula="dy[t, k] = round(w g[t]); dw[t, k] = sum_h g[t, h] y[t, k, h]",
    order="16 lanes of FMA over the width ascending, then lanes16.tree.v1",
    rounding="fp32 inside, dy rounded once",
    functions="fma",
    reference=f"{_REFERENCE}combine_grad",
    gradient_rtol=2e-2,
)
