"""The first question: is every call bit-equal to the reference, however it is asked?

    sweep = Sweep(worker=worker, pattern="nan", tick=deadline)
    for case, expected in cases_of(entry, seed, quick=False, new=False):
        sweep.run_case(entry, case, expected)
    sweep.differing, sweep.violations

Every case is asked as it is, again, off alignment, with rows shuffled, one row alone and NaN in the
neighbours' rows (``kernels/trial.py``), always in the memory of the call before where sizes allow.
A second worker gets all calls backwards, with two threads and other garbage in freed memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...kernels import bits
from ...kernels.dispatch import reference
from ...kernels.entry_points import Entry
from ...kernels.trial import Case, variations
from ...kernels.trial import outputs as parts_of
from .calls import Broken, Call, ask, compare
from .draw import Draw
from .inputs import held_out
from .records import Violation
from .watch import Worker

OFF = "one element off alignment"
AS_IS, FIRST = "as it is", "first answer"
OTHER = ", other content"
STALE = frozenset(("again", "rows shuffled"))
MOST_AGAIN = 10_000
Tick = Callable[[], None]


def calls_of(entry: Entry, case: Case, expected: Sequence[Tensor]) -> list[Call]:
    """A case in all its variations."""
    return [
        Call(
            entry=entry.name,
            label=case.label,
            variation=each.label,
            arguments=each.arguments,
            expected=each.expected,
            kept=each.kept,
            off=each.label == OFF,
        )
        for each in variations(case, expected, quick=True)
    ]


def cases_of(
    entry: Entry, seed: int, *, quick: bool, new: bool
) -> Iterator[tuple[Case, list[Tensor] | None]]:
    """Held-out cases and the reference's outputs; None where the contract is new."""
    run = reference(entry.contract.id).run
    with torch.no_grad():
        for case in held_out(entry.contract, Draw(entry.contract, seed), quick=quick):
            expected = parts_of(run(*case.arguments))
            yield case, None if new else expected
            if expected[0].numel() <= MOST_AGAIN:
                other = other_content(case)
                yield other, None if new else parts_of(run(*other.arguments))


def other_content(case: Case, step: int = 1) -> Case:
    """The same sizes and options, every float tensor rolled along its first dimension."""
    moved = tuple(
        each.roll(step, 0) if isinstance(each, Tensor) and _may_move(each) else each
        for each in case.arguments
    )
    return Case(label=f"{case.label}{OTHER}", arguments=moved, rows=case.rows)


def _may_move(tensor: Tensor) -> bool:
    """Numbers only: the pages of a cache hold NaN where nobody may look."""
    return tensor.is_floating_point() and bits.nonfinite(tensor) is None


@dataclass(slots=True, kw_only=True)
class Sweep:
    """One worker on its way through the calls; the first difference of an entry ends that entry."""

    worker: Worker
    pattern: str
    tick: Tick
    calls: int = 0
    elements: int = 0
    differing: int = 0
    first_difference: str | None = None
    violations: list[Violation] = field(default_factory=list[Violation])
    failed: dict[str, Call] = field(default_factory=dict[str, Call])
    sample: tuple[Call, list[Tensor]] | None = None
    """A call with a hundred rows or more and its outputs: what the red control flips a bit of."""

    def run(self, call: Call) -> list[Tensor] | None:
        """One call; None once its entry has failed."""
        if call.entry in self.failed:
            return None
        self.tick()
        try:
            outputs = ask(self.worker, call, pattern=self.pattern)
            elements, found = compare(call, outputs, pattern=self.pattern)
        except Broken as broken:
            self._fail(call, broken.rule, broken.detail)
            return None
        self.calls += 1
        self.elements += elements
        if found is not None:
            self.differing += found.differing
            stale = call.variation in STALE or call.label.endswith(OTHER)
            rule = "stale" if stale else "bits"
            self._fail(call, rule, str(found))
            return None
        got = [each for each in outputs if each is not None]
        if call.variation == AS_IS and got and got[0].dim() and got[0].shape[0] >= 100:
            self.sample = self.sample or (call, got)
        return got

    def _fail(self, call: Call, rule: str, detail: str) -> None:
        self.first_difference = self.first_difference or f"{call.where}: {detail}"
        self.violations.append(Violation(rule=rule, detail=detail, where=call.where))
        self.failed[call.entry] = call


    def run_case(
        self, entry: Entry, case: Case, expected: list[Tensor] | None
    ) -> tuple[list[Call], list[Tensor]] | None:
        """A case in all its variations; its calls and the first answer, None after a failure.

        Without expected outputs the first answer is what every other one must equal.
        """
        if expected is None:
            first = Call(
                entry=entry.name, label=case.label, variation=FIRST, arguments=case.arguments,
                expected=None,
            )  # fmt: skip
            try:
                outputs = ask(self.worker, first, pattern=self.pattern)
            except Broken as broken:
                self._fail(first, broken.rule, broken.detail)
                return None
            expected = [each for each in outputs if each is not None]
        calls = calls_of(entry, case, expected)
        answers = [self.run(call) for call in calls]
        whole = answers[0]
        if whole is None or any(each is None for each in answers):
            return None
        return calls, whole
