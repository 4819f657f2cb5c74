"""Reference solution of the task heron."""

from torch import Tensor, nn

CONTRACT = {
    "id": "squared_rectifier.ieee.float32.cpu.v1",
    "op": "squared_rectifier",
    "dtype": "float32",
    "device": "cpu",
    "formula": "max(x, 0) * max(x, 0)",
    "order": "none: one element at a time",
    "rounding": "one product, rounded once",
    "functions": "none",
    "gradient_rtol": 1e-4,
}
MODULES = ("SquaredRectifier",)


def forward(module: nn.Module, x: Tensor) -> Tensor:
    """Rows in, rows out."""
    kept = x.clamp(min=0.0)
    return kept * kept
