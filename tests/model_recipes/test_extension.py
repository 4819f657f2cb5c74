"""Kernels that a recipe brings, and models whose code comes with them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zeromismatch.kernels.errors import CheckpointError, RecipeError, UncoveredSiteError
from zeromismatch.model_recipes import extension
from zeromismatch.model_recipes.apply import apply_plan, find_sites
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.plan import load_own_kernels, plan_from

CODE = """
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

class ToyConfig(LlamaConfig):
    model_type = "toy"

class Cubed(nn.Module):
    def forward(self, x):
        return x.pow(3)

class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = Cubed()
"""
CONFIG = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "model_type": "toy",
    "seeded_weights": True, "tie_word_embeddings": True,
    "auto_map": {"AutoConfig": "toy.ToyConfig", "AutoModelForCausalLM": "toy.ToyForCausalLM"},
}  # fmt: skip
KERNEL = '''"""Three factors, in order."""
CONTRACT = {"id": "cubed.ieee.float32.cpu.v1", "op": "cubed", "dtype": "float32", "device": "cpu",
            "formula": "x * x * x", "order": "left to right", "rounding": "each product",
            "functions": "none", "gradient_rtol": 1e-5}
MODULES = ("Cubed",)

def forward(module, x):
    """x cubed."""
    return x * x * x
'''


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "toy.py").write_text(CODE)
    (tmp_path / "draft" / "kernels").mkdir(parents=True)
    (tmp_path / "draft" / "kernels" / "cubed.py").write_text(KERNEL)
    yield tmp_path
    extension.forget()


def test_code_runs_only_when_asked_for(folder: Path):
    with pytest.raises(CheckpointError, match="auto_map"):
        load_model(str(folder))
    model = load_model(f"code:{folder}")
    assert model.config.model_type == "toy"
    assert model.weights_root == load_model(f"code:{folder}").weights_root
    other = load_model(f"code:{folder}", seed=1)
    assert model.weights_root != other.weights_root


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", "{}", "auto_map"),
        ("config.json", "no json", "not JSON"),
        ("config.json", json.dumps({**CONFIG, "auto_map": {}}), "auto_map names None"),
        ("config.json", json.dumps({**CONFIG, "auto_map": {
            "AutoConfig": "../x.A", "AutoModelForCausalLM": "toy.B"}}), "auto_map names"),
        ("config.json", json.dumps({**CONFIG, "seeded_weights": False}), "model.safetensors"),
        ("toy.py", "import nothing_like_this", "cannot be run"),
        ("toy.py", "x = 1", "defines no ToyConfig"),
    ],
)  # fmt: skip
def test_a_broken_code_folder_is_said(folder: Path, file: str, content: str, words: str):
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=words):
        load_model(f"code:{folder}")


def test_an_operator_without_a_kernel_is_named_until_a_draft_brings_one(folder: Path):
    model = load_model(f"code:{folder}")
    with pytest.raises(UncoveredSiteError, match="pow"):
        find_sites(model.module)
    load_own_kernels(folder / "draft")
    sites = find_sites(model.module)
    assert sum(site.op_class == "cubed" for site in sites) == 2
    plan = plan_from(folder / "draft", sites, model.dtype, model.device)
    assert plan.rules["cubed"] == "cubed.ieee.float32.cpu.v1"
    assert plan_from("stock", sites, model.dtype, model.device).rules["cubed"] == "stock"


def test_a_new_draft_takes_the_place_of_the_old_one(folder: Path):
    file = folder / "draft" / "kernels" / "cubed.py"
    first = extension.load_extension(file)
    assert extension.load_extension(file) is first
    file.write_text(KERNEL.replace("x * x * x\n", "x * (x * x)\n"))
    second = extension.load_extension(file)
    assert second.digest != first.digest
    module = torch.nn.Module()
    assert second.forward(module, torch.tensor(2.0)) == 8.0


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (("    return", "    import os\n    return"), "process: imports os"),
        (("x * x * x\n", "eval('x')\n"), "code: uses eval"),
        (("x * x * x\n", "x.__class__\n"), "reflection: reaches for .__class__"),
        (("x * x * x\n", "x.detach()\n"), "gradient: uses x.detach"),
        (("x * x * x\n", "open('f')\n"), "file: uses open"),
        (("    return", "    module.seen = x\n    return"), "patch: assigns to module.seen"),
        (("    return", "    global K\n    return"), "state: declares K global"),
        (("MODULES", "class A: pass\nMODULES"), "deferred: defines class A"),
        (("MODULES", "from zeromismatch.kernels import bits\nMODULES"), "reference: imports zero"),
        (("MODULES", "import zeromismatch.kernels.bits\nMODULES"), "reference: imports zero"),
        (('"""Three factors, in order."""', ""), "docstring"),
        (("return x", "return (x"), "syntax: does not parse"),
        (("cubed.ieee", "linear.ieee"), "must be <op>"),
        (('"op": "cubed"', '"op": "linear"'), "must be <op>"),
        (('("Cubed",)', "()"), "needs MODULES"),
        (('"rounding": "each product",', ""), "needs CONTRACT"),
    ],
)  # fmt: skip
def test_a_kernel_that_reaches_further_is_refused(folder: Path, change: tuple[str, str], rule: str):
    file = folder / "draft" / "kernels" / "cubed.py"
    text = KERNEL.replace(*change)
    assert text != KERNEL
    file.write_text(text)
    with pytest.raises(RecipeError, match=rule.replace("(", r"\(")):
        extension.load_extension(file)


NORM = '''"""A norm whose mean of squares is taken in fp64."""
import torch

CONTRACT = {"id": "rmsnorm.fp64.float32.cpu.v1", "op": "rmsnorm", "dtype": "float32",
            "device": "cpu", "formula": "x w / sqrt(mean(x^2) + eps)", "order": "as torch's",
            "rounding": "once", "functions": "none", "gradient_rtol": 1e-5}
MODULES = ("LlamaRMSNorm",)

def forward(module, x):
    """Rows in, rows out."""
    wide = x.double()
    mean = (wide * wide).mean(-1, keepdim=True)
    return (wide / torch.sqrt(mean + module.variance_epsilon) * module.weight).float()
'''


def test_a_known_operator_may_get_other_bits_under_a_new_id(folder: Path):
    file = folder / "draft" / "kernels" / "norm.py"
    file.write_text(NORM)
    model = load_model(f"code:{folder}")
    load_own_kernels(folder / "draft")
    sites = find_sites(model.module)
    plan = plan_from(folder / "draft", sites, model.dtype, model.device)
    assert plan.rules["rmsnorm"] == "rmsnorm.fp64.float32.cpu.v1"
    applied = apply_plan(model.module, plan)
    served = {site.contract for site in applied.sites if site.op_class == "rmsnorm"}
    applied.remove()
    assert served == {"rmsnorm.fp64.float32.cpu.v1"}
    package = plan_from("stock", sites, model.dtype, model.device).model_copy(
        update={"rules": {**plan.rules, "rmsnorm": "rmsnorm.lanes16.float32.cpu.v1"}}
    )
    with pytest.raises(RecipeError, match="does not serve rmsnorm"):
        plan_from(package, sites, model.dtype, model.device)
    file.write_text(NORM.replace("LlamaRMSNorm", "OtherNorm"))
    load_own_kernels(folder / "draft")
    with pytest.raises(UncoveredSiteError, match="names in MODULES"):
        apply_plan(model.module, plan)


def test_a_registered_id_is_never_taken(folder: Path):
    file = folder / "draft" / "kernels" / "cubed.py"
    file.write_text(NORM.replace("rmsnorm.fp64", "rmsnorm.lanes16"))
    with pytest.raises(RecipeError, match="new: other bits"):
        extension.load_extension(file)


def test_a_draft_names_what_each_of_its_files_is_for(folder: Path):
    (folder / "draft" / "kernels" / "lost.py").write_text('"""Nothing."""\n')
    with pytest.raises(RecipeError, match="CONTRACT and MODULES nor SERVES"):
        load_own_kernels(folder / "draft")
    lost = folder / "draft" / "kernels" / "lost.py"
    lost.write_text('"""A."""\nSERVES = "absent.x.float32.cpu.v1"\n')
    with pytest.raises(RecipeError, match="no registered contract"):
        load_own_kernels(folder / "draft")
