"""Linear on the CPU: contracts and the compiled core's variants as implementations.

Four operations for each of fp32 and bf16, all by the same GEMM (``kernels/cpu/gemm.h``):

    linear.chain              y  = round(x W^T + b)   over packed panels of W
    linear_grad_input.chain   dX = round(dY W)        rows of W are the reduced axis
    linear_grad_weight.chain  dW = dY^T X             tokens are the reduced axis
    linear_grad_bias.chain    db = 1 dY               tokens again; 1 * dy is exact

Signatures are those of ``kernels/reference/linear.py``. Threads come from
``torch.get_num_threads``.
"""

import torch
from torch import Tensor

from ..cpu.load import DOTS, VARIANTS, core
from ..cpu.register import is_bf16, register_core
from .packs import panels_of

SHORT_CHAINS = "fp32 FMA chains over 128 {axis} ascending, each from +0, chains added ascending"
_ONE_CHAIN = "one fp32 FMA chain over {axis} ascending, from +0 or the given accumulator"
_ROUNDING = "operands widened exactly, sums in fp32, one rounding to nearest even at the end"


def linear(
    variant: str,
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[T, N] in ``out_dtype``; variant ``avx512bf16`` uses the processor's bf16 dot product."""
    dots = variant == DOTS
    rows, inputs = x_TK.shape
    outputs = weight_NK.shape[0]
    out = torch.empty(rows, outputs, dtype=out_dtype or x_TK.dtype)
    core("avx512" if dots else variant).call(
        "gemm", x_TK, is_bf16(x_TK), panels_of(weight_NK),
        None if bias_N is None else bias_N.float().contiguous(),
        out, is_bf16(out), rows, outputs, inputs, dots, torch.get_num_threads(),
    )  # fmt: skip
    return out


def grad_input(
    variant: str, grad_TN: Tensor, weight_NK: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """dX [T, K]."""
    out = torch.empty(grad_TN.shape[0], weight_NK.shape[1], dtype=out_dtype or weight_NK.dtype)
    return _product(variant, grad_TN, False, weight_NK, None, out)


def grad_weight(
    variant: str,
    grad_TN: Tensor,
    x_TK: Tensor,
    initial_NK: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_NK: Tensor | None = None,
) -> Tensor:
    """dW [N, K], from ``initial`` (fp32) and into ``out`` where given; both may be one tensor."""
    if out_NK is None:
        out_NK = torch.empty(grad_TN.shape[1], x_TK.shape[1], dtype=out_dtype or torch.float32)
    return _product(variant, grad_TN, True, x_TK, initial_NK, out_NK)


def grad_bias(
    variant: str,
    grad_TN: Tensor,
    initial_N: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_N: Tensor | None = None,
) -> Tensor:
    """db [N], from ``initial`` (fp32) and into ``out`` where given."""
    if out_N is None:
        out_N = torch.empty(grad_TN.shape[1], dtype=out_dtype or torch.float32)
    ones = torch.ones(grad_TN.shape[0], 1)  # transposed: tokens are one unbroken chain
    initial = None if initial_N is None else initial_N[None]
    return _product(variant, ones, True, grad_TN, initial, out_N[None])[0]


def _product(
    variant: str,
    a: Tensor,
    a_transposed: bool,
    b_KN: Tensor,
    initial_MN: Tensor | None,
    out_MN: Tensor,
) -> Tensor:
    inputs, outputs = b_KN.shape
    core(variant).call(
        "gemm_rows", a, is_bf16(a), a_transposed,
        b_KN, is_bf16(b_KN), initial_MN,
        out_MN, is_bf16(out_MN), out_MN.shape[0], outputs, inputs,
        torch.get_num_threads(),
    )  # fmt: skip
    return out_MN


def forward_variants(storage: str) -> tuple[str, ...]:
    """Variants of a forward product."""
    return (*VARIANTS, DOTS) if storage == "bfloat16" else VARIANTS


_OPERATIONS = {
    "linear": (linear, "y = round(sum_k x[t, k] W[n, k] + b[n])", SHORT_CHAINS, "inputs k"),
    "linear_grad_input": (
        grad_input,
        "dX = round(sum_n dY[t, n] W[n, k])",
        SHORT_CHAINS,
        "outputs n",
    ),
    "linear_grad_weight": (grad_weight, "dW = sum_t dY[t, n] X[t, k]", _ONE_CHAIN, "tokens t"),
    "linear_grad_bias": (grad_bias, "db = sum_t dY[t, n]", _ONE_CHAIN, "tokens t"),
}

for _op, (_function, _formula, _order, _axis) in _OPERATIONS.items():
    for _storage, _rtol in (("float32", 1e-4), ("bfloat16", 2e-2)):
        register_core(
            _function,
            name=f"{_op}.chain",
            storages=(_storage,),
            variants=forward_variants(_storage) if _op == "linear" else VARIANTS,
            op=_op,
            formula=_formula,
            order=_order.format(axis=_axis),
            rounding=_ROUNDING,
            functions="fma",
            reference=f"zeromismatch.kernels.reference.linear:{_function.__name__}",
            gradient_rtol=_rtol,
        )
