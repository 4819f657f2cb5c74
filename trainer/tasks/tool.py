"""A task with Python at hand, over several turns: `tool/DATASET` asks a reasoning-gym dataset.

The model may write <python>…</python>; the code runs in the sandbox and its output comes back in
<output>…</output>, as tokens that nobody sampled and nobody learns from. A turn without code, or
with an <answer>, ends the response; its last turn is graded.

The sandbox's time limit is wall time, so code near it may end differently when a run is repeated.
"""

import re
from dataclasses import dataclass, field

from ..loop.records import Trajectory
from .sandbox import Sandbox
from .text import ANSWER, TextTask

CODE = re.compile(r"<python>(.*?)</python>", re.DOTALL)
INSTRUCTIONS = (
    "You can run Python: write <python>print(1 + 1)</python> and read what it prints in <output>. "
    "When you are sure, write <answer>your answer</answer>."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTask(TextTask):
    """A :class:`..loop.records.TurnTask`."""

    sandbox: Sandbox = field(default_factory=Sandbox)
    system: str = INSTRUCTIONS

    def next_turn(self, trajectory: Trajectory) -> tuple[int, ...] | None:
        """The output of the code in the last turn, or None where the response is finished."""
        turn = trajectory.responses[-1]
        text = self.codec.decode(turn)
        code = CODE.search(text)
        if code is None or ANSWER.search(text):
            return None
        ran = self.sandbox.run(code[1])
        return self.codec.reply(
            f"<output>\n{ran.told()}\n</output>", stopped=turn[-1] in self.codec.stop_ids
        )
