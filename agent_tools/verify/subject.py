"""What a candidate is held against: the contract, its cases, its formula, and who it races.

    subject = registered("rmsnorm.lanes16.float32.cpu.v1")
    subject.entries, subject.cases(entry, seed, quick=True)

Here: contracts of this package, and new ids for its operators, whose first answer is their own
measure. :mod:`.own_operator` has those that only a model defines.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...kernels.contract import Contract, implementations
from ...kernels.dispatch import admitted, choose, reference
from ...kernels.entry_points import Entry, contract_for, entries_of
from ...kernels.trial import Case
from ...model_recipes.own_kernels import PREFIX
from .formulas import FORMULAS, Formula, wanted
from .formulas_recurrent import PAGED, PAGED_OPS
from .inputs import has_own_shapes
from .judge import plain_cases
from .sweep import cases_of

Cases = Iterator[tuple[Case, list[Tensor] | None]]
INTEGERS = "its outputs are integers: equal bits are all there is to say"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One contract as the verifier asks about it.

    formula: the forward in torch without any order, for fp64; None: why_no_formula says why.
    secret: the shapes are secret too, not only the data. load, operators: what a worker is told
    besides the file. races: False where nothing does the same work that could be raced.
    """

    contract: Contract
    contract_id: str
    new: bool
    entries: Mapping[str, Entry]
    cases: Callable[..., Cases]
    plain: Callable[[Entry, int], Iterator[tuple[str, tuple[Any, ...]]]]
    formula: Formula | None
    gradients: Callable[[Entry, Sequence[Any]], list[Tensor | None] | None]
    secret: bool
    why_no_formula: str = ""
    races: bool = True
    why_no_race: str = ""
    load: Mapping[str, Any] = field(default_factory=dict[str, Any])
    operators: Mapping[str, Any] | None = None

    @property
    def device(self) -> str:
        """Where its tensors lie."""
        return "cpu" if self.contract.device == "cpu" else "cuda"

    def served(self, entry: Entry) -> dict[str, Any] | None:
        """Who a candidate stands beside: the admitted implementation, else plain torch."""
        if not self.races:
            return None
        chosen = choose(entry.contract.id)
        if chosen.name.startswith(PREFIX):  # a recipe's, which a worker cannot find by its name
            chosen = next(
                (each for each in implementations(entry.contract.id)
                 if not each.name.startswith(PREFIX) and admitted(each.contract, each.name)),
                reference(entry.contract.id),
            )  # fmt: skip
        if chosen.name != "reference":
            module = getattr(chosen.run, "__module__", "") or ""
            modules = [module] if module.startswith("zeromismatch.") else []
            served = {"contract": entry.contract.id, "implementation": chosen.name}
            return {**served, "modules": modules}
        if entry.name == "forward" and self.contract.op in FORMULAS:
            return {"formula": self.contract.op}
        return None


def registered(contract_id: str) -> Subject:
    """A contract of this package, or a new id for one of its operators."""
    contract, new = contract_for(contract_id)
    entries = entries_of(contract)

    def cases(entry: Entry, seed: int, *, quick: bool) -> Cases:
        return cases_of(entry, seed, quick=quick, new=new)

    formula, why = formula_of(contract)
    return Subject(
        contract=contract, contract_id=contract_id, new=new, entries=entries, cases=cases,
        plain=plain_cases, formula=formula, why_no_formula=why,
        gradients=lambda entry, arguments: wanted(entry.contract.op, arguments),
        secret=all(has_own_shapes(each.contract) for each in entries.values()),
    )  # fmt: skip


def formula_of(contract: Contract) -> tuple[Formula | None, str]:
    """The operator in plain torch; or why accuracy against fp64 is no question for it."""
    if contract.op in ("sampling", "topk"):
        return None, INTEGERS
    if contract.op == "attention" and contract.device != "cpu":
        return None, "the paged layout of a GPU has no formula here; its packed twin is judged"
    if contract.op in PAGED_OPS:
        return None, PAGED
    found = FORMULAS.get(contract.op)
    return found, "" if found else f"there is no fp64 formula of {contract.op}"
