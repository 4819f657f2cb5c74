"""Reference solution of the task lapwing."""

import torch
from torch import Tensor, nn

CONTRACT = {
    "id": "steep_gate.fp64.float32.cpu.v1",
    "op": "steep_gate",
    "dtype": "float32",
    "device": "cpu",
    "formula": "x / (1 + exp(-steepness x))",
    "order": "none: one element at a time",
    "rounding": "in fp64, rounded once to fp32",
    "functions": "exp of torch in fp64",
    "gradient_rtol": 1e-4,
}
MODULES = ("SteepGate",)


def forward(module: nn.Module, x: Tensor) -> Tensor:
    """Rows in, rows out."""
    wide = x.contiguous().double()
    return (wide / (1.0 + torch.exp(-(wide * module.steepness.double())))).float()
