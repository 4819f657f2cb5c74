"""Errors that cross from one thread or process to another: carried as values, raised over there.

    with Crossing() as crossing:
        work()
    if crossing.error is not None: ...      # hand it to whoever waits

Nothing is swallowed: each use says who raises the error. An interrupt is not held back.
"""

from types import TracebackType


class Crossing:
    """See the module."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> "Crossing":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is not None
