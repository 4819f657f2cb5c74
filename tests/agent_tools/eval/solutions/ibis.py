"""Reference solution of the task ibis."""

from torch import Tensor, nn
from torch.nn import functional

CONTRACT = {
    "id": "group_rms.halves.float32.cpu.v1",
    "op": "group_rms",
    "dtype": "float32",
    "device": "cpu",
    "formula": "x / sqrt(mean of squares in groups of 40 + 1e-5) * weight",
    "order": "the sum of squares by halving, in fp64",
    "rounding": "in fp64, rounded once to fp32",
    "functions": "sqrt and division of IEEE 754",
    "gradient_rtol": 1e-4,
}
MODULES = ("ByGroups",)


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
    groups = x.double().unflatten(-1, (-1, 40))
    mean = fixed_sum(groups * groups) / 40
    unit = (groups / (mean + 1e-5).sqrt()).flatten(-2)
    return (unit * module.weight.double()).float()
