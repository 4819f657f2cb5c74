"""Reference solution of the task plover."""

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTRACT = {
    "id": "sliced_peak.fp64.float32.cpu.v1",
    "op": "sliced_peak",
    "dtype": "float32",
    "device": "cpu",
    "formula": "p = softplus(gate) up; p / max |p| * log(1 + max |p|)",
    "order": "none: the largest value does not depend on an order",
    "rounding": "in fp64, rounded once to fp32",
    "functions": "softplus and log1p of torch in fp64",
    "gradient_rtol": 1e-4,
}
MODULES = ("SlicedPeak",)


def forward(module: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """Rows in, rows out."""
    product = functional.softplus(gate.contiguous().double()) * up.double()
    peak = product.abs().amax(-1, keepdim=True).clamp(min=1e-3)
    return (product / peak * torch.log1p(peak)).float()
