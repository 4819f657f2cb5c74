"""``fma32(a, b, c)``: the exact fused multiply-add of fp32, in plain torch, for every reference.

No torch function is a fused multiply-add by contract, so references need one made of parts that
are. The product of two fp32 numbers has at most 48 significant bits: it is exact in fp64. The sum
of that product and ``c`` is not, and rounding it to fp64 and then to fp32 rounds twice, which is
wrong when the first rounding lands on a tie of the second. So the fp64 sum is rounded *to odd*:
TwoSum gives the exact error of the sum; where it is not zero and the last bit of the sum is 0, the
sum moves one fp64 ulp towards the exact value. A number rounded to odd with 53 bits rounds
correctly to 24 (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).

    >>> fma32(torch.tensor(1 + 2**-12), torch.tensor(1 + 2**-12), torch.tensor(-1.0)) == 2**-11 +
    2**-24 tensor(True)

Frozen: other references are defined by it. NaN payloads are not part of the definition.
"""

import torch
from torch import Tensor


def fma32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Round ``a * b + c`` once to fp32; fp32 tensors that broadcast, any device with IEEE fp64."""
    product = a.double() * b.double()  # exact
    addend = c.double()
    total = product + addend
    shadow = total - product  # TwoSum: total + error == product + addend exactly
    error = (product - (total - shadow)) + (addend - shadow)
    bits = total.view(torch.int64)
    inexact_and_even = (error != 0) & ((bits & 1) == 0) & torch.isfinite(total)
    away_from_zero = (error > 0) == (total > 0)
    odd = torch.where(away_from_zero, bits + 1, bits - 1)
    return torch.where(inexact_and_even, odd, bits).view(torch.float64).float()
