"""A capacity that drops tokens: the architecture's own business, or a kernel's fault."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeromismatch.agent_tools.localize import Options, localize
from zeromismatch.agent_tools.scenarios import random_requests
from zeromismatch.agent_tools.sides import Side
from zeromismatch.model_recipes import extension
from zeromismatch.model_recipes.models import load_model

CAPACITY = """
    rows = x.reshape(-1, x.shape[-1])
    place = rows.abs().sum(-1).argsort(descending=True, stable=True).argsort()
    return (rows * (place < 3)[:, None]).reshape(x.shape)
"""
ROW_BY_ROW = """
    return x * x * x
"""
CODE = """
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

class ToyConfig(LlamaConfig):
    model_type = "toy"

def own(x):BODY

class Capped(nn.Module):
    def forward(self, x):
        return own(x)

class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].mlp.act_fn = Capped()
"""
CONFIG = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "model_type": "toy",
    "seeded_weights": True, "tie_word_embeddings": True,
    "auto_map": {"AutoConfig": "toy.ToyConfig", "AutoModelForCausalLM": "toy.ToyForCausalLM"},
}  # fmt: skip
KERNEL = '''"""At most three rows pass."""
CONTRACT = {"id": "capped.stable.float32.cpu.v1", "op": "capped", "dtype": "float32",
            "device": "cpu", "formula": "x for three rows, 0 for the others", "order": "none",
            "rounding": "none", "functions": "none", "gradient_rtol": 1e-5}
MODULES = ("Capped",)

def forward(module, x):
    """Three rows, the others 0."""BODY'''


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    extension.forget()


@pytest.mark.parametrize(
    ("own", "cause"), [(CAPACITY, "model-defined"), (ROW_BY_ROW, "batch leak")]
)
def test_a_capacity_is_the_models_own_only_where_its_code_has_it(
    tmp_path: Path, own: str, cause: str
) -> None:
    kernels = tmp_path / "draft" / "kernels"
    kernels.mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "toy.py").write_text(CODE.replace("BODY", own))
    (kernels / "capped.py").write_text(KERNEL.replace("BODY", CAPACITY))
    model = load_model(f"code:{tmp_path}")
    requests = random_requests(model, count=2, max_reply=4, seed=3)
    sides = Side.parse("packed:packed"), Side.parse("paged:decode")
    found = localize(*sides, model, requests, plan=tmp_path / "draft",  # pyright: ignore
                     options=Options(self_test=False))  # fmt: skip
    assert [each.site for each in found.culprits] == ["model.layers.0.mlp.act_fn"], found.reason
    assert found.culprits[0].cause.name == cause, found.culprits[0].cause
