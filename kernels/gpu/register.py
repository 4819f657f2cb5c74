"""Register a GPU operator once: one contract per storage type, its implementations for each.

    CONTRACTS = register_gpu({"triton": launch}, name="rmsnorm.lanes", op="rmsnorm", ...)
    run = choose(serving(CONTRACTS, "rmsnorm", x).id).run

An implementation takes the reference's arguments. Nothing here touches a GPU: contracts can be
listed anywhere; :func:`.device.missing` says why they cannot be served.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..contract import Contract, Implementation, register_contract, register_implementation
from ..errors import ContractError
from .device import NAMES, missing

ARCHITECTURE = "sm90"
_STORAGES = {name: dtype for dtype, name in NAMES.items()}


def register_gpu(
    implementations: Mapping[str, Callable[..., Any]],
    *,
    name: str,
    storages: tuple[str, ...] = tuple(_STORAGES),
    rtol: tuple[float, float] = (1e-4, 2e-2),
    missing: Callable[[], str | None] = missing,
    version: str = "v1",
    **fields: Any,
) -> dict[torch.dtype, Contract]:
    """Contracts ``<name>.<dtype>.sm90.<version>`` by dtype.

    rtol: relative tolerance of the gradient against fp64 in fp32, and in 16 bits. missing: why the
    implementations cannot run here, or None.
    """
    contracts: dict[torch.dtype, Contract] = {}
    for storage in storages:
        contract = register_contract(
            Contract(
                id=f"{name}.{storage}.{ARCHITECTURE}.{version}",
                dtype=storage,
                device=ARCHITECTURE,
                gradient_rtol=rtol[storage != "float32"],
                **fields,
            )
        )
        contracts[_STORAGES[storage]] = contract
        for served, run in implementations.items():
            register_implementation(
                Implementation(contract=contract.id, name=served, run=run, missing=missing)
            )
    return contracts


def serving(contracts: Mapping[torch.dtype, Contract], op: str, dtype: torch.dtype) -> str:
    """The id of the contract that covers a dtype; ContractError where none does."""
    if dtype not in contracts:
        names = ", ".join(NAMES[each] for each in contracts)
        raise ContractError(f"{op} has no GPU contract for {dtype}; convert to one of {names}")
    return contracts[dtype].id
