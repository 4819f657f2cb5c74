"""Reference solution of the task bittern."""

import torch
from torch import Tensor, nn

CONTRACT = {
    "id": "normal_gate.fp64.float32.cpu.v1",
    "op": "normal_gate",
    "dtype": "float32",
    "device": "cpu",
    "formula": "x/2 (1 + erf(x / sqrt 2))",
    "order": "none: one element at a time",
    "rounding": "in fp64, rounded once to fp32",
    "functions": "erf of torch in fp64",
    "gradient_rtol": 1e-4,
}
MODULES = ("NormalGate",)


def forward(module: nn.Module, x: Tensor) -> Tensor:
    """Rows in, rows out."""
    wide = x.contiguous().double()
    return (0.5 * wide * (1.0 + torch.erf(wide * 2.0**-0.5))).float()
