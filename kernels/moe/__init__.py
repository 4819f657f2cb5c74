"""Mixtures of experts: routing, grouped linear layers and their combination, forward and backward.

    logits  = router_logits(x, weight)                     fp32, never rounded to the model's dtype
    chosen  = topk(logits, routing, correction_bias)       [T, K], by (score desc, index asc)
    weights = topk_weights(logits, chosen, routing)        fp32 [T, K]
    y       = grouped_linear(x, chosen, expert_weights)    [T, K, N]
    out     = combine(y, weights)                          [T, H], fp32 over slots, one rounding

Every function works row by row: which other tokens go to an expert, how many, and in which order
the experts run is schedule. ``kernels/reference/moe.py`` is the definition; a choice has no
gradient, and statistics for load balancing are nobody's input here.
``pytest tests/kernels/moe`` exercises it.

Legend: T tokens, E experts, K slots per token, H width, I inputs, N outputs of an expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..accumulation import chain_of
from ..contract import Contract
from ..cpu.register import covering
from ..dispatch import choose
from ..errors import ContractError, NonFiniteError
from ..linear import apply_chain, check, scoped
from . import cpu, gpu

__all__ = [
    "TOKEN_BLOCK", "Routing", "combine", "grouped_linear", "router_logits", "topk", "topk_weights",
]  # fmt: skip

TOKEN_BLOCK = gpu.launch.TOKEN_BLOCK
"""Tokens after which a GPU's sum over tokens (a weight's gradient) begins anew; see ``gpu.py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a model turns router logits into slots.

    groups, groups_kept: experts are cut into ``groups`` equal parts, of which the best
    ``groups_kept`` may be chosen from; 1 and 1 for no such limit. normed: divide the chosen scores
    by their sum (+ eps). scale: last factor.

        Routing(num_experts=128, top_k=8, scoring="softmax", normed=True)
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    normed: bool
    eps: float = 0.0
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be chosen."""
        if self.num_experts % self.groups or not 1 <= self.groups_kept <= self.groups:
            raise ContractError(
                f"{self.num_experts} experts cannot be cut into {self.groups} equal groups with "
                f"{self.groups_kept} kept; correct n_group and topk_group in the config"
            )
        per_group = self.num_experts // self.groups
        if self.groups_kept < self.groups and per_group < 2:
            raise ContractError(
                "groups are ranked by their two best experts, but have one; correct n_group in the "
                "config"
            )
        available = per_group * self.groups_kept
        if not 1 <= self.top_k <= available:
            raise ContractError(
                f"top-k {self.top_k} of {available} experts cannot be chosen; correct the number "
                "of experts per token in the config"
            )

    @property
    def sigmoid(self) -> bool:
        """Whether scores are sigmoids."""
        return self.scoring == "sigmoid"


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """``x[T, H]`` times ``weight[E, H]`` transposed, fp32 ``[T, E]``; fp32 or bf16 operands."""
    if x.is_cuda:
        return gpu.router_logits(x, weight)
    check(x, weight, None, None)
    return apply_chain("router", x, weight, None)


def topk(logits: Tensor, routing: Routing, correction_bias: Tensor | None = None) -> Tensor:
    """fp32 ``logits[T, E]`` -> int64 ``[T, K]``, best first.

    correction_bias: fp32 ``[E]``, added to the scores for the choice only. Raises NonFiniteError
    for a NaN or infinite logit, ContractError for another shape or dtype.
    """
    _check_logits(logits, routing)
    logits = logits.detach().contiguous()
    if not logits.is_cuda and not bool(torch.isfinite(logits).all()):
        row, expert = (~torch.isfinite(logits)).nonzero()[0].tolist()
        raise NonFiniteError(
            f"the router's logit of expert {expert} for row {row} is {logits[row, expert].item()}; "
            "look at what enters the router: `zm localize` names where it begins"
        )
    if correction_bias is not None:
        if correction_bias.shape != (routing.num_experts,):
            raise ContractError(
                f"the correction bias must be [{routing.num_experts}], not "
                f"{tuple(correction_bias.shape)}; take the router's own"
            )
        correction_bias = correction_bias.detach().float().contiguous()
    run = gpu.topk_op if logits.is_cuda else choose(cpu.TOPK[logits.dtype].id).run
    return run(logits, correction_bias, routing.top_k, routing.groups, routing.groups_kept,
               routing.sigmoid)  # fmt: skip


def topk_weights(logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
    """Weights fp32 ``[T, K]`` of the chosen experts ``[T, K]``; differentiable in the logits."""
    _check_logits(logits, routing)
    chosen = check_chosen(chosen, len(logits), routing.num_experts)
    logits = logits.contiguous()
    if logits.is_cuda:
        return gpu.weights_op(logits, chosen, *_options(routing))
    if torch.is_grad_enabled() and logits.requires_grad:
        return _Weights.apply(logits, chosen, routing)
    return choose(cpu.WEIGHTS[logits.dtype].id).run(logits, chosen, *_options(routing))


def grouped_linear(x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """Each slot's row through its own expert: ``[T, K, N]``.

    x: ``[T, I]`` (one row for all slots of a token) or ``[T, K, I]``; weight: ``[E, N, I]``, of one
    dtype. An expert without tokens, or with all of them, is an ordinary case.
    """
    _check_device("grouped_linear", x, weight, contracts=cpu.GROUPED)
    fits = weight.dim() == 3 and x.dim() in (2, 3) and x.shape[-1] == weight.shape[2]
    if not fits or weight.dtype != x.dtype or (x.dim() == 3 and x.shape[1] != chosen.shape[-1]):
        raise ContractError(
            f"grouped_linear needs x [T, I] or [T, K, I] and weight [E, N, I] of one dtype, not "
            f"{x.dtype} {tuple(x.shape)} and {weight.dtype} {tuple(weight.shape)}; check which "
            "weights belong to this layer"
        )
    chosen = check_chosen(chosen, len(x), len(weight))
    x = x.contiguous()
    if x.is_cuda:
        return gpu.grouped_op(x, chosen, weight)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Grouped.apply(x, chosen, weight)
    return choose(cpu.GROUPED[x.dtype].id).run(x, chosen, weight)


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """``sum_k weights[t, k] y[t, k]`` in fp32, slots in order, rounded once: ``[T, H]``."""
    _check_device("combine", y, contracts=cpu.COMBINE)
    if y.dim() != 3 or weights.shape != y.shape[:2] or weights.dtype != torch.float32:
        raise ContractError(
            f"combine needs y [T, K, H] and fp32 weights [T, K], not {tuple(y.shape)} and "
            f"{weights.dtype} {tuple(weights.shape)}; take the weights from topk_weights"
        )
    y, weights = y.contiguous(), weights.contiguous()
    if y.is_cuda:
        return gpu.combine_op(y, weights)
    if torch.is_grad_enabled() and (y.requires_grad or weights.requires_grad):
        return _Combine.apply(y, weights)
    return choose(cpu.COMBINE[y.dtype].id).run(y, weights)


def check_chosen(chosen: Tensor, tokens: int, num_experts: int) -> Tensor:
    """Contiguous int64 ``[T, K]`` of experts that exist, each at most once per token.

    Raises ContractError: a routing record of another length (replay), an expert out of range.
    """
    if chosen.dim() != 2 or len(chosen) != tokens:
        raise ContractError(
            f"the routing has {len(chosen)} rows for {tokens} tokens; record it again for exactly "
            "these tokens"
        )
    chosen = chosen.to(torch.int64).contiguous()
    if chosen.numel() and not chosen.is_cuda:  # there it would synchronise in every layer
        low, high = int(chosen.min()), int(chosen.max())
        if low < 0 or high >= num_experts:
            raise ContractError(
                f"the routing names expert {low if low < 0 else high}, but there are experts 0 to "
                f"{num_experts - 1}; it was recorded with another model"
            )
        ordered = chosen.sort(dim=1).values
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise ContractError(
                "the routing sends a token to one expert twice; record it again with this model"
            )
    return chosen


def _options(routing: Routing) -> tuple[bool, bool, float, float]:
    return routing.sigmoid, routing.normed, routing.eps, routing.scale


def _check_device(op: str, *tensors: Tensor, contracts: Mapping[torch.dtype, Contract]) -> None:
    """Tensors that this operator has a contract for, on the CPU or a GPU."""
    if tensors[0].is_cuda:
        gpu.check(op, *tensors)
    else:
        covering(contracts, tensors[0])


def _check_logits(logits: Tensor, routing: Routing) -> None:
    _check_device("router logits", logits, contracts=cpu.TOPK)
    if logits.dim() != 2 or logits.shape[1] != routing.num_experts:
        raise ContractError(
            f"router logits must be [T, {routing.num_experts}], not {tuple(logits.shape)}; check "
            "which router belongs to this layer"
        )


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
        ctx.save_for_backward(logits, chosen)
        ctx.routing = routing
        return choose(cpu.WEIGHTS[logits.dtype].id).run(logits, chosen, *_options(routing))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        logits, chosen = ctx.saved_tensors
        run = choose(cpu.WEIGHTS_GRADIENT[logits.dtype].id).run
        return run(grads[0].contiguous(), logits, chosen, *_options(ctx.routing)), None, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, chosen, weight)
        with scoped(weight, trains=ctx.needs_input_grad[2]):
            return choose(cpu.GROUPED[x.dtype].id).run(x, chosen, weight)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        x, chosen, weight = ctx.saved_tensors
        run = choose(cpu.GROUPED_GRADIENT[x.dtype].id).run
        chain = chain_of(weight, "grouped_linear")
        grad = grads[0].contiguous()
        d_x, d_weight = run(grad, x, chosen, weight.detach(), chain, chain)
        return d_x, None, d_weight if chain is None else None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights)
        return choose(cpu.COMBINE[y.dtype].id).run(y, weights)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        y, weights = ctx.saved_tensors
        return choose(cpu.COMBINE_GRADIENT[y.dtype].id).run(grads[0].contiguous(), y, weights)
