"""Kernels that a recipe brings for operators of the package: checked, built, proved, served."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zeromismatch
from zeromismatch.kernels import bits, contract, dispatch, rmsnorm
from zeromismatch.kernels.errors import CapabilityError, RecipeError
from zeromismatch.model_recipes import native, own_kernels
from zeromismatch.model_recipes.extension import load_extension
from zeromismatch.model_recipes.models import load_model
from zeromismatch.model_recipes.own_kernels import is_registered, serve_own_kernel
from zeromismatch.model_recipes.plan import aligned_plan, plan_from
from zeromismatch.model_recipes.schema import Recipe, RecipeKernel, file_digest, save_recipe

NORM = "rmsnorm.lanes16.float32.cpu.v1"
GRADIENT = "rmsnorm_grad.lanes16.float32.cpu.v1"
CANDIDATE = Path(__file__).parents[1] / "agent_tools" / "verify" / "candidates" / "norm.py"
ADDED = "weight[c] : weight[c])"
"""The end of the line of the C++ that multiplies by the weight."""


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test offers is withdrawn after it; certificates and builds lie in its own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dispatch.forget()
    held = {name: list(found) for name, found in contract._IMPLEMENTATIONS.items()}
    yield
    for name, found in held.items():
        contract._IMPLEMENTATIONS[name][:] = found
    own_kernels._SERVED.clear()
    dispatch.forget()


def own_kernel(folder: Path, text: str, contract_id: str = NORM) -> RecipeKernel:
    """A recipe's entry for a kernel of this text."""
    file = folder / "kernels" / "norm.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return RecipeKernel(contract=contract_id, path="kernels/norm.py", digest=file_digest(file))


def only(name: str) -> None:
    """Withdraw all implementations of both contracts but one."""
    for found in (contract._IMPLEMENTATIONS[NORM], contract._IMPLEMENTATIONS[GRADIENT]):
        found[:] = [each for each in found if each.name == name]
    dispatch.forget()


def test_a_kernel_is_proved_and_serves(tmp_path: Path):
    x, weight = torch.randn(5, 360), torch.nn.Parameter(torch.randn(360))
    expected = rmsnorm.rmsnorm(x, weight, 1e-6)
    expected.sum().backward()
    gradient, weight.grad = weight.grad, None
    assert gradient is not None
    forward, backward = serve_own_kernel(tmp_path, own_kernel(tmp_path, CANDIDATE.read_text()))
    assert (forward.contract, backward.contract) == (NORM, GRADIENT)
    assert dispatch.admitted(forward.contract, forward.name)
    assert dispatch.admitted(backward.contract, backward.name)
    only(forward.name)
    assert dispatch.choose(NORM).run is forward.run
    found = rmsnorm.rmsnorm(x, weight, 1e-6)
    found.sum().backward()
    assert bits.equal(found.detach(), expected.detach())
    assert weight.grad is not None
    assert bits.equal(weight.grad, gradient)


def test_a_wrong_kernel_is_refused_by_dispatch(tmp_path: Path):
    text = CANDIDATE.read_text().replace(ADDED, ADDED.replace(": weight[c]", ": weight[c] * 2"))
    assert text != CANDIDATE.read_text()
    forward, _ = serve_own_kernel(tmp_path, own_kernel(tmp_path, text))
    with pytest.warns(RuntimeWarning, match=f"{forward.name} may not serve {NORM}"):
        assert dispatch.choose(NORM).name != forward.name


def test_it_is_compiled_and_offered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = own_kernel(tmp_path, CANDIDATE.read_text())
    first = serve_own_kernel(tmp_path, own)
    assert serve_own_kernel(tmp_path, own) == first
    (library,) = (tmp_path / "cache" / "zero-mismatch" / "native").iterdir()
    assert library.suffix == ".so"
    for each in first:
        contract._IMPLEMENTATIONS[each.contract].remove(each)
    monkeypatch.setattr(own_kernels, "command", lambda library, text: ["false"])
    again = serve_own_kernel(tmp_path, own)  # another process: the build is there
    assert [each.name for each in again] == [each.name for each in first]


