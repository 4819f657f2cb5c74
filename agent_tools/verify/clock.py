"""The fourth question: how fast, beside a baseline in the same kind of process?

The parent holds the clock: on a CPU the processor time that the system's kernel counted for the
worker, which a busy machine does not stretch; wall time on a GPU, and wherever a side waits instead
of working. Candidate and baseline are asked in turn for N and for 2N launches, each
launch on content that was never there before; the outputs of the last launches come back and must
have the right bits. 2N launches that do not take about twice as long as N are a finding of their
own: work was left out or put off. The shortest of several rounds counts, on both sides.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...kernels import bits
from ...kernels.dispatch import choose
from ...kernels.entry_points import Entry
from ...kernels.trial import Case
from ...kernels.trial import outputs as parts_of
from .calls import Broken, Call, ask, described, parsed, raise_failure
from .draw import Draw
from .inputs import held_out
from .records import SpeedAnswer
from .serve import marked
from .sweep import OTHER, other_content
from .watch import Worker

SETS = 3
ROUNDS = 5
RUN_SECONDS = 0.005
MOST_LAUNCHES = 4000
LEAST_GROWTH, MOST_GROWTH = 1.5, 3.0
MOST_WAITING = 3.0
SPEED_ROWS = (64, 512)


class WideDraw(Draw):
    """Sizes at the upper end: speed is about more than overhead."""

    def size(self, low: int, high: int, num_rows: int = 1) -> int:
        """Between seven and eight eighths of ``high``."""
        return max(low, self.random.randint(high * 7 // 8, high))


@dataclass(slots=True, kw_only=True)
class Racer:
    """One side: a worker with its sets of arguments prepared, and its shortest runs."""

    worker: Worker
    entry: str
    count: int = 1
    waited: float = 0.0
    launched: int = 0
    once: float = float("inf")
    double: float = float("inf")
    wall: float = float("inf")
    """Wall time of the shortest 2N launches."""

    def prepare(self, arguments: Sequence[Sequence[Any]], marks: list[dict[str, int]]) -> None:
        """Send the sets."""
        sets: list[list[dict[str, Any]]] = []
        body: list[bytes] = []
        for each in arguments:
            specs, parts = described(each)
            sets.append(specs)
            body += parts
        self.worker.ask({"do": "prepare", "sets": sets, "marks": marks}, body)
        self.launched = 0

    def run(self, count: int) -> float:
        """Seconds of ``count`` launches by the parent's clock."""
        head = {"do": "launch", "entry": self.entry, "count": count}
        before, began = self.worker.worked_ns(), time.perf_counter()
        answer, _ = self.worker.ask(head)
        self.waited = time.perf_counter() - began
        worked = (self.worker.worked_ns() - before) / 1e9
        raise_failure(answer)
        self.launched += count
        return worked if self.worker.device == "cpu" else self.waited

    def calibrate(self) -> None:
        """Find how many launches make a run that a clock can tell from nothing."""
        self.run(SETS)
        seconds = self.run(self.count)
        while seconds < RUN_SECONDS and self.count < MOST_LAUNCHES:
            wanted = int(self.count * RUN_SECONDS / max(seconds, 1e-6))
            self.count = min(MOST_LAUNCHES, max(2 * self.count, wanted))
            seconds = self.run(self.count)

    def round(self) -> None:
        """N launches, then 2N."""
        self.once = min(self.once, self.run(self.count))
        self.double = min(self.double, self.run(2 * self.count))
        self.wall = min(self.wall, self.waited)

    @property
    def seconds(self) -> float:
        """Of one launch."""
        return self.double / (2 * self.count)

    @property
    def growth(self) -> float:
        """How much longer twice as many launches took; about 2."""
        return self.double / self.once


def race(one: Racer, other: Racer, *, rounds: int = ROUNDS) -> float:
    """``other``'s time over ``one``'s; who goes first alternates."""
    for racer in (one, other):
        racer.once = racer.double = racer.wall = float("inf")
        racer.calibrate()
    for number in range(rounds):
        for racer in (one, other) if number % 2 else (other, one):
            racer.round()
    share = one.wall / one.double
    if share > MOST_WAITING * max(1.0, other.wall / other.double):
        return other.wall / other.count * one.count / one.wall  # it waits instead of working
    return other.seconds / one.seconds


