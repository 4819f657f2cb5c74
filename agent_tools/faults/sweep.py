"""Faulty kernels that no forward pass shows: offered to the sweep that admits kernels.

    with planted_in("T01", "topk.desc_asc.float32.cpu.v1"):
        swept("topk", "float32", "cpu")      # Swept(named="topk: tie-break", detail="differs ...")

Nothing here loads a model, an engine or transformers, so that the repro of such a fault
(:func:`rerun`) starts fast.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels import dispatch
from ...kernels.certify import cases_of, load_operators
from ...kernels.contract import contracts, get_contract
from ...kernels.trial import Trial, outputs
from . import operators
from .gradients import AtomicSum, weight_twice
from .refusal import cause_of_refusal

CASES = 6
"""Cases of a kernel's sweep that are enough for these faults."""

SWEPT: Mapping[str, Callable[[], Callable[..., Any]]] = {
    "B06": lambda: operators.sum_by_threads,
    "T01": lambda: operators.any_tied_expert,
    "T02": lambda: operators.last_tied_group,
    "R03": lambda: operators.slots_by_owner,
    "G01": AtomicSum,
    "G03": lambda: weight_twice,
}
"""What makes the kernel of a fault; each planting gets its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What the sweep says of the kernel that serves: its operator and cause class, or None."""

    named: str | None
    detail: str = ""


def contract_of(op: str, dtype: str, device: str) -> str:
    """The contract of an operator, gradients included."""
    load_operators()
    dtype = "float32" if op == "topk" else dtype
    return [each.id for each in contracts(op=op, dtype=dtype, device=device)][-1]


@contextlib.contextmanager
def planted_in(name: str, contract: str) -> Generator[None]:
    """The faulty kernel serves ``contract`` until the block ends."""
    right, faulty = dispatch.choose(contract).run, SWEPT[name]()
    with dispatch.substituted(contract, lambda *given: faulty(right, *given)):
        yield


def swept(op: str, dtype: str, device: str) -> Swept:
    """Offer the kernel that serves to the sweep, thread counts included."""
    contract = get_contract(contract_of(op, dtype, device))
    serving, reference = dispatch.choose(contract.id), dispatch.reference(contract.id).run
    trial = Trial(implementation=serving)
    for case in itertools.islice(cases_of(contract, quick=True, seed=0), CASES):
        trial.run_case(case, outputs(reference(*case.arguments)), quick=False)
        if trial.reason is not None:
            cause = cause_of_refusal(serving.run, reference, case)
            return Swept(named=f"{op}: {cause.name}", detail=f"{trial.reason}; {cause.detail}")
    return Swept(named=None)


def rerun(path: Path, *, expect_equal: bool = False) -> int:
    """Run a stored repro again: 0 the sweep admits the kernel, 1 it does not, 125 unsuitable."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        _, op, cause = record["named"].split(": ")
        with planted_in(record["fault"], contract_of(op, record["dtype"], record["device"])):
            found = swept(op, record["dtype"], record["device"])
    except (OSError, ValueError, KeyError, IndexError) as error:
        print(f"unsuitable: {type(error).__name__}: {error}")
        return 125
    if found.named is None:
        print(f"equal: the sweep admits the kernel of {op}")
        return 0
    print(f"mismatch: {found.named}: {found.detail}")
    if not expect_equal:
        same = found.named == f"{op}: {cause}"
        print("  as recorded" if same else f"  recorded was {record['claim']}")
    return 1
