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

The file is read before it is run: what it may import and name is listed below. That check is
necessary and never sufficient: whoever runs a recipe's code has to trust it, or review it.
"""

import ast
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.contract import Contract, register_contract
from ..kernels.errors import ContractError, RecipeError
from .file_module import file_module

FOLDER = "kernels"
IMPORTS = frozenset(("torch", "torch.nn", "math", "typing", "collections.abc"))
KERNELS = "zeromismatch.kernels."
PACKAGES = frozenset(
    ("linear", "gated", "rmsnorm", "rotary", "embedding", "reference.exp", "reference.fma")
)
BANNED = frozenset(
    ("open", "eval", "exec", "compile", "getattr", "setattr", "delattr", "globals", "locals",
     "vars", "input", "breakpoint", "__import__", "memoryview", "super", "type", "print")
)  # fmt: skip
BANNED_ATTRIBUTES = frozenset(
    ("set_num_threads", "use_deterministic_algorithms", "manual_seed", "load", "save", "hub",
     "set_default_dtype", "multiprocessing", "distributed", "library", "utils", "jit", "ops",
     "detach", "no_grad", "inference_mode", "set_grad_enabled", "requires_grad", "data",
     "register_hook", "apply_", "register_forward_hook", "classes", "overrides")
)  # fmt: skip
MOST_BYTES = 200_000
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


def load_drafts(folder: Path) -> tuple[Extension, ...]:
    """Load every kernel file of a draft or recipe folder, in the order of their names."""
    return tuple(load_extension(path) for path in sorted((folder / FOLDER).glob("*.py")))


def is_draft(folder: Path) -> bool:
    """A folder with kernels and without a recipe."""
    return (folder / FOLDER).is_dir() and not (folder / "recipe.yaml").exists()


def load_extension(path: Path) -> Extension:
    """Check and load one kernel file. RecipeError says what is wrong with it."""
    source = path.read_text(encoding="utf-8")
    broken = violations(source)
    if broken:
        raise RecipeError(f"{path.name}: {'; '.join(broken[:5])}; change the kernel")
    digest = hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
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
    from .bindings import OP_CLASSES

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
    if not named or not parts[-1].removeprefix("v").isdigit() or contract.op in OP_CLASSES:
        raise RecipeError(
            f"{path.name}: contract {contract.id} must be <op>.<order>.<dtype>.<device>.v<n> with "
            "an operator of its own; a registered operator has its own kernels"
        )
    try:
        return register_contract(contract)
    except ContractError:
        return contract  # an earlier draft of this process had the same id


def violations(source: str) -> list[str]:
    """What a kernel file may not do, as far as its text shows; each ``rule: detail``."""
    if len(source.encode()) > MOST_BYTES:
        return [f"syntax: more than {MOST_BYTES} bytes"]
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return [f"syntax: {error}"]
    found = [] if ast.get_docstring(tree) else ["docstring: the file opens without one"]
    for node in ast.walk(tree):
        found += [f"line {getattr(node, 'lineno', 0)}, {rule}" for rule in _broken(node)]
    return found


def _broken(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [f"import: {n.name}" for n in names if not _may_import(n.name)]
        case ast.ImportFrom(module=module, level=level):
            fine = level == 0 and module is not None and _may_import(module)
            return [] if fine else [f"import: {module}"]
        case ast.Name(id=name) if name in BANNED or name.startswith("__"):
            return [f"reflection: {name}"]
        case ast.Attribute(attr=name) if name.startswith("_") or name in BANNED_ATTRIBUTES:
            return [f"reflection: .{name}"]
        case ast.Attribute(ctx=ast.Store() | ast.Del(), attr=name):
            return [f"patch: assigns to .{name}"]
        case ast.Global() | ast.Nonlocal():
            return ["state: global or nonlocal"]
        case ast.Try() | ast.ExceptHandler():
            return ["swallow: catches exceptions"]
        case ast.ClassDef(name=name):
            return [f"state: class {name}"]
        case ast.AsyncFunctionDef() | ast.Await() | ast.Yield() | ast.YieldFrom():
            return ["deferred: no coroutines"]
        case _:
            return []


def _may_import(name: str) -> bool:
    if name.startswith(KERNELS):
        return name.removeprefix(KERNELS) in PACKAGES
    return name in IMPORTS or name.startswith("torch.nn.functional")


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
