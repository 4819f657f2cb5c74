"""Gated RMSNorm and the L2 norm on the GPU: contracts and launches.

Contracts ``gated_rmsnorm.lanes.<dtype>.sm90.v1`` and ``l2norm.lanes...``: the CPU's formulas and
rounding points, another order of the sums (:mod:`.gpu_kernels`) and exp2. The order depends on the
width of a group; rows per program and warps are schedule, and the reference is one row by one warp.
:mod:`.gpu_gradient` has the gradients.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..gpu.device import aligned, programs, require
from ..gpu.register import register_gpu
from ..row_operator import RowOperator
from .gpu_gradient import GRADIENTS

_ORDERS = ("silu_after", "sigmoid_after", "silu_before")
_VECTOR = 4
_FIELDS: dict[str, Any] = {
    "storages": ("float32", "bfloat16"),
    "order": "squares in lanes by the width of a group, columns ascending, then neighbours, halves",
    "functions": "ex2.approx, IEEE division and square root, no FMA",
}


def _launch(
    order: int,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    y: Tensor,
    eps: float,
    group: int,
    scale: float = 1.0,
    *,
    rows: int = 4,
    warps: int = 4,
) -> Tensor:
    gpu_kernels = programs(__package__, "gpu_kernels")

    x, gate, weight = aligned(x), aligned(gate), aligned(weight)
    lanes = min(32 * _VECTOR, max(2 * _VECTOR, 1 << (group - 1).bit_length()))
    count = x.numel() // max(group, 1)
    if count:
        gpu_kernels.gated_norm_kernel[(-(-count // rows),)](
            x, gate, weight, y, count, x.shape[1] // group, eps, scale, G=group, W=lanes,
            VEC=_VECTOR, R=rows, ORDER=order, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def gated_rmsnorm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, order: str, **shape: Any
) -> Tensor:
    """[T, H] of x, gate [T, H] and weight [H]."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    dtype = wide if order == "silu_before" else x.dtype
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    return _launch(_ORDERS.index(order), x, gate, weight, y, eps, group, **shape)


def l2norm(x: Tensor, eps: float, divide: bool, scale: float, **shape: Any) -> Tensor:
    """fp32 [T, H]."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return _launch(4 if divide else 3, x, x, x, y, eps, x.shape[1], scale, **shape)


_ONE: dict[str, Any] = {"rows": 1, "warps": 1}
reference_gated_rmsnorm = partial(gated_rmsnorm, **_ONE)
reference_l2norm = partial(l2norm, **_ONE)

CONTRACTS = {
    op: register_gpu(
        {"triton": run},
        name=f"{op}.lanes",
        op=op,
        formula=f"as {op}.lanes16.<dtype>.cpu.v1",
        rounding=rounding,
        reference=f"zeromismatch.kernels.gated_norm.gpu:reference_{op}",
        **_FIELDS,
    )
    for op, run, rounding in (
        ("gated_rmsnorm", gated_rmsnorm, "as on a CPU"),
        ("l2norm", l2norm, "x widened exactly, fp32 throughout"),
    )
}


_OPERATORS = {
    op: RowOperator(
        name=op,
        tensors=tensors,
        parameters=parameters,
        forward=CONTRACTS[op],
        gradient=GRADIENTS[op],
    )
    for op, tensors, parameters in (("gated_rmsnorm", 3, (2,)), ("l2norm", 1, ()))
}


def serve(op: str, *arguments: Any) -> Any:
    """Run ``op`` on CUDA tensors by its proved contract, the first one's dtype; differentiable."""
    operator = _OPERATORS[op]
    tensors = arguments[: operator.tensors]
    require(op, *tensors, dtypes=(torch.float32, torch.bfloat16))
    return operator.recorded(*arguments)
