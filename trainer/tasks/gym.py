"""reasoning-gym's procedural datasets by name: `gym/basic_arithmetic`, `gym/maze`, …

    GymQuestions(dataset="basic_arithmetic", seed=0, options={"max_terms": 3})

Entry number i of a dataset depends on its seed and i alone, so grading makes it again instead of
carrying it; rewards are the dataset's own, between 0 and 1.
"""

import difflib
import functools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...kernels.errors import CapabilityError, UsageError
from .text import Question

SIZE = 10_000
"""Entries before the first comes again, unless the settings say another ``size``. Most datasets
make entries when they are asked for; a few prepare all at once, or refuse more than 20,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GymQuestions:
    """A :class:`.text.Questions`. options: JSON text of the dataset's own settings."""

    dataset: str
    seed: int = 0
    options: str = "{}"

    def ask(self, index: int, rng: random.Random) -> Question:
        """Entry ``index`` of the dataset, from the start again after its last."""
        dataset = _dataset(self.dataset, self.seed, self.options)
        index %= len(dataset)
        return Question(text=str(dataset[index]["question"]), data={"index": index})

    def grade(self, answer: str, data: Mapping[str, Any]) -> float:
        """The dataset's own score; an answer that it cannot even read is worth 0."""
        dataset = _dataset(self.dataset, self.seed, self.options)
        try:
            return float(dataset.score_answer(answer, dataset[int(data["index"])]))
        except (TypeError, ValueError):  # two of 105 raise at text that is no answer of theirs
            return 0.0


def gym_questions(
    name: str, *, seed: int = 0, options: Mapping[str, Any] | None = None
) -> GymQuestions:
    """Questions of a dataset, checked now: its name, its settings, and that it has an entry."""
    questions = GymQuestions(dataset=name, seed=seed, options=json.dumps(dict(options or {})))
    questions.ask(0, random.Random(0))
    return questions


@functools.lru_cache(maxsize=8)
def _dataset(name: str, seed: int, options: str) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise CapabilityError(
            f"reasoning-gym is not installed completely ({error}): run `make install`, or pip "
            "install 'zero-mismatch[train]'"
        ) from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)[:3]
        raise UsageError(
            f"reasoning-gym has no dataset {name!r}; near it: {', '.join(near)} "
            f"(all {len(DATASETS)}: reasoning_gym.factory.DATASETS)"
        )
    settings: dict[str, Any] = {"size": SIZE, **json.loads(options), "seed": seed}
    try:
        return reasoning_gym.create_dataset(name, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(
            f"dataset {name} refuses {settings}: {error}; correct the options after the name"
        ) from error
