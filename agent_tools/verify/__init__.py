"""The kernel verifier: four questions about a candidate that cannot influence the answers.

    report = verify_kernel(Path("fast_norm.py"), "rmsnorm.lanes16.float32.cpu.v1")
    report.status, report.bits.differing, report.speed.ratio, report.broken

The candidate runs in processes that cannot open a socket, start a process, or read this package;
they get raw tensors and return raw tensors. The parent makes the inputs from a secret seed,
compares the bits, measures the distance from fp64, checks the gradients and holds the clock.

    zm verify fast_norm.py --contract rmsnorm.lanes16.float32.cpu.v1
    zm verify --rules
"""

from .records import Limits, Verification, Violation

__all__ = ["Limits", "Verification", "Violation"]