@dataclass(slots=True, kw_only=True)
class Clock:
    """All races of one verification."""

    candidate: Worker
    baseline: Worker
    floor: float
    goal: float
    shapes: list[str] = field(default_factory=list[str])
    ratios: list[float] = field(default_factory=list[float])
    served: list[str] = field(default_factory=list[str])

    def measure(self, entry: Entry, name: str, seed: int, *, num_rows: int, new: bool) -> None:
        """One entry at one shape; Broken for launches or wrong bits in them. new: no reference."""
        draw = WideDraw(entry.contract, seed)
        cases = _shaped(entry, draw, num_rows)
        arguments = [case.arguments for case in cases]
        marks = [_mark(each, draw) for each in arguments]
        racers = [
            Racer(worker=self.candidate, entry=entry.name),
            Racer(worker=self.baseline, entry="run"),
        ]
        for racer in racers:
            racer.prepare(arguments, marks)
        ratio = race(*racers)
        if ratio < self.floor or not LEAST_GROWTH <= racers[0].growth <= MOST_GROWTH:
            ratio = max(ratio, race(*racers, rounds=2 * ROUNDS))  # a busy machine, perhaps
        if racers[0].growth < LEAST_GROWTH:
            raise Broken(
                "launches", f"twice as many launches took {racers[0].growth:.2f} times as long"
            )
        self._check(entry, racers[0], arguments, marks, new=new)
        label = cases[0].label.removesuffix(OTHER)
        mine, theirs = (racer.seconds * 1e6 for racer in racers)
        self.shapes.append(
            f"{entry.name}, {label}: {mine:.1f} us, {name} {theirs:.1f} us, "
            f"ratio {ratio:.2f}"
        )
        self.ratios.append(ratio)
        self.served.append(name)

    def _check(
        self, entry: Entry, racer: Racer, arguments: list[tuple[Any, ...]],
        marks: list[dict[str, int]], *, new: bool,
    ) -> None:  # fmt: skip
        """The last launch of every set has the bits that its content has."""
        answer, body = racer.worker.ask({"do": "results"})
        raise_failure(answer)
        for index, given in enumerate(arguments):
            outputs, body = parsed(answer["sets"][index], body)
            last = racer.launched - 1 - (racer.launched - 1 - index) % SETS
            content = [each.clone() if isinstance(each, Tensor) else each for each in given]
            mark = marks[index]
            if mark["argument"] >= 0:
                flat = bits.int_view(content[mark["argument"]]).view(-1)
                flat[mark["element"]] = marked(last, flat.element_size())
            expected = self._expected(entry, tuple(content), new=new)
            got = [each for each in outputs if each is not None]
            same = len(got) == len(expected) and all(
                a.shape == b.shape and a.dtype == b.dtype and bits.equal(a.cpu(), b)
                for a, b in zip(expected, got, strict=True)
            )
            if not same:
                raise Broken("launches", "gave other bits while it was being timed")

    def _expected(self, entry: Entry, content: tuple[Any, ...], *, new: bool) -> list[Tensor]:
        """By the admitted implementation, or by the candidate itself in a call of its own."""
        if not new:
            with torch.no_grad():
                return parts_of(choose(entry.contract.id).run(*content))
        call = Call(
            entry=entry.name, label="timed", variation="alone", arguments=content, expected=None
        )
        return [each for each in ask(self.candidate, call, pattern="nan") if each is not None]

    def control(self, entry: Entry, seed: int) -> float:
        """The baseline against itself run twice: the ratio that a clock must see, about 0.5."""
        draw = WideDraw(entry.contract, seed)
        arguments = [case.arguments for case in _shaped(entry, draw, SPEED_ROWS[0])]
        marks = [_mark(each, draw) for each in arguments]
        racers = [Racer(worker=self.baseline, entry=name) for name in ("twice", "run")]
        racers[0].prepare(arguments, marks)
        ratio = race(*racers)
        return ratio if ratio < self.floor else race(*racers, rounds=2 * ROUNDS)  # a busy machine

    def answer(self) -> SpeedAnswer:
        """``pass`` where the slowest shape reaches the floor."""
        if not self.ratios:
            return SpeedAnswer(status="not-run", floor=self.floor, goal=self.goal)
        worst = min(self.ratios)
        good = worst >= self.floor
        return SpeedAnswer(
            status="pass" if good else "fail",
            ratio=round(worst, 3),
            floor=self.floor,
            goal=self.goal,
            reached_goal=worst >= self.goal,
            baseline=", ".join(dict.fromkeys(self.served)),
            shapes=tuple(self.shapes),
            detail="" if good else f"ratio {worst:.2f} of the baseline's speed, floor {self.floor}",
        )


def _shaped(entry: Entry, draw: Draw, num_rows: int) -> list[Case]:
    """Three cases of one shape: the same sizes, other content."""
    state = draw.random.getstate()
    cases: list[Case] = []
    for number in range(SETS):
        draw.random.setstate(state)
        case = next(held_out(entry.contract, draw, quick=True, rows=(num_rows,)))
        cases.append(other_content(case, number))
    return cases


def _mark(arguments: Sequence[Any], draw: Draw) -> dict[str, int]:
    """Which element changes with every launch: somewhere in the first large float tensor."""
    for index, each in enumerate(arguments):
        if isinstance(each, Tensor) and each.dtype in _MARKED and each.numel() >= 2:
            return {"argument": index, "element": draw.random.randrange(each.numel())}
    return {"argument": -1, "element": 0}


_MARKED = frozenset((torch.float32, torch.bfloat16, torch.float16))
