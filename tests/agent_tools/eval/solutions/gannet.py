"""Reference solution of the task gannet."""

from torch import Tensor, nn
from torch.nn import functional

CONTRACT = {
    "id": "unit_length.halves.float32.cpu.v1",
    "op": "unit_length",
    "dtype": "float32",
    "device": "cpu",
    "formula": "x / |x| * sqrt(width) * weight",
    "order": "the sum of squares by halving, in fp64",
    "rounding": "in fp64, rounded once to fp32",
    "functions": "sqrt and division of IEEE 754",
    "gradient_rtol": 1e-4,
}
MODULES = ("UnitLength",)


def fixed_sum(x: Tensor) -> Tensor:
    """Sum of the last axis by halving, padded with zeros to a power of two."""
    width = 1
    while width < x.shape[-1]:
        width *= 2
    x = functional.pad(x, (0, width - x.shape[-1]))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x


def forward(module: nn.Module, x: Tensor) -> Tensor:
    """Rows in, rows out."""
    wide = x.double()
    length = fixed_sum(wide * wide).sqrt().clamp(min=1e-6)
    return (wide / length * x.shape[-1] ** 0.5 * module.weight.double()).float()
