"""Linear layers whose every output is a fixed sum of FMA chains, whatever the batch.

    chain[c] = fma(x[t, k], W[n, k], ...) over k = 128 c ... 128 c + 127, ascending, from +0
    y[t, n]  = round(((chain[0] + chain[1]) + chain[2]) ... + b[n])

Contract ``linear.chain.<dtype>.cpu.v1``: fp32 throughout, bias added in fp32, one rounding. Short
chains keep the error that of a good library; a single chain over K = 1536 was 1.4 times as far from
fp64. A row's bits depend on that row and the weights alone: not on the number of rows, their
order, their neighbours or the thread count. dX is the same sum over n; dW and db are one chain over
tokens in the order of the call, and ``accumulate_into=`` continues a chain, so that any split into
micro-batches gives the bits of the whole batch. bf16 operands are widened exactly.

Packed weights are kept between calls without a gradient (see :mod:`.packs` for when they are
dropped). ``pytest tests/kernels/linear`` exercises it; ``zm kernels bench`` shows its speed beside
stock torch.

CUDA tensors go to :mod:`.gpu` (class L; fp16 too), whose sums over tokens are chunked.

Left out on purpose: fp16 (no contract on the CPU), sparse and quantised weights.

Legend: T rows (tokens), K inputs, N outputs.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..accumulation import chain_of
from ..dispatch import choose
from ..errors import ContractError
from . import cpu as cpu  # registers the contracts
from . import gpu
from .packs import forget, forget_all, kept_bytes, scoped

__all__ = [
    "apply_chain",
    "check",
    "contract_id",
    "forget",
    "forget_all",
    "grad_bias",
    "grad_input",
    "grad_weight",
    "kept_bytes",
    "linear",
    "scoped",
]

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def contract_id(op: str, dtype: torch.dtype) -> str:
    """The chain contract of ``linear``, ``lm_head`` or ``linear_grad_*`` at a dtype."""
    return f"{op}.chain.{_NAMES[dtype]}.cpu.v1"


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x[..., K]`` times ``weight[N, K]`` transposed, plus ``bias[N]``: ``[..., N]``.

    fp32 or bf16 CPU tensors of one dtype, any strides, any number of rows. ``out_dtype``: float32
    keeps the accumulator of a bf16 product; default is the dtype of x. Differentiable once. Raises
    ContractError for other dtypes, devices or shapes.
    """
    if x.is_cuda:
        return gpu.linear(x, weight, bias, out_dtype=out_dtype)
    check(x, weight, bias, out_dtype)
    return apply_chain("linear", x, weight, bias, out_dtype or x.dtype)


def apply_chain(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, *rounding: torch.dtype
) -> Tensor:
    """What ``linear`` and ``lm_head`` share; ``rounding``: output dtype, where chosen."""
    x_TK = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), weight.shape[1])
    wants_grad = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)
    )
    if wants_grad:
        y_TN = _Linear.apply(op, x_TK, weight, bias, *rounding)
    else:
        y_TN = choose(contract_id(op, x.dtype)).run(x_TK.contiguous(), weight, bias, *rounding)
    return y_TN if x.dim() == 2 else y_TN.view(*x.shape[:-1], weight.shape[0])


