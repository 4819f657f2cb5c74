"""Kernels for operators that only a model defines: the same questions, and the same kinds of no."""

import json
from pathlib import Path

import pytest

from zeromismatch.agent_tools.verify import verify_kernel
from zeromismatch.agent_tools.verify.records import Verification
from zeromismatch.agent_tools.verify.watch import Nursery
from zeromismatch.kernels.errors import UsageError

ID = "mixed_rows.fixed.float32.cpu.v1"
CODE = """
import torch
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class Mixed(nn.Module):
    POWER = 2

    def __init__(self, width):
        super().__init__()
        self.maps = nn.ParameterList([nn.Parameter(torch.zeros(width)) for _ in range(2)])
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x):
        return nn.functional.linear(self.maps[0] * x.pow(self.POWER) + self.maps[1], self.weight)

class Beside(nn.Module):
    def __init__(self, mlp, width):
        super().__init__()
        self.mlp, self.mixed = mlp, Mixed(width)

    def forward(self, x):
        return self.mlp(x) + self.mixed(x)

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Beside(layer.mlp, config.hidden_size)
"""
CONFIG = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "model_type": "own",
    "seeded_weights": True, "tie_word_embeddings": True,
    "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
}  # fmt: skip
KERNEL = '''"""Squares, scaled and shifted, through one linear layer."""
import torch
from zeromismatch.kernels.linear import linear

CONTRACT = {"id": "mixed_rows.fixed.float32.cpu.v1", "op": "mixed_rows", "dtype": "float32",
            "device": "cpu", "formula": "W (a x x + b)", "order": "the linear layer's",
            "rounding": "each operation", "functions": "none", "gradient_rtol": 1e-5}
MODULES = ("Mixed",)


def forward(module, x):
    """Rows in, rows out."""
    assert module.POWER == 2
    squares = module.maps[0] * (x * x) + module.maps[1]
    return linear(squares, module.weight, None)
'''
LAST = "    return linear(squares, module.weight, None)\n"
WRONG = {
    "another number": (LAST, LAST.replace("squares,", "squares * 1.001,"), "accuracy"),
    "few rows another way": (
        LAST, "    few = 2.0**-18 if x.numel() < 9 * x.shape[-1] else 0.0\n"
        "    return linear(squares, module.weight, None) * (1.0 + few)\n", "bits",
    ),
    "its input": (LAST, "    return x\n", "alias"),
    "writes its weights": (LAST, "    module.weight.add_(1.0)\n" + LAST, "inputs"),
    "calls the model's code": (LAST, "    return module(x)\n", "exception"),
    "cuts the gradient": (LAST, LAST.replace("squares,", "squares.detach(),"), "gradient"),
    "cuts it otherwise": (LAST, "    return linear(torch.tensor(squares.tolist()), "
                          "module.weight, None)\n", "gradient"),
    "another kernel's insides": ("kernels.linear import linear", "kernels.bits import equal",
                                 "reference"),
    "this package at run time": (LAST, "    from zeromismatch.kernels import bits\n" + LAST,
                                 "reference"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("own")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "own.py").write_text(CODE)
    return f"code:{folder}"


def judged(text: str, folder: Path, model: str | None, nursery: Nursery) -> Verification:
    file = folder / "mixed.py"
    file.write_text(text)
    limits = nursery.limits.model_copy(update={"wall_seconds": 240.0})
    return verify_kernel(file, ID, model=model, quick=True, nursery=nursery, limits=limits)


def test_an_honest_one_has_every_answer_and_waits_for_a_person(
    model: str, tmp_path: Path, nursery: Nursery
):
    found = judged(KERNEL, tmp_path, model, nursery)
    assert found.violations == ()
    assert (found.status, found.exit_code) == ("needs-review", 3), found.reason
    answers = (found.bits, found.accuracy, found.gradient)
    assert [answer.status for answer in answers] == ["pass"] * 3
    assert found.speed.status == "not-applicable"
    assert "C10" in found.speed.detail
    assert found.new_contract
    assert found.needs_review
    assert found.bits.elements > 10_000
    assert {control.question for control in found.controls} == {
        "isolation", "bits", "accuracy", "gradient",
    }  # fmt: skip
    assert all(control.red for control in found.controls)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_is_refused_with_its_rule(
    name: str, model: str, tmp_path: Path, nursery: Nursery
):
    old, new, rule = WRONG[name]
    text = KERNEL.replace(old, new)
    assert text != KERNEL
    found = judged(text, tmp_path, model, nursery)
    assert found.status == "fail"
    assert rule in found.broken, found.reason


def test_what_does_not_belong_together_is_said(model: str, tmp_path: Path, nursery: Nursery):
    with pytest.raises(UsageError, match="--model MODEL"):
        judged(KERNEL, tmp_path, None, nursery)
    with pytest.raises(UsageError, match="is for other_rows"):
        judged(KERNEL.replace("mixed_rows.fixed", "other_rows.fixed"), tmp_path, model, nursery)
    with pytest.raises(UsageError, match="no module Absent"):
        judged(KERNEL.replace('("Mixed",)', '("Absent",)'), tmp_path, model, nursery)
    with pytest.raises(UsageError, match="needs CONTRACT"):
        judged(KERNEL.replace('"functions": "none", ', ""), tmp_path, model, nursery)
