"""Reference solution of the task curlew."""

from torch import Tensor, nn
from torch.nn import functional

CONTRACT = {
    "id": "centred_norm.halves.float32.cpu.v1",
    "op": "centred_norm",
    "dtype": "float32",
    "device": "cpu",
    "formula": "(x - mean) / sqrt(var + eps) * weight + shift",
    "order": "sums by halving over the width padded to a power of two, in fp64",
    "rounding": "in fp64, rounded once to fp32",
    "functions": "sqrt and division of IEEE 754",
    "gradient_rtol": 1e-4,
}
MODULES = ("CentredNorm",)


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
    centred = wide - fixed_sum(wide) / x.shape[-1]
    variance = fixed_sum(centred * centred) / x.shape[-1]
    unit = centred / (variance + module.eps).sqrt()
    return (unit * module.weight.double() + module.shift.double()).float()
