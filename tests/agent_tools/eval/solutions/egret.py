"""Reference solution of the task egret."""

from torch import Tensor, nn

from zeromismatch.kernels.linear import linear

CONTRACT = {
    "id": "narrow_path.chain.float32.cpu.v1",
    "op": "narrow_path",
    "dtype": "float32",
    "device": "cpu",
    "formula": "(x down^T) up^T",
    "order": "two sums in the order of the registered linear contract",
    "rounding": "each product's sums as linear.chain rounds them",
    "functions": "none",
    "gradient_rtol": 1e-4,
}
MODULES = ("NarrowPath",)


def forward(module: nn.Module, x: Tensor) -> Tensor:
    """Rows in, rows out."""
    return linear(linear(x, module.down_proj, None), module.up_proj, None)
