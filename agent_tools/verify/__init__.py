"""The kernel verifier: four questions about a candidate that cannot influence the answers.

    report = verify_kernel(Path("fast_norm.py"), "rmsnorm.lanes16.float32.cpu.v1")
    report.status, report.bits.differing, report.speed.ratio, report.broken

The candidate runs in processes that cannot open a socket, start a process, or read this package;
they get raw tensors and return raw tensors. The parent makes the inputs from a secret seed,
compares the bits, measures the distance from fp64, checks the gradients and holds the clock.

    zm verify fast_norm.py --contract rmsnorm.lanes16.float32.cpu.v1
    zm verify --rules
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .records import Limits, Verification, Violation
    from .verify import verify_kernel

__all__ = ["Limits", "Verification", "Violation", "verify_kernel"]


def __getattr__(name: str) -> Any:
    """Loaded on first use: workers import this package too, and must not hold a reference."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "verify" if name == "verify_kernel" else "records"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
