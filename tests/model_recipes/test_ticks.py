"""A contract that only a recipe knows serves nobody until a person has ticked it."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeromismatch.agent_tools.cli import run
from zeromismatch.agent_tools.gates import run_gates
from zeromismatch.agent_tools.patch.policy import denied
from zeromismatch.kernels.errors import RecipeError, UsageError
from zeromismatch.model_recipes import extension, ticks
from zeromismatch.model_recipes.apply import apply
from zeromismatch.model_recipes.models import LoadedModel, load_model
from zeromismatch.model_recipes.plan import aligned_plan, load_own_kernels
from zeromismatch.model_recipes.schema import (
    Recipe,
    RecipeKernel,
    file_digest,
    load_recipe,
    save_recipe,
)

ID = "rmsnorm.fp64.float32.cpu.v1"
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


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("tiny:llama")


@pytest.fixture
def recipe(tmp_path: Path, model: LoadedModel) -> Iterator[Path]:
    """A recipe with other bits for a known operator."""
    folder = tmp_path / "recipe"
    (folder / "kernels").mkdir(parents=True)
    write(folder, model, NORM)
    yield folder
    extension.forget()


def write(folder: Path, model: LoadedModel, text: str) -> None:
    (folder / "kernels" / "norm.py").write_text(text)
    own = RecipeKernel(
        contract=ID, path="kernels/norm.py", digest=file_digest(folder / "kernels" / "norm.py")
    )
    plan = aligned_plan(model.dtype, model.device)
    plan = plan.model_copy(update={"rules": {**plan.rules, "rmsnorm": ID}})
    save_recipe(
        Recipe(name="r", model=model.identity, plan=plan, dtype="float32", device="cpu",
               kernels=(own,)),
        folder,
    )  # fmt: skip


def test_gates_and_apply_refuse_it_and_say_how_a_person_ticks(recipe: Path, model: LoadedModel):
    for use in (
        lambda: run_gates(model, str(recipe), only=["C3"], quick=True),
        lambda: apply(model.module, recipe),
        lambda: load_own_kernels(recipe),
    ):
        with pytest.raises(RecipeError, match=f"person's tick.*zm recipe tick .* {ID}"):
            use()
    assert extension.op_classes() == ()
    load_own_kernels(recipe, judging=True)
    assert extension.own_contracts() == {ID}


def test_after_the_tick_it_serves_this_file_and_no_other(recipe: Path, model: LoadedModel):
    made = ticks.tick(recipe, ID, by="Ada")
    assert ticks.read_ticks(recipe) == (made,)
    assert made.digest == file_digest(recipe / "kernels" / "norm.py")
    applied = apply(model.module, recipe)
    assert {site.contract for site in applied.sites if site.op_class == "rmsnorm"} == {ID}
    applied.remove()
    with pytest.raises(UsageError, match="waiting: none"):
        ticks.tick(recipe, ID)
    write(recipe, model, NORM.replace("torch.sqrt", "torch.pow(1.0, 1.0) * torch.sqrt"))
    with pytest.raises(RecipeError, match="waits for a person"):
        load_own_kernels(recipe)
    assert ticks.unticked(load_recipe(recipe), recipe)
    (recipe / ticks.FILE).write_text("- {contract: x}")
    with pytest.raises(RecipeError, match="holds no ticks"):
        load_own_kernels(recipe)


def test_no_patch_may_tick():
    assert denied("model_recipes/org/model/ticks.yaml") == "a person ticks contracts, no patch does"


def test_a_tick_needs_a_person_at_a_terminal(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert run(["recipe", "tick", str(recipe), ID]) == 2
    assert "at a terminal" in capsys.readouterr().err
    assert run(["patch", "apply", str(recipe), "--gates", str(recipe), "--reviewed", ID]) == 2
    assert "at a terminal" in capsys.readouterr().err
    assert not (recipe / ticks.FILE).exists()
    for typed, code in (("yes", 2), (ID, 0)):
        assert at_terminal(recipe, typed) == code, typed
    assert [each.contract for each in ticks.read_ticks(recipe)] == [ID]


def at_terminal(recipe: Path, typed: str) -> int:
    """Exit code of the command where somebody types."""
    theirs, ours = pty.openpty()
    program = "import sys; from zeromismatch.agent_tools.cli import main; main()"
    words = [sys.executable, "-c", program, "recipe", "tick", str(recipe), ID]
    process = subprocess.Popen(words, stdin=ours, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    os.close(ours)
    try:
        os.write(theirs, f"{typed}\n".encode())
        return process.wait(timeout=60)
    finally:
        process.kill()
        os.close(theirs)
