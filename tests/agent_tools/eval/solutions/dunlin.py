"""Reference solution of the task dunlin."""

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTRACT = {
    "id": "shared_groups.halves.float32.cpu.v1",
    "op": "shared_groups",
    "dtype": "float32",
    "device": "cpu",
    "formula": "groups * softmax(mean of each group) * number of groups",
    "order": "means and the softmax's sum by halving, in fp64",
    "rounding": "in fp64, rounded once to fp32",
    "functions": "exp of torch in fp64",
    "gradient_rtol": 1e-4,
}
MODULES = ("SharedGroups",)


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
    groups = x.double().unflatten(-1, (module.GROUPS, -1))
    mean = (fixed_sum(groups) / groups.shape[-1])[..., 0]
    raised = torch.exp((mean - mean.amax(-1, keepdim=True)).contiguous())
    share = raised / fixed_sum(raised)
    return (groups * share[..., None] * module.GROUPS).flatten(-2).float()
