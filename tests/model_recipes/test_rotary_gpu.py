"""Rotary tables inside a captured graph: nothing asks the device how long they must be."""

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.rotary_table import RotaryTable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_a_table_that_was_there_before_serves_every_replay():
    module = load_model("tiny:qwen3", dtype="float32", device="cuda").module
    table = RotaryTable(module.get_submodule("model.rotary_emb"), "model.rotary_emb")
    x, positions = torch.zeros(1, device="cuda"), torch.tensor([[5, 40]], device="cuda")
    table(x, torch.tensor([[99]], device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cos, sin = table(x, positions)
    positions.copy_(torch.tensor([[99, 7]]))
    graph.replay()
    for captured, eager in zip((cos, sin), table(x, positions), strict=True):
        assert bits.equal(captured, eager)
