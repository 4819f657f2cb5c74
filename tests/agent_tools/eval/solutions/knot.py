"""Reference solution of the task knot."""

import torch
from torch import Tensor, nn

from zeromismatch.kernels.linear import linear

CONTRACT = {
    "id": "soft_mix.slots.float32.cpu.v1",
    "op": "soft_mix",
    "dtype": "float32",
    "device": "cpu",
    "formula": "sum over e of softmax(x router^T)[e] * x maps[e]^T",
    "order": "each product by the registered linear contract, then experts 0, 1, 2, 3",
    "rounding": "one rounding per product and sum; the softmax in fp64",
    "functions": "exp of torch in fp64",
    "gradient_rtol": 1e-4,
}
MODULES = ("SoftMix",)


def forward(module: nn.Module, x: Tensor) -> Tensor:
    """Rows in, rows out."""
    scores = linear(x, module.router, None).double()
    raised = torch.exp((scores - scores.amax(-1, keepdim=True)).contiguous())
    total = raised[..., 0:1] + raised[..., 1:2] + raised[..., 2:3] + raised[..., 3:4]
    share = (raised / total).float()
    mixed = share[..., 0:1] * linear(x, module.maps[0], None)
    for slot in range(1, 4):
        mixed = mixed + share[..., slot : slot + 1] * linear(x, module.maps[slot], None)
    return mixed
