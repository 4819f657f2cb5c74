"""Certified dispatch: which implementation of a contract may serve on this machine."""

import importlib

from .contract import Implementation, get_contract, implementations

_CHOSEN: dict[tuple[str, tuple[int, ...]], Implementation] = {}


def choose(contract_id: str, key: tuple[int, ...] = ()) -> Implementation:
    """The implementation that serves ``contract_id`` at ``key`` on this machine."""
    chosen = _CHOSEN.get((contract_id, key))
    return chosen if chosen is not None else _decide(contract_id, key)


def _decide(contract_id: str, key: tuple[int, ...]) -> Implementation:
    usable = [entry for entry in implementations(contract_id) if entry.missing() is None]
    chosen = usable[0] if usable else reference(contract_id)
    _CHOSEN[(contract_id, key)] = chosen
    return chosen


def reference(contract_id: str) -> Implementation:
    """The contract's frozen definition, as an implementation."""
    module, _, name = get_contract(contract_id).reference.partition(":")
    return Implementation(
        contract=contract_id, name="reference", run=getattr(importlib.import_module(module), name)
    )
