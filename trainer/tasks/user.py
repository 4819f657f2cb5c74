"""A user's own task: `module:function`, called once with the codec of the model.

    # my_tasks.py, in the folder where zm runs
    def sums(codec):
        return Sums()              # ask(index, rng) and grade(answer, data), as tasks/text.py says

    zm train RECIPE --task my_tasks:sums

The function returns questions in text, or a whole task in tokens (``prompt`` and ``score``). What
it returns is made again in every worker, from the same name, so it need not pickle.
"""

import importlib
import random
import sys
from pathlib import Path
from typing import Any

from ...kernels.errors import UsageError
from ..loop.records import Prompt, Task, Trajectory, TurnTask
from .codec import Codec
from .text import Questions, TextTask


class UserTask:
    """A :class:`..loop.records.Task` that pickles as its name and folder."""

    def __init__(self, name: str, codec: Codec, folder: Path) -> None:
        self.name, self.codec, self.folder = name, codec, folder
        self.task = _called(name, codec, folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.codec, self.folder)

    def prompt(self, index: int, rng: random.Random) -> Prompt:
        """The user's."""
        return self.task.prompt(index, rng)

    def score(self, trajectory: Trajectory) -> float:
        """The user's."""
        return self.task.score(trajectory)

    def next_turn(self, trajectory: Trajectory) -> tuple[int, ...] | None:
        """The user's, or the end where it has only one turn."""
        return self.task.next_turn(trajectory) if isinstance(self.task, TurnTask) else None


def _called(name: str, codec: Codec, folder: Path) -> Task:
    module_name, _, function_name = name.partition(":")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"task {name}: {error}; give `module:function` of a module that Python finds from "
            f"{folder}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise UsageError(
            f"task {name}: {module_name} has no function {function_name!r}; it has "
            f"{', '.join(names) or 'none'}"
        )
    made: Any = function(codec)
    if isinstance(made, Questions):
        return TextTask(name=name, codec=codec, questions=made)
    if isinstance(made, Task):
        return made
    raise UsageError(
        f"task {name} returned a {type(made).__name__}; return an object with ask and grade (text) "
        "or with name, prompt and score (tokens)"
    )
