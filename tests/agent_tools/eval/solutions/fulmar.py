"""Reference solution of the task fulmar."""

import torch
from torch import Tensor, nn

CONTRACT = {
    "id": "logistic_gate.fp64.float32.cpu.v1",
    "op": "logistic_gate",
    "dtype": "float32",
    "device": "cpu",
    "formula": "x / (1 + exp(-(x slope + offset)))",
    "order": "none: one element at a time",
    "rounding": "in fp64, rounded once to fp32",
    "functions": "exp of torch in fp64",
    "gradient_rtol": 1e-4,
}
MODULES = ("LogisticGate",)


def forward(module: nn.Module, x: Tensor) -> Tensor:
    """Rows in, rows out."""
    wide = x.contiguous().double()
    slope = -(wide * module.slope.double() + module.offset.double())
    return (wide / (1.0 + torch.exp(slope))).float()
