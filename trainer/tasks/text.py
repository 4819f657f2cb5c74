"""A task in text: somebody asks and grades, a codec turns both into tokens.

    TextTask(name="gym/basic_arithmetic", codec=codec, questions=GymQuestions(...))

The reward looks at the last model turn alone: at what stands in <answer> tags, or at all of it.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ..loop.records import Prompt, Trajectory
from .codec import Codec

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """text: what to ask. data: anything JSON can hold that grading needs.

    Question(text="What is 2 + 3?", data={"answer": "5"})
    """

    text: str
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


@runtime_checkable
class Questions(Protocol):
    """Who asks and grades. Must pickle; keeps no state."""

    def ask(self, index: int, rng: random.Random) -> Question:
        """Question number ``index``; ``rng`` is seeded by the run and the index."""
        ...

    def grade(self, answer: str, data: Mapping[str, Any]) -> float:
        """A finite number; more is better."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTask:
    """See the module; a :class:`..loop.records.Task`. system: said before every question."""

    name: str
    codec: Codec
    questions: Questions
    system: str = ""

    def prompt(self, index: int, rng: random.Random) -> Prompt:
        """The question in tokens."""
        question = self.questions.ask(index, rng)
        return Prompt(
            tokens=self.codec.prompt(question.text, self.system),
            data=question.data,
            stop_ids=self.codec.stop_ids,
        )

    def score(self, trajectory: Trajectory) -> float:
        """The grade of the last turn's answer."""
        answer = answer_in(self.codec.decode(trajectory.responses[-1]))
        return float(self.questions.grade(answer, trajectory.prompt.data))


def answer_in(text: str) -> str:
    """What stands in the last <answer> tags, or the whole text, without space around it."""
    found = ANSWER.findall(text)
    return (found[-1] if found else text).strip()
