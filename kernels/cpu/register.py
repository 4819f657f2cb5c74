"""Register a CPU operator once: one contract per storage type, three core variants for each.

    CONTRACTS = register_core(_run, name="rmsnorm.lanes16", op="rmsnorm", formula=..., ...)
    contract = covering(CONTRACTS, x)          # ContractError where no contract covers x

``_run(variant, *arguments)`` takes the reference's arguments after the variant's name.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..contract import Contract, Implementation, register_contract, register_implementation
from ..errors import ContractError
from .load import VARIANTS, missing

STORAGES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def register_core(
    run: Callable[..., Any],
    *,
    name: str,
    storages: tuple[str, ...] = tuple(STORAGES),
    variants: tuple[str, ...] = VARIANTS,
    **fields: Any,
) -> dict[torch.dtype, Contract]:
    """Contracts ``<name>.<dtype>.cpu.v1`` by dtype, each served by ``core-<variant>``."""
    contracts: dict[torch.dtype, Contract] = {}
    for storage in storages:
        contract = register_contract(
            Contract(id=f"{name}.{storage}.cpu.v1", dtype=storage, device="cpu", **fields)
        )
        contracts[STORAGES[storage]] = contract
        for variant in variants:
            register_implementation(
                Implementation(
                    contract=contract.id,
                    name=f"core-{variant}",
                    run=partial(run, variant),
                    missing=partial(missing, variant),
                )
            )
    return contracts


def covering(contracts: Mapping[torch.dtype, Contract], x: Tensor) -> Contract:
    """The contract that covers ``x``'s device and dtype."""
    if x.device.type != "cpu" or x.dtype not in contracts:
        covered = ", ".join(contract.id for contract in contracts.values())
        raise ContractError(
            f"no contract covers {x.dtype} on {x.device.type}; convert to one of: {covered}"
        )
    return contracts[x.dtype]


def is_bf16(x: Tensor) -> bool:
    """The core's storage flag."""
    return x.dtype == torch.bfloat16
