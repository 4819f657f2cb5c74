"""The project's own functions inside a worker: what a candidate is timed against, and controls.

    find({"contract": "rmsnorm.lanes16.float32.cpu.v1", "implementation": "core-avx2"})
    find({"formula": "rmsnorm"})

Runs in trusted workers alone, by the same protocol and confinement as a candidate.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor


def load(*, gpu: bool) -> None:
    """Import every operator, with its kernels where there is a GPU."""
    from ...kernels import certify

    certify.load_operators()
    folder = Path(certify.__file__).parent
    for file in sorted(folder.glob("*/gpu_*kernels.py")) if gpu else ():
        importlib.import_module(f"...kernels.{file.parent.name}.{file.stem}", __package__)


def find(head: dict[str, Any]) -> Callable[..., Any]:
    """A registered implementation, or a formula in plain torch."""
    if "formula" in head:
        from .formulas import FORMULAS

        return FORMULAS[head["formula"]].run
    from ...kernels import certify
    from ...kernels.contract import implementations

    certify.load_operators()
    for name in head.get("modules", ()):
        importlib.import_module(name)
    offered = {each.name: each.run for each in implementations(head["contract"])}
    return offered[head["implementation"]]


def twice(run: Callable[..., Any]) -> Callable[..., Any]:
    """The red control of the clock: half as fast."""

    def slow(*arguments: Any) -> Any:
        run(*arguments)
        return run(*arguments)

    return slow


def stale(run: Callable[..., Any]) -> Callable[..., Any]:
    """The red control of the comparison: answers by where its inputs lie, not by what they hold."""
    kept: dict[Any, Any] = {}

    def remember(*arguments: Any) -> Any:
        key = tuple(
            (each.data_ptr(), tuple(each.shape)) if isinstance(each, Tensor) else each
            for each in arguments
        )
        if key not in kept:
            kept[key] = run(*arguments)
        return kept[key]

    return remember
