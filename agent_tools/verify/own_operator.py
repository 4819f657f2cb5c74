"""Operators that only a model defines: judged against the model's own code in fp64.

    subject = own_operator(source, "tilt.fixed.float32.cpu.v1", "code:models/tilt")

The kernel file says which module classes it serves. The first module of each class is taken from
the model, with its weights and the shapes that it is called with; rows and data are the verifier's.
Bits: every answer must equal the kernel's own first one, however it is asked. Accuracy and
gradients: the module's own code, cast to fp64. The kernel runs in a worker that knows nothing of
the model; the model's code runs here, as its owner agreed by naming it.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...kernels import adversarial, certify
from ...kernels.contract import Contract, contracts, implementations
from ...kernels.dispatch import choose
from ...kernels.entry_points import Entry
from ...kernels.errors import UsageError
from ...kernels.trial import Case
from ...model_recipes.candidate import Source, granted
from ...model_recipes.models import load_model
from ...model_recipes.own_kernels import PREFIX
from .draw import Draw
from .facade import described
from .formulas import Formula, widened
from .inputs import QUICK_ROWS, ROWS
from .judge import ROWS_OF_PLAIN
from .subject import Cases, Subject
from .sweep import MOST_AGAIN, other_content

PROBE_TOKENS = 11
MOST_NUMBERS = 250_000
"""Elements of one input: more rows than that are left out for wide modules."""
NO_RACE = (
    "no kernel here does the same work; gate C10 measures the whole model beside stock operators"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """One module of the model: itself, its fp64 copy, tensor names, and its inputs' widths."""

    module: nn.Module
    wide: nn.Module
    names: tuple[str, ...]
    tree: dict[str, Any]
    widths: tuple[tuple[int, ...], ...]

    def tensors(self) -> list[Tensor]:
        """Its parameters and buffers."""
        held = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return [held[name].detach().clone() for name in self.names]

    def run(self, *tensors: Tensor) -> Any:
        """Its own code with these inputs and weights, in their dtype."""
        count = len(self.widths)
        wide = any(each.dtype == torch.float64 for each in tensors)
        weights = dict(zip(self.names, tensors[count:], strict=True))
        return functional_call(self.wide if wide else self.module, weights, tensors[:count])


