"""What Hopper's matrix instructions compute, on a CPU: GEMM class L in bf16 and fp16.

    y = hopper.linear(x, weight)              # the bits of `linear` on an sm_90 GPU

One instruction step takes an fp32 accumulator and 16 products. Every term is cut, towards zero, to
a grid of 2^-25 of the largest exponent among them (a product's exponent is the sum of its factors',
not normalised); the cut terms are added exactly; the sum is cut, towards zero, to fp32. Steps chain
over the reduced axis, ascending, from +0; a short last step is padded with zeros. After the chain
come a bias in fp32 and one rounding to nearest, as ordinary instructions do them.

Source of the model: MMA-Sim (arXiv 2511.10909), which found these parameters for Hopper; that it
holds for our kernels is what ``test_hopper_gpu.py`` compares on an H200. Slow: small sizes only.
Finite numbers only.

Legend: M rows, N outputs, K reduced axis.
"""

import torch
from torch import Tensor

from ..errors import ContractError

STEP, FRACTION = 16, 25
# explicit significand bits, smallest normal exponent
_FORMATS = {torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float32: (23, -126)}
_NONE = -(1 << 20)  # an exponent below all others: a term that is zero


def _power(exponent: Tensor) -> Tensor:
    """2^exponent in fp64, for normal numbers; by bits, since an exp2 may round."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """(signed integer significand, exponent) in int64: x = significand * 2^(exponent - bits)."""
    bits, smallest = _FORMATS[x.dtype]
    exponent = torch.frexp(x.double())[1].long() - 1
    exponent = exponent.clamp(min=smallest)
    significand = (x.double() * _power(bits - exponent)).long()
    return significand, torch.where(significand == 0, _NONE, exponent)


def _cut(significand: Tensor, places: Tensor) -> Tensor:
    """significand * 2^places, towards zero."""
    size = significand.abs()
    left, right = places.clamp(0, FRACTION), (-places).clamp(0, 62)
    return ((size << left) >> right) * significand.sign()


def step(total: Tensor, terms: Tensor, exponents: Tensor, bits: int) -> Tensor:
    """fp32 [M, N]: the accumulator and products [16, M, N] of ``bits`` fraction bits, added."""
    begun, at = _parts(total)
    top = torch.maximum(exponents.amax(0), at)
    units = _cut(terms, exponents - top + FRACTION - bits).sum(0)
    units = units + _cut(begun, at - top + FRACTION - _FORMATS[torch.float32][0])
    top = torch.where(top == _NONE, 0, top)
    length = torch.frexp(units.double())[1].long()
    drop = torch.maximum(length - 24, -149 - (top - FRACTION)).clamp(min=0, max=62)
    kept = ((units.abs() >> drop) << drop) * units.sign()
    return (kept.double() * _power(top - FRACTION)).float()


def chain(a: Tensor, b: Tensor) -> Tensor:
    """fp32 [M, N] of a [M, K] and b [K, N], both bf16 or both fp16."""
    if a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float16):
        raise ContractError(
            f"the model of Hopper's arithmetic knows bf16 and fp16, not {a.dtype} with {b.dtype}; "
            "fp32 products are the chain of reference.linear"
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ContractError(
            "the model of Hopper's arithmetic is for finite numbers; clean the data"
        )
    (a_part, a_at), (b_part, b_at) = _parts(a), _parts(b)
    bits = 2 * _FORMATS[a.dtype][0]
    total = torch.zeros(a.shape[0], b.shape[1])
    for first in range(0, a.shape[1], STEP):
        here = slice(first, first + STEP)
        terms = a_part.t()[here, :, None] * b_part[here, None]
        exponents = (a_at.t()[here, :, None] + b_at[here, None]).clamp(min=_NONE)
        total = step(total, terms, torch.where(terms == 0, _NONE, exponents), bits)
    return total


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """[M, N] of x [M, K] and weight [N, K], in ``out_dtype`` (x's by default)."""
    total = chain(x, weight.t())
    return (total if bias is None else total + bias.float()).to(out_dtype or x.dtype)
