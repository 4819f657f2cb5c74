"""The three ways to plant a fault: another kernel, another attribute, only while the rollout runs.

    with in_rollout() as running, faulty_kernel(model, "linear", split_in_two, path=DOWN): ...

A fault is planted on the rollout engine: its kernels and methods are disturbed only while
``PagedEngine.run`` or ``generate`` is on the stack, so that the trainer's side stays right. All of
it is process-wide until the block ends.
"""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from ...kernels import dispatch
from ...kernels.errors import CapabilityError

if TYPE_CHECKING:
    from ...model_recipes.models import LoadedModel

Kernel = Callable[..., Any]
Wrap = Callable[..., Any]
"""``(right kernel, *its arguments) -> what the faulty one returns``."""


class Running:
    """Whether the rollout engine is at work now."""

    def __init__(self) -> None:
        self.depth = 0

    def __bool__(self) -> bool:
        return self.depth > 0


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    """Another attribute until the block ends."""
    held = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, held)


@contextlib.contextmanager
def in_rollout() -> Generator[Running]:
    """Know when the rollout engine is running."""
    from ...trainer.engines.paged import PagedEngine

    running = Running()

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **keywords: Any) -> Any:
            running.depth += 1
            try:
                return method(*arguments, **keywords)
            finally:
                running.depth -= 1

        return call

    with contextlib.ExitStack() as stack:
        for name in ("run", "generate"):
            method = noting(getattr(PagedEngine, name))
            stack.enter_context(replaced(PagedEngine, name, method))
        yield running


@contextlib.contextmanager
def faulty_kernel(
    model: "LoadedModel", op_class: str, wrap: Wrap, *, path: str | None = None
) -> Generator[None]:
    """The rollout engine's kernel of a class computes ``wrap(kernel, *arguments)``.

    path: only the operator with this module's weight (the kernel's second argument).
    """
    from ...model_recipes.bindings import aligned_contract

    contract = aligned_contract(op_class, model.dtype, model.device)
    if contract is None:
        raise CapabilityError(f"no contract serves {op_class} here; use a float32 model on a CPU")
    right = dispatch.choose(contract).run
    address = None
    if path is not None:
        address = model.module.get_parameter(f"{path}.weight").data_ptr()
    with in_rollout() as running:

        def run(*arguments: Any) -> Any:
            elsewhere = address is not None and arguments[1].data_ptr() != address
            if not running or elsewhere:
                return right(*arguments)
            return wrap(right, *arguments)

        with dispatch.substituted(contract, run):
            yield
