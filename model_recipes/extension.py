"""Operators that a recipe brings: a class of modules that no kernel of this package knows.

A kernel file in a recipe's folder (``kernels/<name>.py``) says which modules it serves, what its
number is, and computes it, forward and backward through torch's autograd:

    CONTRACT = {"id": "tilt.fixed.float32.cpu.v1", "op": "tilt", "dtype": "float32",
                "device": "cpu", "formula": "...", "order": "...", "rounding": "...",
                "functions": "...", "gradient_rtol": 1e-5}
    MODULES = ("Tilt",)                  # names of module classes

    def forward(module, x):              # as the module's own forward: rows in, rows out
        ...

From then on ``tilt`` is an operator class: plans have a rule for it, its sites are traced, grafted
and gated like all others. Under ``stock`` the module's own code runs. A draft (a folder with
``kernels/`` and no ``recipe.yaml`` yet) is loaded the same way, under the aligned plan.

The file is read before it is run, by the rules of ``zm verify`` (:mod:`.candidate`): necessary and
never sufficient. ``zm verify FILE --contract ID --model MODEL`` judges it in a confined process.

A known operator may get other bits in the same way: a new contract id for it (``rmsnorm.mine...``)
and the modules that it serves. Whatever a person has not ticked (:mod:`.ticks`) serves in a draft
and nowhere else.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.contract import Contract, register_contract
from ..kernels.errors import ContractError, RecipeError
from .candidate import OWN_ENTRIES, check, parse_candidate
from .file_module import file_module

FOLDER = "kernels"
MODULE_PREFIX = "zeromismatch_recipe_kernel_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """One operator class with its contract. modules: class names it serves. digest: of the file."""

    op_class: str
    contract: Contract
    modules: tuple[str, ...]
    forward: Callable[..., Any]
    digest: str


_LOADED: dict[str, Extension] = {}


def op_classes() -> tuple[str, ...]:
    """Operator classes that extensions brought."""
    return tuple(_LOADED)


def own_contracts() -> frozenset[str]:
    """Contract ids that extensions serve in this process."""
    return frozenset(entry.contract.id for entry in _LOADED.values())


def contract_of(op_class: str, dtype: str, device: str) -> str | None:
    """The extension's contract for a class, where it serves this dtype and device."""
    found = _LOADED.get(op_class)
    if found is None or (found.contract.dtype, found.contract.device) != (dtype, device):
        return None
    return found.contract.id


def extension_for(module: nn.Module) -> Extension | None:
    """The extension that serves a module, if one does."""
    name = type(module).__name__
    return next((entry for entry in _LOADED.values() if name in entry.modules), None)


def forget() -> None:
    """Drop all extensions of this process; contracts stay known by their ids."""
    _LOADED.clear()


def is_draft(folder: Path) -> bool:
    """A folder with kernels and without a recipe."""
    return (folder / FOLDER).is_dir() and not (folder / "recipe.yaml").exists()


def load_extension(path: Path) -> Extension:
    """Check and load one kernel file. RecipeError says what is wrong with it."""
    content = path.read_bytes()
    broken = check(parse_candidate(path, content), OWN_ENTRIES)
    if broken:
        told = "; ".join(f"{each.rule}: {each.detail}" for each in broken[:5])
        raise RecipeError(f"{path.name}: {told}; change the kernel")
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    module = _run(path, digest)
    contract = _contract(module, path)
    held = _LOADED.get(contract.op)
    if held is not None and held.digest == digest:
        return held
    modules, forward = getattr(module, "MODULES", None), getattr(module, "forward", None)
    if not isinstance(modules, tuple) or not modules or not callable(forward):
        raise RecipeError(
            f"{path.name} needs MODULES, a tuple of class names, and a function forward(module, x)"
        )
    found = Extension(
        op_class=contract.op, contract=contract, modules=modules, forward=forward, digest=digest
    )
    _LOADED[contract.op] = found
    return found


def _run(path: Path, digest: str) -> Any:
    try:
        return file_module(path, MODULE_PREFIX + digest)
    except (ArithmeticError, AttributeError, ImportError, LookupError, NameError, RuntimeError,
            TypeError, ValueError) as error:  # fmt: skip
        raise RecipeError(f"{path.name} cannot be loaded: {error}; correct it") from error


def _contract(module: Any, path: Path) -> Contract:
    from .own_kernels import is_registered

    fields: dict[str, Any] = getattr(module, "CONTRACT", None) or {}
    try:
        contract = Contract(**fields, reference=f"{module.__name__}:forward")
    except TypeError as error:
        raise RecipeError(
            f"{path.name} needs CONTRACT with id, op, dtype, device, formula, order, rounding, "
            f"functions and gradient_rtol ({error})"
        ) from error
    parts = contract.id.split(".")
    named = len(parts) >= 5 and (parts[0], *parts[-3:-1]) == (
        contract.op, contract.dtype, contract.device,
    )  # fmt: skip
    if not named or not parts[-1].removeprefix("v").isdigit() or is_registered(contract.id):
        raise RecipeError(
            f"{path.name}: contract {contract.id} must be <op>.<order>.<dtype>.<device>.v<n> and "
            "new: other bits get an id of their own"
        )
    try:
        return register_contract(contract)
    except ContractError:
        return contract  # an earlier draft of this process had the same id


def rows_call(
    extension: Extension, module: nn.Module, stock: Callable[..., Tensor] | None
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The operator as a function of its named inputs: the extension's, or the module's own."""

    def run(inputs: Mapping[str, Tensor]) -> Tensor:
        if stock is not None:
            return stock(*inputs.values())
        output = extension.forward(module, *inputs.values())
        if not isinstance(output, torch.Tensor):
            raise ContractError(
                f"{extension.contract.id} returned no tensor; return one of the module's own shape"
            )
        return output

    return run