def own_operator(source: Source, contract_id: str, model: str | None) -> Subject:
    """The subject; UsageError where file, id and model do not belong together."""
    contract = _declared(source, contract_id)
    if model is None:
        raise UsageError(
            f"{contract_id} is an operator that only a model defines; say which brings it: "
            "--model MODEL"
        )
    if contract.device != "cpu":
        raise UsageError(f"{contract_id}: operators of a model's own are verified on a CPU only")
    parts = _modules(source, contract, model)
    certify.load_operators()

    def run(which: int, *tensors: Tensor) -> Any:
        return parts[which].run(*tensors)

    def gradients(entry: Entry, arguments: Sequence[Any]) -> list[Tensor | None]:
        upstream, which, *tensors = widened(arguments)
        with torch.enable_grad():
            leaves = [t.requires_grad_() if t.is_floating_point() else t for t in tensors]
            asked = [each for each in leaves if each.requires_grad]
            output = run(which, *leaves)
            found = cast(
                "Sequence[Tensor | None]",
                torch.autograd.grad(output, asked, upstream, allow_unused=True),
            )
        return [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(asked, found, strict=True)
        ]

    def cases(entry: Entry, seed: int, *, quick: bool) -> Cases:
        draw = Draw(contract, seed)
        for num_rows in QUICK_ROWS if quick else ROWS:
            for case in _cases(parts, draw, entry, num_rows):
                yield case, None
                if max(map(_size, case.arguments)) <= MOST_AGAIN:
                    yield other_content(case), None

    def plain(entry: Entry, seed: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
        draw = Draw(contract, seed)
        for num_rows in ROWS_OF_PLAIN:
            for case in _cases(parts, draw, entry, num_rows, kind="plain"):
                yield case.label, case.arguments

    trees = [each.tree | {"inputs": len(each.widths)} for each in parts]
    names = granted(source)
    entries = {
        name: Entry(name=name, contract=contract, parameters=2) for name in ("forward", "backward")
    }
    return Subject(
        contract=contract, contract_id=contract_id, new=True, entries=entries, cases=cases,
        plain=plain, formula=Formula(run=run), gradients=gradients, secret=False, races=False,
        why_no_race=NO_RACE, load={"trees": trees, "names": names},
        operators=_served({module for module, _, _ in names}, contract) if names else None,
    )  # fmt: skip


def _declared(source: Source, contract_id: str) -> Contract:
    try:
        contract = Contract(**dict(source.declared or {}), reference=f"{source.path.name}:forward")
        if contract.id != contract_id:
            raise UsageError(f"{source.path.name} is for {contract.id}, not for {contract_id}")
        if not isinstance(getattr(torch, contract.dtype), torch.dtype):
            raise AttributeError(contract.dtype)
    except (TypeError, AttributeError) as error:
        raise UsageError(
            f"{source.path.name} needs CONTRACT with id, op, dtype, device, formula, order, "
            f"rounding, functions and gradient_rtol ({error})"
        ) from error
    return contract


def _modules(source: Source, contract: Contract, spec: str) -> list[_Module]:
    """The first module of each served class, with what it is called with."""
    dtype: Any = contract.dtype
    model = load_model(spec, dtype=dtype)
    found: dict[str, nn.Module] = {}
    for child in model.module.modules():
        if type(child).__name__ in source.modules:
            found.setdefault(type(child).__name__, child)
    missing = [name for name in source.modules if name not in found]
    if missing or not found:
        raise UsageError(
            f"{spec} has no module {', '.join(missing) or 'of MODULES'}; correct MODULES"
        )
    seen: dict[nn.Module, tuple[Any, ...]] = {}
    hooks = [
        child.register_forward_pre_hook(lambda child, given: seen.setdefault(child, given))
        for child in found.values()
    ]
    try:
        with torch.no_grad():
            model.module(torch.arange(PROBE_TOKENS)[None] + 3, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [_module(name, child, seen.get(child, ())) for name, child in found.items()]


def _module(name: str, child: nn.Module, given: tuple[Any, ...]) -> _Module:
    widths: list[tuple[int, ...]] = []
    for each in given:
        shape = tuple(each.shape) if isinstance(each, Tensor) else ()
        rows = shape.index(PROBE_TOKENS) + 1 if PROBE_TOKENS in shape else 0
        if not rows or each.shape[:rows].numel() != PROBE_TOKENS or not each.is_floating_point():
            raise UsageError(
                f"{name} is called with {shape or type(each).__name__}, and only rows of tokens "
                "can be verified; serve a module that takes them"
            )
        widths.append(shape[rows:])
    if not widths:
        raise UsageError(f"{name} is never called by its model with tensors; correct MODULES")
    tree, names = described(child)
    wide = copy.deepcopy(child).double()
    return _Module(module=child, wide=wide, names=tuple(names), tree=tree, widths=tuple(widths))


def _cases(
    parts: Sequence[_Module], draw: Draw, entry: Entry, num_rows: int, kind: str | None = None
) -> Iterator[Case]:
    for which, part in enumerate(parts):
        sizes = [torch.Size(width).numel() for width in part.widths]
        if num_rows > 1 and num_rows * max(sizes) > MOST_NUMBERS:
            continue
        inputs = [
            draw.rows(num_rows, size, kind=kind).view(num_rows, *width)
            for size, width in zip(sizes, part.widths, strict=True)
        ]
        tensors = part.tensors()
        label = f"{type(part.module).__name__}, rows {num_rows}"
        if entry.name == "forward":
            rows = tuple(range(1, 1 + len(inputs)))
            yield Case(label=label, arguments=(which, *inputs, *tensors), rows=rows)
            continue
        with torch.no_grad():
            like = part.run(*inputs, *tensors)
        seed = draw.random.getrandbits(60)
        flat = like[0].numel() if num_rows else 0
        dy = adversarial.rows(
            num_rows, flat, seed=seed, dtype=draw.dtype, device=draw.device, kind=kind
        )
        yield Case(label=label, arguments=(dy.view(like.shape), which, *inputs, *tensors), rows=())


def _size(argument: Any) -> int:
    return argument.numel() if isinstance(argument, Tensor) else 0


def _served(modules: set[str], contract: Contract) -> dict[str, Any]:
    """The package's operators that a worker imports, and who serves their contracts here."""
    chosen: list[tuple[str, str]] = []
    for each in contracts(device=contract.device):
        homes = {
            getattr(one.run, "func", one.run).__module__.removeprefix("zeromismatch.kernels.")
            .partition(".")[0] for one in implementations(each.id)
        }  # fmt: skip
        if homes & modules and each.dtype in (contract.dtype, "float32"):
            name = choose(each.id).name
            chosen.append((each.id, "reference" if name.startswith(PREFIX) else name))
    return {"modules": sorted(modules), "contracts": chosen}
