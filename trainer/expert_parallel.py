"""Experts spread over ranks, with the bits of one rank that holds them all.

Each rank owns its tokens and ``E / ranks`` experts. Rows travel to their expert's rank, results
travel back, and the token's owner combines them in slot order: what arrives first is nobody's
business. Received rows are ordered by (rank, token, slot), and each knows in which block of tokens
of the whole batch it lies, so that an expert's weight gradient adds tokens in the order and in the
blocks of one rank; the gradient of a token's row adds its slots in fp32.

    out = expert_parallel(x, chosen, weights, gate_up, down, silu_mul, group)

``pytest tests/trainer/test_expert_parallel.py`` runs 1, 2 and 4 ranks over gloo. Left out:
overlapping transfers with work, which is schedule, and tensor parallel experts.

Legend: T tokens of this rank, K slots per token, S = T K, R rows received, E experts, H width,
I inner width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.errors import UsageError
from ..kernels.linear import grad_input, grad_weight
from ..kernels.moe import TOKEN_BLOCK, combine, grouped_linear

Gated = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where this rank's slots go and what it receives.

    order [S]: slots by destination, stable. sent, received: rows per rank. experts [R, 1]: local
    expert of every received row. blocks [R]: block of the whole batch in which its token lies.
    """

    group: Any
    order: Tensor
    sent: list[int]
    received: list[int]
    experts: Tensor
    blocks: Tensor

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
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    top_k = chosen.shape[1]
    destination = chosen.flatten() // local_experts
    nobody = chosen[(destination < 0).view_as(chosen) | (destination >= ranks).view_as(chosen)]
    sent = torch.bincount(destination.clamp(0, ranks - 1), minlength=ranks)
    own = sent.new_tensor([local_experts, len(chosen)]).expand(ranks, -1)
    told = torch.cat((sent[:, None], own), 1)
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
    token = heard[:rank, 2].sum() + torch.arange(chosen.numel(), device=chosen.device) // top_k
    rows = torch.stack((chosen.flatten() % local_experts, token // TOKEN_BLOCK), 1)[order]
    counts = sent.tolist(), heard[:, 0].tolist()
    arrived = _exchange(rows, *counts, group)
    return Route(
        group=group, order=order, sent=counts[0], received=counts[1], experts=arrived[:, :1],
        blocks=arrived[:, 1],
    )  # fmt: skip


def _gradients(grad: Tensor, rows: Tensor, weight: Tensor, route: Route) -> tuple[Tensor, Tensor]:
    """(d_rows fp32, d_weight) of a grouped product of received rows; an expert's sum goes on from
    block to block."""
    d_rows = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    d_weight = torch.zeros_like(weight)
    owner = route.experts[:, 0]
    for expert in owner.unique().tolist():
        mine = owner == expert
        d_rows[mine] = grad_input(grad[mine], weight[expert], out_dtype=torch.float32)
        total = None
        for block in route.blocks[mine].unique().tolist():
            here = mine & (route.blocks == block)
            total = grad_weight(grad[here], rows[here], accumulate_into=total)
        d_weight[expert] = cast(Tensor, total)  # an expert that is there has a block
    return d_rows, d_weight


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
        route = ctx.route
        d_rows, d_weight = _gradients(grads[0][:, 0].contiguous(), rows, weight, route)
        slots = route.back(d_rows).unflatten(0, (-1, ctx.top_k))
        d_x = torch.zeros(ctx.shape, dtype=torch.float32, device=rows.device)
        for k in range(ctx.top_k):
            d_x += slots[:, k]
        return d_x.to(rows.dtype), d_weight, None, None


class _SecondProduct(torch.autograd.Function):
    """The second grouped product, where the experts are: [R, I] -> [R, H]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, route: Route) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.route = route
        with torch.no_grad():
            return grouped_linear(rows[:, None], route.experts, weight)[:, 0]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        rows, weight = ctx.saved_tensors
        d_rows, d_weight = _gradients(grads[0].contiguous(), rows, weight, ctx.route)
        return d_rows.to(rows.dtype), d_weight, None


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
    out = _SecondProduct.apply(gated(gate, up)[:, 0], down, route)
    slots = _Return.apply(out, route)
    return combine(slots.unflatten(0, chosen.shape), weights)
