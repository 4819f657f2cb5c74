"""Reference solution of the task jacana."""

import torch
from torch import Tensor, nn

CONTRACT = {
    "id": "saturating.fp64.float32.cpu.v1",
    "op": "saturating",
    "dtype": "float32",
    "device": "cpu",
    "formula": "tanh(slope x) * weight + shift",
    "order": "none: one element at a time",
    "rounding": "in fp64, rounded once to fp32",
    "functions": "tanh of torch in fp64",
    "gradient_rtol": 1e-4,
}
MODULES = ("Saturating",)


def forward(module: nn.Module, x: Tensor) -> Tensor:
    """Rows in, rows out."""
    wide = x.contiguous().double() * module.slope.double()
    return (torch.tanh(wide) * module.weight.double() + module.shift.double()).float()
