"""Contracts: what a number is. Implementations: who may compute it.

A **contract** fixes formula, reduction order, rounding points, dtypes and elementary functions of
one operator. Its id carries a version; if its bits ever change, the id changes and CHANGELOG says
so under Numerics. An **implementation** serves a contract only on a machine where
:mod:`.dispatch` has proved it bit-equal to the contract's frozen reference.

    Contract(id="linear.chain.float32.cpu.v1", op="linear", dtype="float32", device="cpu", ...)

Left out on purpose: models and sites (see ``model_recipes``), and any choice by row count.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .errors import ContractError


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The definition of one operator's bits on one kind of device.

    id: ``<op>.<order>.<dtype>.<device>.v<n>``; device is ``cpu`` or an architecture (``sm90``).
    formula, order, rounding, functions: one sentence each; together they define the bits.
    reference: dotted path of the slow frozen definition, for example
        ``zeromismatch.kernels.reference.linear:linear``.
    gradient_rtol: relative tolerance of the backward against an fp64 reference (the only tolerance
        in the project; the forward has none).
    """

    id: str
    op: str
    dtype: str
    device: str
    formula: str
    order: str
    rounding: str
    functions: str
    reference: str
    gradient_rtol: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One way to compute a contract.

    name: for example ``core-avx512`` or ``triton-128x128x64``.
    run: the function; same signature as the contract's reference.
    missing: returns None where this implementation can run, else the reason it cannot.
    """

    contract: str
    name: str
    run: Callable[..., Any]
    missing: Callable[[], str | None] = lambda: None


_CONTRACTS: dict[str, Contract] = {}
_IMPLEMENTATIONS: dict[str, list[Implementation]] = {}


def register_contract(contract: Contract) -> Contract:
    """Add a contract; an id can be defined only once."""
    if contract.id in _CONTRACTS:
        raise ContractError(
            f"contract {contract.id} is already registered; give the new one a new id"
        )
    _CONTRACTS[contract.id] = contract
    _IMPLEMENTATIONS[contract.id] = []
    return contract


def register_implementation(implementation: Implementation) -> Implementation:
    """Offer an implementation for a registered contract; dispatch decides whether it may serve."""
    get_contract(implementation.contract)
    _IMPLEMENTATIONS[implementation.contract].append(implementation)
    return implementation


def get_contract(contract_id: str) -> Contract:
    """Look a contract up by id."""
    if contract_id not in _CONTRACTS:
        raise ContractError(
            f"unknown contract {contract_id!r}; `zm kernels list` shows the registered ones"
        )
    return _CONTRACTS[contract_id]


def implementations(contract_id: str) -> tuple[Implementation, ...]:
    """All implementations offered for a contract, certified or not."""
    get_contract(contract_id)
    return tuple(_IMPLEMENTATIONS[contract_id])


def contracts(
    *, op: str | None = None, device: str | None = None, dtype: str | None = None
) -> Iterator[Contract]:
    """Registered contracts, filtered; sorted by id."""
    for key in sorted(_CONTRACTS):
        contract = _CONTRACTS[key]
        if (
            op in (None, contract.op)
            and device in (None, contract.device)
            and dtype in (None, contract.dtype)
        ):
            yield contract
