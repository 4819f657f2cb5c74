"""Counting differing sites per layer and token."""

from pathlib import Path

import pytest

from zeromismatch.agent_tools.heat import row_name, stored_heat_map
from zeromismatch.agent_tools.localize import Options, localize
from zeromismatch.agent_tools.scenarios import default_requests
from zeromismatch.agent_tools.sides import Side
from zeromismatch.model_recipes.models import load_model


@pytest.mark.parametrize(
    ("site", "name"),
    [
        ("model.layers.3.mlp#gated", "layer 3"),
        ("model.layers.12#add_0", "layer 12"),
        ("model.embed_tokens", "embed_tokens"),
        ("lm_head", "lm_head"),
    ],
)
def test_a_row_is_a_layer_or_a_module_outside_the_layers(site: str, name: str):
    assert row_name(site) == name


def test_cells_add_up_to_the_rows_that_differ(tmp_path: Path):
    model = load_model("tiny:llama")
    requests = default_requests(model, count=2, max_reply=8)
    sides = Side.parse("transformers:decode"), Side.parse("transformers:alone")
    found = localize(
        *sides, model, requests, options=Options(out=tmp_path, causes=False, self_test=False)
    )
    heat = stored_heat_map(tmp_path)
    assert found.coverage
    assert sum(max(cell, 0) for row in heat.cells for cell in row) == found.coverage.differing_rows
    assert {"embed_tokens", "layer 0", "layer 1", "lm_head"} <= set(heat.rows)
    assert [count for _, count in heat.spans] == [len(request.tokens) for request in requests]
