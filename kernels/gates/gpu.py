"""Gates of recurrent layers on the GPU: contracts and launches.

Contracts ``<op>.exp2.<dtype>.sm90.v1``: the CPU's formulas and rounding points with exp2
(:mod:`.gpu_kernels`). Elementwise, so every schedule has the same bits; the reference is one
element a thread. :mod:`.gpu_gradient` has the gradients.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..gpu.device import aligned, programs, require
from ..gpu.register import register_gpu
from ..row_operator import RowOperator
from .gpu_gradient import GRADIENTS

_BLOCK = 1024
_STORAGES = ("float32", "bfloat16")


def elementwise(
    kind: int, x: Tensor, gate: Tensor | None = None, *, block: int = _BLOCK, warps: int = 4
) -> Tensor:
    """0 sigmoid, 1 sigmoid_mul, 2 relu_squared; any shape."""
    gpu_kernels = programs(__package__, "gpu_kernels")

    x = aligned(x)
    gate, y = x if gate is None else aligned(gate), torch.empty_like(x)
    if x.numel():
        gpu_kernels.gate_kernel[(-(-x.numel() // block),)](
            x, gate, y, x.numel(), KIND=kind, BLOCK=block, num_warps=warps, enable_fp_fusion=False
        )
    return y


def _rows(
    kind: int,
    x: Tensor,
    other: Tensor,
    a: Tensor,
    b: Tensor,
    y: Tensor,
    g: Tensor,
    sizes: tuple[int, int],
    limits: tuple[float, float] = (0.0, 0.0),
    *,
    block: int = _BLOCK,
    warps: int = 4,
) -> None:
    gpu_kernels = programs(__package__, "gpu_kernels")

    x, other, a, b = (aligned(each) for each in (x, other, a, b))
    if x.numel():
        gpu_kernels.row_gate_kernel[(-(-x.numel() // block),)](
            x, other, a, b, y, g, x.numel(), *sizes, *limits, KIND=kind, BLOCK=block,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip


def _wide(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def decay(a: Tensor, a_log: Tensor, dt_bias: Tensor, **shape: Any) -> Tensor:
    """fp32 [T, N] of a [T, N], A_log [H], dt_bias [N]."""
    g, columns = _wide(a), a.shape[1]
    _rows(0, a, a, a_log, dt_bias, g, g, (columns, columns // len(a_log)), **shape)
    return g


def time_step(dt: Tensor, dt_bias: Tensor, low: float, high: float, **shape: Any) -> Tensor:
    """[T, H] in dt's dtype."""
    y = torch.empty(dt.shape, dtype=dt.dtype, device=dt.device)
    _rows(1, dt, dt, dt_bias, dt_bias, y, y, (dt.shape[1], 1), (low, high), **shape)
    return y


def discretised(x: Tensor, dt: Tensor, a_log: Tensor, **shape: Any) -> tuple[Tensor, Tensor]:
    """(v [T, H, P], g [T, H]) fp32."""
    v, g = _wide(x), _wide(dt)
    _rows(2, x, dt, a_log, a_log, v, g, (x.shape[1] * x.shape[2], x.shape[2]), **shape)
    return v, g


def skip(o: Tensor, x: Tensor, d: Tensor, **shape: Any) -> Tensor:
    """fp32 [T, H, P]."""
    y = _wide(o)
    _rows(3, x, o, d, d, y, y, (x.shape[1] * x.shape[2], x.shape[2]), **shape)
    return y


# One element a thread: the formula, and nothing of the schedule.
_ONE: dict[str, Any] = {"block": 32, "warps": 1}
_RUNS: dict[str, Callable[..., Any]] = {
    "sigmoid": partial(elementwise, 0),
    "sigmoid_mul": partial(elementwise, 1),
    "relu_squared": partial(elementwise, 2),
    "decay": decay,
    "time_step": time_step,
    "discretised": discretised,
    "skip": skip,
}
reference_sigmoid, reference_sigmoid_mul, reference_relu_squared = (
    partial(elementwise, kind, **_ONE) for kind in range(3)
)
reference_decay = partial(decay, **_ONE)
reference_time_step = partial(time_step, **_ONE)
reference_discretised = partial(discretised, **_ONE)
reference_skip = partial(skip, **_ONE)

CONTRACTS = {
    op: register_gpu(
        {"triton": run},
        name=f"{op}.exp2",
        storages=_STORAGES,
        op=op,
        formula=f"as {op}.<dtype>.cpu.v1",
        order="none: elementwise",
        rounding="as on a CPU; fp32 without FMA",
        functions="ex2.approx, IEEE division, log1p.series.v1",
        reference=f"zeromismatch.kernels.gates.gpu:reference_{op}",
    )
    for op, run in _RUNS.items()
}


# How many tensors, which of them all rows share, and whose dtype names the contract.
_TENSORS: dict[str, tuple[int, tuple[int, ...], int]] = {
    "sigmoid": (1, (), 0),
    "sigmoid_mul": (2, (), 0),
    "relu_squared": (1, (), 0),
    "decay": (3, (1, 2), 0),
    "time_step": (2, (1,), 0),
    "discretised": (3, (2,), 0),
    "skip": (3, (2,), 1),
}
_OPERATORS = {
    op: RowOperator(
        name=op,
        tensors=tensors,
        parameters=parameters,
        by=by,
        forward=CONTRACTS[op],
        gradient=GRADIENTS[op],
    )
    for op, (tensors, parameters, by) in _TENSORS.items()
}


def serve(op: str, *arguments: Any) -> Any:
    """Run ``op`` on CUDA tensors by its proved contract; differentiable."""
    operator = _OPERATORS[op]
    tensors = arguments[: operator.tensors]
    require(op, tensors[operator.by], *tensors, dtypes=(torch.float32, torch.bfloat16))
    return operator.recorded(*arguments)
