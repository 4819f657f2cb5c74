"""``zm verify`` as a function: one candidate, four questions, one verdict.

    report = verify_kernel(Path("fast_norm.py"), "rmsnorm.lanes16.float32.cpu.v1")

Order: the static rules; then, in processes that were shown to be confined, bits (twice, the second
time backwards), accuracy, gradients and speed; then the controls. A rule that ends the worker ends
the verification; a wrong bit does not, so that all four questions get an answer.
"""

import hashlib
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...kernels.entry_points import Entry
from ...kernels.errors import CapabilityError
from ...model_recipes.candidate import (
    OWN_ENTRIES,
    Fault,
    Source,
    check,
    read_candidate,
    without_grants,
)
from . import controls
from .calls import Broken, Call, ask, raise_failure
from .clock import SPEED_ROWS, Clock
from .judge import Accuracy, Gradients
from .native import compile_native
from .records import (
    AccuracyAnswer,
    BitsAnswer,
    Control,
    GradientAnswer,
    Isolation,
    Limits,
    SpeedAnswer,
    Verification,
    Violation,
    workspace_file,
)
from .subject import Subject, registered
from .sweep import Sweep
from .verdict import conclude, digests
from .watch import Nursery, StoppedError, Worker, isolation

Progress = Callable[[str], None]
Question = Literal["bits", "accuracy", "gradient", "speed"]
QUESTIONS: tuple[Question, ...] = ("bits", "accuracy", "gradient", "speed")
FLOOR, GOAL = 0.7, 0.95


def verify_kernel(
    file: Path,
    contract: str,
    *,
    model: str | None = None,
    quick: bool = False,
    limits: Limits | None = None,
    allow_missing: Collection[str] = (),
    questions: Collection[Question] = QUESTIONS,
    nursery: Nursery | None = None,
    progress: Progress = lambda stage: None,
) -> Verification:
    """Judge a candidate file against a contract.

    model: the one that brings the operator, for a file with a CONTRACT and MODULES of its own; its
    code runs here. quick: fewer shapes, the same questions. allow_missing: required isolations that
    the caller accepts to be without. questions: those to ask; any that stays open makes the verdict
    void, and bits are always asked. nursery: a running one to fork workers from, for one candidate
    after another.
    UsageError for a file or contract that cannot be used, CapabilityError where a required
    isolation, a compiler or the device is missing.
    """
    began = time.monotonic()
    source = read_candidate(file)
    subject = None if source.declared is not None else registered(contract)
    wanted = {n: e.parameters for n, e in subject.entries.items()} if subject else OWN_ENTRIES
    faults = check(source, wanted)
    if subject is None and faults:
        return _unread(source, contract, faults, round(time.monotonic() - began, 3))
    if subject is None:
        from .own_operator import own_operator

        progress("reading the model")
        subject = own_operator(source, contract, model)
    run = _Run(
        subject=subject,
        quick=quick,
        source=source,
        limits=limits or Limits(),
        allowed=frozenset(allow_missing),
        questions=frozenset(questions),
        progress=progress,
    )
    run.violations += _violations(faults)
    if not run.violations:
        if subject.device != "cpu" and not torch.cuda.is_available():
            raise CapabilityError(
                f"{contract} is a contract of {subject.contract.device} and there is no GPU here; "
                "verify on a machine that has one"
            )
        with tempfile.TemporaryDirectory(prefix="zm-verify-") as folder:
            if nursery is not None:
                run.judge(nursery, Path(folder))
            else:
                with Nursery(run.limits) as own:
                    run.judge(own, Path(folder))
    return run.report(round(time.monotonic() - began, 3))


def _violations(faults: Sequence[Fault]) -> list[Violation]:
    return [Violation(rule=each.rule, detail=each.detail, where=each.where) for each in faults]


