"""Faults that people in this field met, as switches on a model: what every tool here must find.

    with plant("B01", model):                     # the rollout engine's norm now follows row count
        localize(Side.parse("paged:chunk:7"), Side.parse("packed"), model, requests, ...)

    caught = check("B01", model)                  # plant it, run what must find it, compare
    caught.right, caught.named, caught.detail

Each entry of :data:`FAULTS` is a small replay of a public report: the real code path of our engines
and kernels with one thing changed, in the rollout engine only. An entry says what must name it: an
operator class and a cause class where an operator is at fault, the alignment anchor where the two
sides are not about the same numbers, a refusal, or the certificate of a kernel. ``mechanism.py``
has the ways to change something; operators, attention, engines and gradients have files of their
own. ``table.py`` writes benchmarks/faults.md: each fault with and without it, and where the entries
that are no switch here are held.

    pytest tests/agent_tools/faults
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .catalogue import FAULTS, Fault, fault_named, plant
    from .checking import Caught, check
    from .kernels import planted_kernel

__all__ = ["FAULTS", "Caught", "Fault", "check", "fault_named", "plant", "planted_kernel"]

_HOMES = {"Caught": "checking", "check": "checking", "planted_kernel": "kernels"}


def __getattr__(name: str) -> Any:
    """Load on first use: a generated repro wants ``planted_kernel`` and no engine."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'catalogue')}")
    return getattr(home, name)
