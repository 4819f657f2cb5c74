"""Experts spread over ranks, with the bits of one rank that holds them all.

Each rank owns its tokens and ``E / ranks`` experts. Rows travel to their expert's rank, results
travel back, and the token's owner combines them in slot order: what arrives first is nobody's
business. Received rows are ordered by (rank, token, slot), so that an expert's weight gradient adds
tokens in the order of the whole batch, and the gradient of a token's row adds its slots in fp32, as
on one rank.

    out = expert_parallel(x, chosen, weights, gate_up, down, silu_mul, group)

``pytest tests/trainer/test_expert_parallel.py`` runs 1, 2 and 4 ranks over gloo. Left out:
overlapping transfers with work, which is schedule, and tensor parallel experts.

Legend: T tokens of this rank, K slots per token, S = T K, R rows received, E experts, H width,
I inner width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.errors import UsageError
from ..kernels.linear import grad_input, grad_weight
from ..kernels.moe import combine, grouped_linear

Gated = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where this rank's slots go and what it receives.

    order [S]: slots by destination, stable. sent, received: rows per rank. experts [R, 1]: local
    expert of every received row.
    """

    group: Any
    order: Tensor
    sent: list[int]
    received: list[int]
    experts: Tensor

    def there(self, rows: Tensor) -> Tensor:
        """[S, ...] in slot order -> [R, ...] at the experts' ranks."""
        return _exchange(rows[self.order], self.sent, self.received, self.group)

    def back(self, rows: Tensor) -> Tensor:
        """[R, ...] -> [S, ...] in slot order."""
        arrived = _exchange(rows, self.received, self.sent, self.group)
        slots = torch.empty_like(arrived)
        slots[self.order] = arrived
        return slots


def _exchange(rows: Tensor, give: list[int], take: list[int], group: Any) -> Tensor:
    out = rows.new_empty(sum(take), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), take, give, group=group)
    return out


def plan_route(chosen: Tensor, local_experts: int, group: Any = None) -> Route:
    """Agree with the other ranks on who sends how many rows to whom. chosen: ``[T, K]``.

    Raises UsageError, on every rank, where shares are unequal; on one where an expert is nobody's.
    """
    ranks = dist.get_world_size(group)
    destination = chosen.flatten() // local_experts
    nobody = chosen[(destination < 0).view_as(chosen) | (destination >= ranks).view_as(chosen)]
    sent = torch.bincount(destination.clamp(0, ranks - 1), minlength=ranks)
    told = torch.stack((sent, torch.full_like(sent, local_experts)), 1)
    heard = torch.empty_like(told)
    dist.all_to_all_single(heard, told, group=group)
    held = heard[:, 1].tolist()
    if len(set(held)) > 1:
        raise UsageError(
            f"the ranks hold {', '.join(map(str, held))} experts; use a number of ranks that "
            "divides the experts, so that all hold the same number"
        )
    if len(nobody):
        raise UsageError(
            f"expert {int(nobody[0])} belongs to no rank: {ranks} ranks hold {local_experts} "
            "experts each; use a number of ranks that divides the experts"
        )
    order = torch.argsort(destination, stable=True)
    local = (chosen.flatten() % local_experts)[order]
    counts = sent.tolist(), heard[:, 0].tolist()
    experts = _exchange(local, *counts, group)[:, None]
    return Route(group=group, order=order, sent=counts[0], received=counts[1], experts=experts)


class _FirstProduct(torch.autograd.Function):
    """Rows to their experts, and the first grouped product there: [R, 1, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, top_k: int, route: Route) -> Tensor:
        rows = route.there(x.repeat_interleave(top_k, 0))
        ctx.save_for_backward(rows, weight)
        ctx.top_k, ctx.route, ctx.shape = top_k, route, x.shape
        with torch.no_grad():
            return grouped_linear(rows[:, None], route.experts, weight)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        rows, weight = ctx.saved_tensors
        route, grad = ctx.route, grads[0][:, 0].contiguous()
        d_rows = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        d_weight = torch.zeros_like(weight)
        owner = route.experts[:, 0]
        for expert in owner.unique().tolist():
            mine = owner == expert
            up = grad[mine]
            d_rows[mine] = grad_input(up, weight[expert], out_dtype=torch.float32)
            d_weight[expert] = grad_weight(up, rows[mine], out_dtype=weight.dtype)
        slots = route.back(d_rows).unflatten(0, (-1, ctx.top_k))
        d_x = torch.zeros(ctx.shape, dtype=torch.float32, device=rows.device)
        for k in range(ctx.top_k):
            d_x += slots[:, k]
        return d_x.to(rows.dtype), d_weight, None, None


class _Return(torch.autograd.Function):
    """Results to the tokens' owners: [R, H] -> [S, H]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.back(rows)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        return ctx.route.there(grads[0]), None


def expert_parallel(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gated: Gated,
    group: Any = None,
) -> Tensor:
    """``[T, H]`` of this rank's tokens.

    x ``[T, H]``; chosen ``[T, K]`` (experts of the whole model), weights fp32 ``[T, K]``; gate_up
    ``[E / ranks, 2 I, H]`` and down ``[E / ranks, H, I]`` of this rank. Every rank must call it,
    also with no tokens. Raises UsageError where ranks hold unequal numbers
    of experts, or an expert belongs to no rank.
    """
    route = plan_route(chosen, len(gate_up), group)
    both = _FirstProduct.apply(x, gate_up, chosen.shape[1], route)
    gate, up = both.chunk(2, dim=-1)
    out = grouped_linear(gated(gate, up), route.experts, down)[:, 0]
    slots = _Return.apply(out, route)
    return combine(slots.unflatten(0, chosen.shape), weights)
