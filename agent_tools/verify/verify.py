"""``zm verify`` as a function; see the package's docstring."""

from collections.abc import Callable, Collection
from pathlib import Path

from .records import Limits, Verification

Progress = Callable[[str], None]


def verify_kernel(
    file: Path,
    contract: str,
    *,
    quick: bool = False,
    limits: Limits | None = None,
    allow_missing: Collection[str] = (),
    progress: Progress = lambda stage: None,
) -> Verification:
    """Judge a candidate file against a contract.

    quick: fewer shapes, the same questions. allow_missing: required isolations that the caller
    accepts to be without. UsageError for a file or contract that cannot be used, CapabilityError
    where a required isolation is missing, BudgetError where the wall clock runs out.
    """
    raise NotImplementedError
