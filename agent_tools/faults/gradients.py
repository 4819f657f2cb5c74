"""Faulty gradients: another sum each time, and a weight that counts twice.

Kernels of the backward are certified like those of the forward: an implementation with one of these
faults must be refused before it serves.
"""

from typing import Any

import torch
from torch import Tensor

from .mechanism import Kernel


class AtomicSum:
    """G01: parts are added in the order in which threads happen to finish."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(1)

    def __call__(self, right: Kernel, grad_TN: Tensor, weight_NK: Tensor, *rest: Any) -> Tensor:
        """dX [T, K]: a product per part of N, added in a random order."""
        size = max(1, -(-grad_TN.shape[1] // 4))
        parts = [
            right(g.contiguous(), w.contiguous(), torch.float32)
            for g, w in zip(grad_TN.split(size, 1), weight_NK.split(size, 0), strict=True)
        ]
        order = torch.randperm(len(parts), generator=self.random).tolist()
        total = parts[order[0]]
        for index in order[1:]:
            total = total + parts[index]
        return total.to(rest[0] if rest and rest[0] is not None else weight_NK.dtype)


def weight_twice(
    right: Kernel, dy: Tensor, s: Tensor, weight: Tensor, eps: float, offset: bool = False,
    ds: Tensor | None = None, initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """G03: the weight enters the variance term of dX twice."""
    _, dw = right(dy, s, weight, eps, offset, ds, initial)
    x, w = s.float(), weight.float() + float(offset)
    g = dy.float() * w
    r = torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
    dx = r * (g - x * ((g * w * x).mean(1, keepdim=True) * r * r))
    return (dx if ds is None else ds.float() + dx).to(s.dtype), dw
