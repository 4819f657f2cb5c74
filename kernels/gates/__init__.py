"""Gates of recurrent layers and what stands beside them, forward and backward, row by row.

    beta = sigmoid(b)                                  the delta rules' strength of an update
    y    = sigmoid_mul(x, gate)                        an attention's output gate
    g    = decay_gate(a, A_log, dt_bias)               fp32 log decays; per head or per key channel
    dt   = time_step(dt, dt_bias, low=0.0, high=inf)   Mamba-2's softplus and clamp
    v, g = discretised(x, dt, A_log)                   Mamba-2's inputs for the recurrence, fp32
    y    = skip(o, x, D)                               Mamba-2's skip connection, fp32
    y    = relu_squared(x)                             Nemotron-H's activation

Rounding points are those of transformers' code for these models, which is what they replace; the
fp32 functions inside have one definition each (``kernels/reference/gates.py``), where stock torch
differs between a vector and its tail. ``pytest tests/kernels/gates`` exercises them. CUDA tensors
go to :mod:`.gpu`, whose contracts have exp2.

Legend: T rows, H heads, K key size, P head size.
"""

import math

import torch
from torch import Tensor

from ..errors import ContractError
from . import cpu, gpu

__all__ = [
    "decay_gate", "discretised", "relu_squared", "sigmoid", "sigmoid_mul", "skip", "time_step",
]  # fmt: skip


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))`` elementwise, fp32 or bf16, any shape."""
    if x.is_cuda:
        return gpu.serve("sigmoid", x)
    return cpu.SIGMOID(x)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """``x sigmoid(gate)`` elementwise, each step rounded; both of one shape and dtype."""
    if x.shape != gate.shape or x.dtype != gate.dtype:
        raise ContractError(
            f"x is {x.dtype} {tuple(x.shape)}, its gate {gate.dtype} {tuple(gate.shape)}; give "
            "both the same shape and dtype"
        )
    if x.is_cuda:
        return gpu.serve("sigmoid_mul", x, gate)
    return cpu.SIGMOID_MUL(x, gate)


def relu_squared(x: Tensor) -> Tensor:
    """``max(x, 0) ** 2`` elementwise, fp32 or bf16, any shape."""
    if x.is_cuda:
        return gpu.serve("relu_squared", x)
    return cpu.RELU_SQUARED(x)


def decay_gate(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """fp32 ``-exp(A_log) softplus(a + dt_bias)``, the shape of a.

    a: ``[T, H]``, or ``[T, H, K]`` with a decay per key channel; a_log: ``[H]``; dt_bias: one for
    every column of a, ``[H]`` or ``[H, K]`` flattened or not. Each fp32 or bf16.
    """
    columns = math.prod(a.shape[1:])
    fits = a.dim() in (2, 3) and a_log.numel() == a.shape[1] and dt_bias.numel() == columns
    if not fits:
        raise ContractError(
            f"the decay gate takes a [T, H] or [T, H, K] with A_log [H] and a dt_bias per column, "
            f"not {tuple(a.shape)}, {tuple(a_log.shape)} and {tuple(dt_bias.shape)}; check which "
            "layer they belong to"
        )
    given = (a.flatten(1), a_log.flatten(), dt_bias.flatten())
    return (gpu.serve("decay", *given) if a.is_cuda else cpu.DECAY(*given)).view(a.shape)


def time_step(dt: Tensor, dt_bias: Tensor, *, low: float = 0.0, high: float = math.inf) -> Tensor:
    """``softplus(dt + dt_bias)`` between low and high: ``[T, H]`` in dt's dtype; dt_bias [H].

    The sum, the softplus and the clamp are each rounded to dt's dtype.
    """
    if dt.dim() != 2 or dt_bias.shape != dt.shape[1:] or not low <= high:
        raise ContractError(
            f"time_step takes dt [T, H] and dt_bias [H] with low <= high, not {tuple(dt.shape)}, "
            f"{tuple(dt_bias.shape)}, {low} and {high}; check which layer they belong to"
        )
    if dt.is_cuda:
        return gpu.serve("time_step", dt, dt_bias, float(low), float(high))
    return cpu.TIME_STEP(dt, dt_bias, float(low), float(high))


def discretised(x: Tensor, dt: Tensor, a_log: Tensor) -> tuple[Tensor, Tensor]:
    """``v = x dt`` fp32 ``[T, H, P]`` and ``g = -exp(A_log) dt`` fp32 ``[T, H]``.

    x: ``[T, H, P]``; dt: ``[T, H]`` of its dtype; a_log: ``[H]``, fp32 or bf16.
    """
    fits = x.dim() == 3 and dt.shape == x.shape[:2] and a_log.shape == x.shape[1:2]
    if not fits or dt.dtype != x.dtype:
        raise ContractError(
            f"discretised takes x [T, H, P], dt [T, H] of one dtype and A_log [H], not {x.dtype} "
            f"{tuple(x.shape)}, {dt.dtype} {tuple(dt.shape)} and {tuple(a_log.shape)}; check which "
            "layer they belong to"
        )
    given = (x, dt, a_log)
    v, g = gpu.serve("discretised", *given) if x.is_cuda else cpu.DISCRETISED(*given)
    return v, g


def skip(o: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """fp32 ``o + D x``: o fp32 ``[T, H, P]``, x of its shape, fp32 or bf16, d ``[H]``."""
    if o.dim() != 3 or o.shape != x.shape or d.shape != o.shape[1:2] or o.dtype != torch.float32:
        raise ContractError(
            f"skip takes float32 o and x [T, H, P] and D [H], not {o.dtype} {tuple(o.shape)}, "
            f"{tuple(x.shape)} and {tuple(d.shape)}; take o from the recurrence"
        )
    if x.is_cuda:
        return gpu.serve("skip", o, x, d)
    return cpu.SKIP(o, x, d)