def test_another_file_is_another_implementation(tmp_path: Path):
    text = CANDIDATE.read_text()
    first = serve_own_kernel(tmp_path, own_kernel(tmp_path, text))[0]
    other = serve_own_kernel(tmp_path, own_kernel(tmp_path, text + "\n"))[0]
    assert first.name != other.name  # so that no certificate of one admits the other


def test_a_wrong_digest_is_refused_before_anything_runs(tmp_path: Path):
    own = own_kernel(tmp_path, CANDIDATE.read_text())
    (tmp_path / own.path).write_text("this is no Python")
    with pytest.raises(RecipeError, match=r"has digest .* the recipe certifies .*; restore"):
        serve_own_kernel(tmp_path, own)
    (tmp_path / own.path).unlink()
    with pytest.raises(RecipeError, match="cannot be read"):
        serve_own_kernel(tmp_path, own)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("def backward(", "def backwards(", "entry: does not define backward"),
        ("import torch\n", "import torch, os\n", "process: imports os"),
        ("#include <cmath>", "#include <unistd.h>", "native: C"),
        ("float *s, int64_t rows", "float *s, int65_t rows", "does not compile: .*int65_t"),
        ("import torch\n", "import torch\n(", "syntax: does not parse"),
    ],
)
def test_a_file_that_cannot_serve_is_said(tmp_path: Path, old: str, new: str, words: str):
    text = CANDIDATE.read_text().replace(old, new)
    assert text != CANDIDATE.read_text()
    before = contract.implementations(NORM)
    with pytest.raises(RecipeError, match=words) as raised:
        serve_own_kernel(tmp_path, own_kernel(tmp_path, text))
    assert "zm verify" in str(raised.value)
    assert contract.implementations(NORM) == before


def test_bits_of_its_own_need_a_contract_of_their_own(tmp_path: Path):
    own = own_kernel(tmp_path, CANDIDATE.read_text(), "rmsnorm.other.float32.cpu.v1")
    assert not is_registered(own.contract)
    with pytest.raises(RecipeError, match="needs CONTRACT"):
        load_extension(tmp_path / own.path)


def test_a_missing_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own_kernels._circumstances.cache_clear()
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(CapabilityError, match="install one"):
        serve_own_kernel(tmp_path, own_kernel(tmp_path, CANDIDATE.read_text()))


def test_an_operator_of_a_recipe_is_none_of_the_package():
    assert is_registered(NORM)
    assert not is_registered("cubed.ieee.float32.cpu.v1")
    mine = contract.Contract(
        id="quartic.ieee.float32.cpu.v1", op="quartic", dtype="float32", device="cpu", formula="",
        order="", rounding="", functions="", reference="elsewhere:forward", gradient_rtol=0.0,
    )  # fmt: skip
    try:
        contract.register_contract(mine)
        assert not is_registered(mine.id)
    finally:
        del contract._CONTRACTS[mine.id], contract._IMPLEMENTATIONS[mine.id]


def test_a_recipe_is_served_by_its_kernel(tmp_path: Path):
    model = load_model("tiny:qwen3")
    own = own_kernel(tmp_path, CANDIDATE.read_text())
    plan = aligned_plan(model.dtype, model.device)
    recipe = Recipe(
        name="r", model=model.identity, plan=plan, dtype="float32", device="cpu", kernels=(own,)
    )
    save_recipe(recipe, tmp_path)
    with pytest.raises(RecipeError, match="give the recipe's folder"):
        plan_from(recipe, (), model.dtype, model.device, model.identity)
    instrument = zeromismatch.apply(model.module, tmp_path)
    try:
        assert {s.contract for s in instrument.sites if s.op_class == "rmsnorm"} == {NORM}
    finally:
        instrument.remove()
    offered = [each.name for each in contract.implementations(NORM)]
    assert sum(name.startswith("recipe-norm-") for name in offered) == 1
