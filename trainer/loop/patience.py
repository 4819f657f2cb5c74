"""Calls of other people's code with a limit, in one thread for all of them.

    patience = Patience()
    reward = patience.wait(lambda: task.score(trajectory), 60, "the score of 3/0")

A call that hangs is given up on: its thread is left behind, and the next call gets another.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ...kernels.errors import BudgetError, UsageError
from .crossing import Crossing

R = TypeVar("R")


class Patience:
    """See the module. For one caller at a time; the thread goes with the process."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], Any] | None] | None = None
        self._answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def wait(self, ask: Callable[[], R], seconds: float, what: str) -> R:
        """``ask()``; UsageError if it raises, BudgetError if it takes longer than ``seconds``."""
        if self._asked is None:
            self._asked, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
            work = (self._asked, self._answers)
            threading.Thread(target=_work, args=work, daemon=True).start()
        self._asked.put(ask)
        try:
            answer, error = self._answers.get(timeout=seconds)
        except queue.Empty:
            self._asked = None
            raise BudgetError(
                f"{what} took more than {seconds:g} s; make it faster, or raise task_seconds"
            ) from None
        if error is not None:
            raise UsageError(
                f"{what} raised {type(error).__name__}: {error}; correct the task"
            ) from error
        return answer

    def close(self) -> None:
        """End the thread."""
        if self._asked is not None:
            self._asked.put(None)
            self._asked = None


def _work(
    asked: "queue.SimpleQueue[Callable[[], Any] | None]",
    answers: "queue.SimpleQueue[tuple[Any, Exception | None]]",
) -> None:
    while (ask := asked.get()) is not None:
        answer = None
        with Crossing() as crossing:
            answer = ask()
        answers.put((answer, crossing.error))
        del ask, answer  # what they hold is not this thread's to keep
