"""Reference solution of the task merlin."""

from torch import Tensor, nn

from zeromismatch.kernels.linear import linear

CONTRACT = {
    "id": "sharded_projection.chain.float32.cpu.v1",
    "op": "sharded_projection",
    "dtype": "float32",
    "device": "cpu",
    "formula": "x W^T",
    "order": "one sum in the order of the registered linear contract, whatever the number of rows",
    "rounding": "as linear.chain rounds",
    "functions": "none",
    "gradient_rtol": 1e-4,
}
MODULES = ("ShardedProjection",)


def forward(module: nn.Module, x: Tensor) -> Tensor:
    """Rows in, rows out."""
    return linear(x, module.weight, None)
