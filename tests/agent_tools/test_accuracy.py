"""The fp64 reference stays in fp64 where a model's own code casts to fp32."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from zeromismatch.agent_tools.accuracy import in_fp64


class Angles(nn.Module):
    """Rotary angles as transformers writes them: a product of frequencies and cast positions."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.register_buffer("frequencies", torch.tensor([[1.0], [0.1], [0.01]]))

    def forward(self, positions: Tensor) -> Tensor:
        """[1, T] integers to [T, 3] angles."""
        return (self.frequencies.float() @ positions.float()).t()


def test_a_product_of_frequencies_and_cast_positions_is_in_fp64():
    module = Angles()
    angles = in_fp64(module)(torch.tensor([[1, 7]]))
    assert angles.dtype == torch.float64
    assert module(torch.tensor([[1, 7]])).dtype == torch.float32
    assert angles[1].tolist() == [7.0 * each for each in module.frequencies.double()[:, 0].tolist()]