def grad_input(
    grad_TN: Tensor, weight_NK: Tensor, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """dX ``[T, K]``: short chains over n ascending, rounded once (to the weight's dtype)."""
    if grad_TN.is_cuda:
        return gpu.grad_input(grad_TN, weight_NK, out_dtype)
    run = choose(contract_id("linear_grad_input", weight_NK.dtype)).run
    return run(grad_TN.contiguous(), weight_NK.detach().contiguous(), out_dtype)


def grad_weight(
    grad_TN: Tensor,
    x_TK: Tensor,
    *,
    accumulate_into: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """dW ``[N, K]``: per element one chain over tokens, in the order of the rows.

    accumulate_into: contiguous fp32 ``[N, K]``; the chain continues from it, in place, and it is
    returned. Without it the chain starts at +0 and is rounded to ``out_dtype`` (fp32 by default).
    """
    _check_accumulator(accumulate_into, (grad_TN.shape[1], x_TK.shape[1]))
    if grad_TN.is_cuda:
        return gpu.grad_weight(grad_TN, x_TK, accumulate_into, out_dtype)
    run = choose(contract_id("linear_grad_weight", x_TK.dtype)).run
    return run(grad_TN.contiguous(), x_TK.contiguous(), accumulate_into, out_dtype, accumulate_into)


def grad_bias(
    grad_TN: Tensor, *, accumulate_into: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """db ``[N]``: one chain over tokens; ``accumulate_into`` as in :func:`grad_weight`."""
    _check_accumulator(accumulate_into, (grad_TN.shape[1],))
    if grad_TN.is_cuda:
        return gpu.grad_bias(grad_TN, accumulate_into, out_dtype)
    run = choose(contract_id("linear_grad_bias", grad_TN.dtype)).run
    return run(grad_TN.contiguous(), accumulate_into, out_dtype, accumulate_into)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: str, x_TK: Tensor, weight: Tensor, bias: Tensor | None, *rounding: torch.dtype
    ) -> Tensor:
        x_TK = x_TK.contiguous()
        ctx.save_for_backward(x_TK, weight, bias)
        ctx.op = op
        with scoped(weight, trains=ctx.needs_input_grad[2]):
            return choose(contract_id(op, x_TK.dtype)).run(x_TK, weight, bias, *rounding)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_TN: Tensor
    ) -> tuple[Tensor | None, ...]:
        x_TK, weight, bias = ctx.saved_tensors
        _, wants_x, wants_weight, wants_bias, *rounding = ctx.needs_input_grad
        grad_TN = grad_TN.contiguous()
        return (
            None,
            grad_input(grad_TN, weight) if wants_x else None,
            _continued_weight(ctx.op, grad_TN, x_TK, weight) if wants_weight else None,
            _continued_bias(ctx.op, grad_TN, bias) if wants_bias else None,
            *(None for _ in rounding),
        )


def _continued_weight(op: str, grad_TN: Tensor, x_TK: Tensor, weight: Tensor) -> Tensor | None:
    """The weight's gradient, or None after continuing the chain that micro-batches share."""
    chain = chain_of(weight, op)
    if chain is None:
        return grad_weight(grad_TN, x_TK, out_dtype=weight.dtype)
    grad_weight(grad_TN, x_TK, accumulate_into=chain)
    return None


def _continued_bias(op: str, grad_TN: Tensor, bias: Tensor) -> Tensor | None:
    chain = chain_of(bias, op)
    if chain is None:
        return grad_bias(grad_TN, out_dtype=bias.dtype)
    grad_bias(grad_TN, accumulate_into=chain)
    return None


def check(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
    """Raise ContractError where the linear contract does not cover these tensors."""
    if (
        x.dtype not in _NAMES
        or weight.dtype != x.dtype
        or (bias is not None and bias.dtype != x.dtype)
    ):
        raise ContractError(
            f"linear takes float32 or bfloat16, the same for all tensors, not x {x.dtype}, weight "
            f"{weight.dtype}{'' if bias is None else f', bias {bias.dtype}'}; convert them first"
        )
    if not (x.is_cpu and weight.is_cpu):
        raise ContractError(
            f"linear has no contract for {x.device} and {weight.device}; move both to the CPU"
        )
    fits = weight.dim() == 2 and x.dim() >= 1 and x.shape[-1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise ContractError(
            f"linear needs x [..., K], weight [N, K], bias [N], not {tuple(x.shape)}, "
            f"{tuple(weight.shape)}, {None if bias is None else tuple(bias.shape)}; check which "
            "weight belongs to this layer"
        )
    if out_dtype not in (None, torch.float32, x.dtype):
        raise ContractError(
            f"linear rounds to {x.dtype} or float32, not {out_dtype}; cast the result"
        )


def _check_accumulator(accumulator: Tensor | None, shape: tuple[int, ...]) -> None:
    if accumulator is None:
        return
    if (
        accumulator.dtype != torch.float32
        or accumulator.shape != shape
        or not accumulator.is_contiguous()
    ):
        raise ContractError(
            f"accumulate_into must be contiguous float32 {shape}, not {accumulator.dtype} "
            f"{tuple(accumulator.shape)}; allocate it with torch.zeros{shape}"
        )
