"""Gradients of the gates of recurrent layers on the GPU: the CPU's formulas and rounding points.

Contracts ``<op>_grad.wide.<dtype>.sm90.v1``: see :mod:`..gpu.row_gradient`. A formula's last
results are what each row adds to its parameters' gradients.

Legend: T rows, H heads, N = H or H K columns, P head size.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..gpu.row_gradient import register_gradient, row_by_row, sigmoid64, tree_sum, wide

_THRESHOLD = 20.0


def sigmoid(dy: Tensor, x: Tensor) -> tuple[Tensor]:
    """dx."""
    sig = sigmoid64(wide(x))
    return ((wide(dy) * sig * (1.0 - sig)).to(x.dtype),)


def sigmoid_mul(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """dx, dgate."""
    reaching = (wide(dy) * wide(x)).to(x.dtype)
    act = wide(sigmoid64(wide(gate)).to(gate.dtype))
    return (wide(dy) * act).to(x.dtype), *sigmoid(reaching, gate)


def relu_squared(dy: Tensor, x: Tensor) -> tuple[Tensor]:
    """dx."""
    return ((wide(dy) * 2.0 * torch.relu(wide(x))).to(x.dtype),)


def _softplus(x: Tensor) -> Tensor:
    small = torch.relu(x) + torch.log1p(torch.exp(-x.abs()))
    return torch.where(x > _THRESHOLD, x, small)


def _slope(x: Tensor) -> Tensor:
    return torch.where(x > _THRESHOLD, 1.0, sigmoid64(x))


def _rate(a_log: Tensor) -> Tensor:
    return -torch.exp(wide(a_log))


def decay(dg: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, ...]:
    """da; dA_log [T, H], ddt_bias [T, N] by row."""
    t, heads = wide(a) + wide(dt_bias), (len(a_log), -1)
    d_g = wide(dg).unflatten(1, heads) * _rate(a_log)[:, None]
    d_log = tree_sum(d_g * _softplus(t).unflatten(1, heads))
    d_t = d_g.flatten(1) * _slope(t)
    return d_t.to(a.dtype), d_log, d_t


def time_step(
    dy: Tensor, dt: Tensor, dt_bias: Tensor, low: float, high: float
) -> tuple[Tensor, ...]:
    """d_dt; ddt_bias [T, H] by row. The sum and its softplus are rounded as in the forward."""
    shifted = wide((wide(dt) + wide(dt_bias.to(dt.dtype))).to(dt.dtype))
    soft = _softplus(shifted).to(dt.dtype).float()
    d_dt = torch.where((soft >= low) & (soft <= high), wide(dy) * _slope(shifted), 0.0)
    d_dt = d_dt.to(dt.dtype)
    return d_dt, wide(d_dt)


def discretised(
    dv: Tensor, dg: Tensor, x: Tensor, dt: Tensor, a_log: Tensor
) -> tuple[Tensor, ...]:
    """dx, d_dt; dA_log [T, H] by row."""
    step, rate = wide(dt), _rate(a_log)
    d_dt = tree_sum(wide(dv) * wide(x)) + wide(dg) * rate
    dx = (wide(dv) * step[..., None]).to(x.dtype)
    return dx, d_dt.to(dt.dtype), wide(dg) * rate * step


def skip(dy: Tensor, o: Tensor, x: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    """do, dx; dD [T, H] by row."""
    dx = (wide(dy) * wide(d)[:, None]).to(x.dtype)
    return dy.to(o.dtype, copy=True), dx, tree_sum(wide(dy) * wide(x))


# formula, arguments with rows, parameters with a chain, text
_FORMULAS: dict[str, tuple[Any, int, int, str]] = {
    "sigmoid": (sigmoid, 2, 0, "dx = dy sig (1 - sig)"),
    "sigmoid_mul": (
        sigmoid_mul, 3, 0, "dx = dy sigmoid(gate); dgate = sigmoid_grad(round(dy x), gate)",
    ),
    "relu_squared": (relu_squared, 2, 0, "dx = dy (r + r), r = max(x, 0)"),
    "decay": (
        decay, 2, 2,
        "da = dg (-exp(A_log)) softplus'; dA_log = sum dg g; ddt_bias = sum da before its rounding",
    ),
    "time_step": (
        time_step, 2, 1, "d_dt = dy softplus' within the limits, else 0; ddt_bias = sum d_dt",
    ),
    "discretised": (
        discretised, 4, 1, "dx = dv dt; d_dt = dv . x + dg (-exp(A_log)); dA_log = sum dg g",
    ),
    "skip": (skip, 3, 1, "do = dy; dx = dy D; dD = sum dy . x"),
}  # fmt: skip
(
    reference_sigmoid, reference_sigmoid_mul, reference_relu_squared, reference_decay,
    reference_time_step, reference_discretised, reference_skip,
) = (
    partial(row_by_row, formula, rows, chains) for formula, rows, chains, _ in _FORMULAS.values()
)  # fmt: skip

GRADIENTS = {
    op: register_gradient(
        formula,
        name=f"{op}_grad.wide",
        rows=rows,
        chains=chains,
        text=text,
        reference=f"zeromismatch.kernels.gates.gpu_gradient:reference_{op}",
    )
    for op, (formula, rows, chains, text) in _FORMULAS.items()
}
