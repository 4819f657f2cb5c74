"""Secret cases of routers and experts: ties, groups, experts without a token and one with all.

Legend: T tokens, E experts, K slots.
"""

from dataclasses import dataclass

from torch import Tensor

from ...kernels.trial import Case
from .draw import Draw, case_of, maker


@dataclass(frozen=True, slots=True)
class _Routing:
    """Sizes of one router: its groups divide the experts."""

    experts: int
    top_k: int
    groups: int
    kept: int
    sigmoid: bool


def _routing(draw: Draw) -> _Routing:
    groups = draw.random.choice((1, 2, 4))
    experts = groups * draw.random.randint(3, 12)
    kept = draw.random.randint(1, groups)
    top_k = draw.random.randint(1, min(8, kept * experts // groups))
    return _Routing(experts, top_k, groups, kept, draw.random.random() < 0.5)


def _logits(draw: Draw, t: int, experts: int) -> Tensor:
    """Plain ones, some rounded so that experts tie, some rows all equal."""
    logits = draw.rows(t, experts, kind="plain").float() * 2.0
    logits[1::3] = logits[1::3].round()
    logits[2::7] = 0.5
    return logits


def _slots(draw: Draw, t: int, routing: _Routing) -> Tensor:
    """int64 ``[T, K]`` without repeats."""
    wanted = draw.uniform(t * routing.experts, 0.0, 1.0).view(t, routing.experts)
    wanted[:, 1] += 1.0
    return wanted.argsort(dim=1, descending=True)[:, : routing.top_k].contiguous()


@maker("topk")
def _topk(draw: Draw, t: int) -> Case:
    r = _routing(draw)
    bias = draw.maybe(draw.uniform(r.experts, -1.0, 1.0).mul(4).round() / 8)
    arguments = (_logits(draw, t, r.experts), bias, r.top_k, r.groups, r.kept, r.sigmoid)
    label = f"tokens {t}, {r.top_k} of {r.experts}, groups {r.kept} of {r.groups}"
    return case_of(label, *arguments, rows=(0,))


@maker("topk_weights", "topk_weights_grad")
def _topk_weights(draw: Draw, t: int) -> Case:
    r = _routing(draw)
    eps, scale = (1e-20, draw.random.uniform(1.0, 3.0)) if r.sigmoid else (0.0, 1.0)
    normed = r.top_k > 1 and draw.random.random() < 0.5  # alone, a normed weight is constant
    options = (r.sigmoid, normed, eps, scale)
    given = (_logits(draw, t, r.experts), _slots(draw, t, r), *options)
    label = f"tokens {t}, {r.top_k} of {r.experts}"
    if draw.contract.op == "topk_weights":
        return case_of(label, *given, rows=(0, 1))
    return case_of(label, draw.rows(t, r.top_k).float(), *given, rows=(0, 1, 2))


@maker("grouped_linear", "grouped_linear_grad")
def _grouped_linear(draw: Draw, t: int) -> Case:
    r = _routing(draw)
    inputs, outputs = draw.size(2, 400, 1), draw.size(2, 60, max(1, t * r.top_k // 16))
    by_slot = draw.random.random() < 0.5
    x = draw.rows(t * (r.top_k if by_slot else 1), inputs)
    x = x.unflatten(0, (t, r.top_k)) if by_slot else x
    weight = draw.rows(r.experts * outputs, inputs, scale=0.1).unflatten(0, (r.experts, outputs))
    given = (x, _slots(draw, t, r), weight)
    label = f"tokens {t}, {r.top_k} of {r.experts} experts, {inputs} to {outputs}"
    if draw.contract.op == "grouped_linear":
        return case_of(label, *given, rows=(0, 1))
    grad = draw.rows(t * r.top_k, outputs).unflatten(0, (t, r.top_k))
    return case_of(label, grad, *given, draw.maybe(draw.rows(r.experts * outputs, inputs).float()
                 .unflatten(0, (r.experts, outputs))), None)  # fmt: skip


@maker("combine", "combine_grad")
def _combine(draw: Draw, t: int) -> Case:
    top_k = draw.random.randint(1, 8)
    width = draw.size(2, 400, t * top_k)
    y = draw.rows(t * top_k, width).unflatten(0, (t, top_k))
    weights = draw.uniform(t * top_k, -1.0, 1.0).view(t, top_k)
    label = f"tokens {t}, {top_k} slots of {width}"
    if draw.contract.op == "combine":
        return case_of(label, y, weights, rows=(0, 1))
    return case_of(label, draw.rows(t, width), y, weights, rows=(0, 1, 2))
