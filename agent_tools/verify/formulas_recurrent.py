"""What the operators of recurrent layers mean, in torch and without any order (:mod:`.formulas`).

The state arithmetic itself (``recurrence``) has no formula here: chunks and pages are its
definition. Its bits are compared like any other's; how far it is from fp64 is gate C5's question,
asked of the whole model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PAGED = (
    "chunks and pages of states are its definition; its distance from fp64 is judged by gate C5 on "
    "the whole model"
)
PAGED_OPS = ("recurrence", "recurrence_blocks", "recurrence_stepwise", "convolution")


def _wide(*tensors: Tensor) -> list[Tensor]:
    at = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return [each.to(at) for each in tensors]


def _relu_squared(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def _decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    a, a_log, dt_bias = _wide(a, a_log, dt_bias)
    soft = functional.softplus(a + dt_bias).unflatten(1, (len(a_log), -1))
    return (-torch.exp(a_log)[:, None] * soft).flatten(1)


def _time_step(dt: Tensor, dt_bias: Tensor, low: float, high: float) -> Tensor:
    return functional.softplus(dt + dt_bias.to(dt.dtype)).clamp(low, high)


def time_step_gradients(arguments: Sequence[Any]) -> list[Tensor | None]:
    """As the contract rounds: a clamp binds at stored values, and the bias adds stored rows."""
    dy, dt, bias, low, high, start = arguments
    leaf = dt.double().detach().requires_grad_(True)
    with torch.enable_grad():
        soft = functional.softplus(_as_stored(leaf + bias.to(dt.dtype).double(), dt.dtype))
        output = _as_stored(soft, dt.dtype).clamp(low, high)
        rows = torch.autograd.grad(output, leaf, dy.double())[0]
    total = rows.to(dt.dtype).double().sum(dim=0)
    return [rows, total if start is None else total + start]


def _as_stored(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to ``dtype``; the gradient passes as if it were not."""
    return exact + (exact.detach().to(dtype).double() - exact.detach())


def _discretised(x: Tensor, dt: Tensor, a_log: Tensor) -> tuple[Tensor, Tensor]:
    x, dt, a_log = _wide(x, dt, a_log)
    return x * dt[..., None], -torch.exp(a_log) * dt


def _skip(o: Tensor, x: Tensor, d: Tensor) -> Tensor:
    o, x, d = _wide(o, x, d)
    return o + d[:, None] * x


def _gated_rmsnorm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, order: str
) -> Tensor:
    wide, gate_wide, weight_wide = _wide(x, gate, weight)
    act = torch.sigmoid(gate_wide) if order == "sigmoid_after" else functional.silu(gate_wide)
    h = wide * act if order == "silu_before" else wide
    normed = functional.rms_norm(h.unflatten(1, (-1, group)), (group,), None, eps).flatten(1)
    y = normed * weight_wide if order == "silu_before" else normed * weight_wide * act
    return y.to(torch.promote_types(x.dtype, weight.dtype) if order == "silu_before" else x.dtype)


def _l2norm(x: Tensor, eps: float, divide: bool, scale: float) -> Tensor:
    (h,) = _wide(x)
    return scale * h / (h.square().sum(-1, keepdim=True) + eps).sqrt()


def _sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


RECURRENT: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "sigmoid": (torch.sigmoid, (0,)),
    "sigmoid_mul": (_sigmoid_mul, (0, 1)),
    "relu_squared": (_relu_squared, (0,)),
    "decay": (_decay, (0, 1, 2)),
    "time_step": (_time_step, (0, 1)),
    "discretised": (_discretised, (0, 1, 2)),
    "skip": (_skip, (0, 1, 2)),
    "gated_rmsnorm": (_gated_rmsnorm, (0, 1, 2)),
    "l2norm": (_l2norm, (0,)),
}
"""Operator -> forward, and the positions of the arguments that have gradients."""
_FORWARD_ARGUMENTS = {
    "sigmoid": 1, "sigmoid_mul": 2, "relu_squared": 1, "decay": 3, "time_step": 4,
    "discretised": 3, "skip": 3, "gated_rmsnorm": 6, "l2norm": 4,
}  # fmt: skip


def gradients(op: str, full: Sequence[Any]) -> list[Tensor | None] | None:
    """fp64 gradients of ``op``'s gradient contract, from its arguments in fp64; None: no formula.

    They are upstream, then the forward's arguments, then where the chains of parameters start.
    """
    name = op.removesuffix("_grad")
    if name not in RECURRENT:
        return None
    run, asked = RECURRENT[name]
    ups = 2 if name == "discretised" else 1
    own = list(full[ups : ups + _FORWARD_ARGUMENTS[name]])
    starts = list(full[ups + _FORWARD_ARGUMENTS[name] :])
    leaves = [own[at].detach().clone().requires_grad_(True) for at in asked]
    for at, leaf in zip(asked, leaves, strict=True):
        own[at] = leaf
    with torch.enable_grad():
        output = run(*own)
        outputs = output if isinstance(output, tuple) else (output,)
        ends = tuple(full[:ups])
        found: list[Tensor | None] = list(
            torch.autograd.grad(outputs, leaves, ends, allow_unused=True)
        )
    for back, start in enumerate(reversed(starts)):
        held = found[len(found) - 1 - back]
        if start is not None and held is not None:
            found[len(found) - 1 - back] = held + start
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, found, strict=True)
    ]