def _unread(
    source: Source, contract: str, faults: Sequence[Fault], seconds: float
) -> Verification:
    """The report on a file whose text is refused before anybody asks what it is about."""
    violations = _violations(faults)
    status, reason = conclude(violations, (), ())
    return Verification(
        status=status, reason=reason, file=workspace_file(source.path),
        digest=hashlib.blake2b(source.path.read_bytes(), digest_size=16).hexdigest(),
        contract=contract, new_contract=True, device="cpu", violations=tuple(violations),
        bits=BitsAnswer(status="not-run"), accuracy=AccuracyAnswer(status="not-run"),
        gradient=GradientAnswer(status="not-run"), speed=SpeedAnswer(status="not-run"),
        seconds=seconds,
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Run:
    subject: Subject
    quick: bool
    source: Source
    limits: Limits
    allowed: frozenset[str]
    questions: frozenset[str]
    progress: Progress
    seed: int = field(default_factory=lambda: secrets.randbits(60))
    deadline: float = 0.0
    isolation: Isolation | None = None
    bits: BitsAnswer = field(default_factory=lambda: BitsAnswer(status="not-run"))
    accuracy: AccuracyAnswer = field(default_factory=lambda: AccuracyAnswer(status="not-run"))
    gradient: GradientAnswer = field(default_factory=lambda: GradientAnswer(status="not-run"))
    speed: SpeedAnswer = field(default_factory=lambda: SpeedAnswer(status="not-run"))
    violations: list[Violation] = field(default_factory=list[Violation])
    controls: list[Control] = field(default_factory=list[Control])

    @property
    def device(self) -> str:
        return self.subject.device

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self.subject.entries

    def tick(self) -> None:
        """Called before every request: the whole verification has a limit too."""
        if time.monotonic() > self.deadline:
            raise StoppedError("time", f"was not done after {self.limits.wall_seconds:.0f} s")

    def judge(self, nursery: Nursery, folder: Path) -> None:
        """All questions; the first rule that ends a worker ends them."""
        (folder / "candidate.py").write_text(without_grants(self.source))
        self.progress("starting the workers")
        try:
            library = compile_native(nursery, folder, self.source)
            self.deadline = time.monotonic() + self.limits.wall_seconds
            first = self._candidate(nursery, folder, library, pattern="nan")
            sweep, calls = self._bits(nursery, folder, library, first)
            plain, gradients = self._accuracy(first)
            first.end()
            if not self.violations:
                self._controls(nursery, folder, sweep, calls, plain, gradients)
            if "speed" in self.questions:
                self._speed(nursery, folder, library)
        except StoppedError as stopped:
            self.violations.append(Violation(rule=stopped.rule, detail=stopped.detail))
        finally:
            nursery.end_workers()

    def _candidate(
        self, nursery: Nursery, folder: Path, library: Path | None, *, pattern: str | None,
        threads: int = 1,
    ) -> Worker:  # fmt: skip
        worker = nursery.start(
            folder, threads=threads, pattern=pattern, device=self.device,
            operators=self.subject.operators,
        )  # fmt: skip
        held = isolation(worker, self.allowed)
        self.isolation = self.isolation or held
        head: dict[str, Any] = {"do": "load", "source": "candidate.py", **self.subject.load}
        if library is not None:
            head |= {"library": str(library), "symbols": list(self.source.symbols)}
        answer, _ = worker.ask(head)
        if "error" in answer:
            detail = f"does not load: {answer['error']}: {answer.get('text', '')}"
            raise StoppedError("load", detail)
        return worker

    def _bits(
        self, nursery: Nursery, folder: Path, library: Path | None, worker: Worker
    ) -> tuple[Sweep, list[Call]]:
        sweep = Sweep(worker=worker, pattern="nan", tick=self.tick)
        calls: list[Call] = []
        for entry in self.entries.values():
            self.progress(f"bits of {entry.name}")
            seed = self._seed(entry)
            for case, expected in self.subject.cases(entry, seed, quick=self.quick):
                done = sweep.run_case(entry, case, expected)
                if done is None:
                    break
                calls += done[0]
        worker.check_idle()
        if not sweep.failed:
            self.progress("bits once more, backwards")
            self._backwards(nursery, folder, library, calls, sweep)
        self.violations += sweep.violations
        self.bits = BitsAnswer(
            status="fail" if sweep.violations else "pass" if sweep.elements else "not-run",
            calls=sweep.calls,
            elements=sweep.elements,
            differing=sweep.differing,
            first_difference=sweep.first_difference,
        )
        return sweep, calls

    def _backwards(
        self, nursery: Nursery, folder: Path, library: Path | None, calls: list[Call], first: Sweep
    ) -> None:
        """Another worker, the calls in reverse order, two threads, other garbage in memory."""
        worker = self._candidate(nursery, folder, library, pattern="other", threads=2)
        second = Sweep(worker=worker, pattern="other", tick=self.tick)
        for call in reversed(calls):
            second.run(call)
        worker.check_idle()
        for name, call in second.failed.items():
            fresh = self._candidate(nursery, folder, library, pattern="other")
            alone = Sweep(worker=fresh, pattern="other", tick=self.tick)
            alone.run(call)
            rule = "memory-content" if alone.failed else "order"
            found = next(each for each in second.violations if each.where == call.where)
            first.violations.append(Violation(rule=rule, detail=found.detail, where=found.where))
            first.failed[name] = call
        first.calls += second.calls
        first.elements += second.elements
        first.differing += second.differing
        first.first_difference = first.first_difference or second.first_difference
        worker.end()

    def _accuracy(
        self, worker: Worker
    ) -> tuple[list[tuple[Any, list[Tensor]]], list[tuple[Entry, Any, list[Tensor]]]]:
        self.progress("accuracy and gradients")
        accuracy = Accuracy(formula=self.subject.formula, why=self.subject.why_no_formula)
        backward = tuple(name for name in self.entries if name != "forward")
        judged = Gradients(names=backward, wanted=self.subject.gradients)
        forwards: list[tuple[Any, list[Tensor]]] = []
        gradients: list[tuple[Entry, Any, list[Tensor]]] = []
        for entry in self.entries.values():
            question = "accuracy" if entry.name == "forward" else "gradient"
            if question not in self.questions:
                continue
            if entry.name == "forward" and accuracy.formula is None:
                continue
            for label, arguments in self.subject.plain(entry, self._seed(entry) + 1):
                outputs = self._plain(worker, entry, label, arguments)
                if outputs is None:
                    break
                if entry.name == "forward":
                    accuracy.add(arguments, outputs)
                    forwards.append((arguments, outputs))
                else:
                    judged.add(entry, arguments, outputs)
                    gradients.append((entry, arguments, outputs))
        self.accuracy, self.gradient = accuracy.answer(), judged.answer()
        if self.accuracy.status == "fail":
            self.violations.append(Violation(rule="accuracy", detail=self.accuracy.detail))
        if self.gradient.status == "fail":
            self.violations.append(Violation(rule="gradient", detail=self.gradient.detail))
        return forwards, gradients

    def _plain(
        self, worker: Worker, entry: Entry, label: str, arguments: tuple[Any, ...]
    ) -> list[Tensor] | None:
        self.tick()
        call = Call(
            entry=entry.name, label=label, variation="plain data", arguments=arguments,
            expected=None,
        )  # fmt: skip
        try:
            outputs = ask(worker, call, pattern="nan")
        except Broken as broken:
            found = Violation(rule=broken.rule, detail=broken.detail, where=call.where)
            self.violations.append(found)
            return None
        return [each for each in outputs if each is not None]

    def _controls(
        self, nursery: Nursery, folder: Path, sweep: Sweep, calls: list[Call],
        plain: list[tuple[Any, list[Tensor]]], gradients: list[tuple[Entry, Any, list[Tensor]]],
    ) -> None:  # fmt: skip
        if self.isolation is not None and self.device == "cpu":
            self.controls += controls.isolation_controls(nursery, folder, self.isolation)
        if sweep.sample is not None:
            self.controls.append(controls.flipped_bit(*sweep.sample, pattern="nan"))
        trusted = nursery.start(folder, pattern="nan", device=self.device, trusted=True)
        served = self.subject.served(self.entries["forward"])
        asked = [call for call in calls if call.entry == "forward"]
        if served is not None and asked:
            trusted.ask({"do": "trust", **served}, seconds=60.0)
            self.controls.append(controls.stale_kernel(trusted, asked, pattern="nan"))
        trusted.end()
        if plain and self.subject.formula is not None:
            self.controls.append(controls.cut_mantissa(self.subject.formula, plain))
        if gradients and self.gradient.status in ("pass", "fail"):
            self.controls.append(controls.zero_gradient(self.subject.gradients, gradients))

    def _speed(self, nursery: Nursery, folder: Path, library: Path | None) -> None:
        if not self.subject.races:
            self.speed = SpeedAnswer(status="not-applicable", detail=self.subject.why_no_race)
            return
        self.progress("speed")
        candidate = self._candidate(nursery, folder, library, pattern=None)
        baseline = nursery.start(folder, device=self.device, trusted=True)
        clock = Clock(candidate=candidate, baseline=baseline, floor=FLOOR, goal=GOAL)
        rows, new = SPEED_ROWS[:1] if self.quick else SPEED_ROWS, self.subject.new
        broken = {str(each.where).split(",")[0] for each in self.violations}
        for entry in self.entries.values():
            served = self.subject.served(entry)
            if served is None or entry.name in broken:
                continue
            answer, _ = baseline.ask({"do": "trust", **served}, seconds=60.0)
            raise_failure(answer)
            if entry.name == "forward":
                ratio = clock.control(entry, self.seed)
                self.controls.append(controls.twice_as_slow(ratio, FLOOR))
            for num_rows in rows:
                self.tick()
                try:
                    name = served.get("implementation", "plain torch")
                    clock.measure(entry, name, self.seed, num_rows=num_rows, new=new)
                except Broken as found:
                    where = f"{entry.name}, {num_rows} rows"
                    rule, detail = found.rule, found.detail
                    self.violations.append(Violation(rule=rule, detail=detail, where=where))
                    break
        candidate.check_idle()
        self.speed = clock.answer()
        if self.speed.status == "fail":
            self.violations.append(Violation(rule="speed", detail=self.speed.detail))

    def _seed(self, entry: Entry) -> int:
        return self.seed + list(self.entries).index(entry.name) * 1_000_003

    def report(self, seconds: float) -> Verification:
        """The verdict."""
        questions = (self.bits, self.accuracy, self.gradient, self.speed)
        status, reason = conclude(self.violations, self.controls, questions)
        review: list[str] = []
        subject = self.subject
        if subject.new:
            accept = "is a new contract: its order and rounding are yours to accept"
            review.append(f"{subject.contract_id} {accept}")
        for name, answer in (("accuracy", self.accuracy), ("gradient", self.gradient)):
            if answer.status == "not-applicable" and "formula" in answer.detail:
                review.append(f"{name} was not judged: {answer.detail}")
        if not self.violations and not subject.secret and not subject.new:
            review.append("the shapes of this operator's cases are public, only the data is secret")
        if status == "pass" and review:
            status, reason = "needs-review", f"{reason}; for a person: {review[0]}"
        return Verification(
            status=status,
            reason=reason,
            file=workspace_file(self.source.path),
            digest=hashlib.blake2b(self.source.path.read_bytes(), digest_size=16).hexdigest(),
            contract=subject.contract_id,
            new_contract=subject.new,
            needs_review=tuple(review),
            device=subject.contract.device,
            quick=self.quick,
            isolation=self.isolation,
            violations=tuple(self.violations),
            bits=self.bits,
            accuracy=self.accuracy,
            gradient=self.gradient,
            speed=self.speed,
            controls=tuple(self.controls),
            hashes=digests(subject.contract),
            seconds=seconds,
        )
