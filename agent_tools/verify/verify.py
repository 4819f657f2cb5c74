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
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...kernels.contract import Contract, implementations
from ...kernels.dispatch import admitted, choose, reference
from ...kernels.entry_points import Entry, contract_for, entries_of
from ...kernels.errors import CapabilityError
from ...model_recipes.candidate import Source, check, read_candidate
from ...model_recipes.own_kernels import PREFIX
from . import controls
from .calls import Broken, Call, ask, raise_failure
from .clock import SPEED_ROWS, Clock
from .formulas import FORMULAS
from .inputs import has_own_shapes
from .judge import Accuracy, Gradients, plain_cases
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
from .sweep import Sweep, cases_of
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
    quick: bool = False,
    limits: Limits | None = None,
    allow_missing: Collection[str] = (),
    questions: Collection[Question] = QUESTIONS,
    nursery: Nursery | None = None,
    progress: Progress = lambda stage: None,
) -> Verification:
    """Judge a candidate file against a contract.

    quick: fewer shapes, the same questions. allow_missing: required isolations that the caller
    accepts to be without. questions: those to ask; any that stays open makes the verdict void, and
    bits are always asked. nursery: a running one to fork workers from, for one candidate after
    another.
    UsageError for a file or contract that cannot be used, CapabilityError where a required
    isolation, a compiler or the device is missing.
    """
    began = time.monotonic()
    definition, new = contract_for(contract)
    source = read_candidate(file)
    run = _Run(
        contract=definition,
        contract_id=contract,
        new=new,
        quick=quick,
        source=source,
        entries=entries_of(definition),
        limits=limits or Limits(),
        allowed=frozenset(allow_missing),
        questions=frozenset(questions),
        progress=progress,
    )
    run.violations += [
        Violation(rule=fault.rule, detail=fault.detail, where=fault.where)
        for fault in check(source, {name: e.parameters for name, e in run.entries.items()})
    ]
    if not run.violations:
        if definition.device != "cpu" and not torch.cuda.is_available():
            raise CapabilityError(
                f"{contract} is a contract of {definition.device} and there is no GPU here; verify "
                "on a machine that has one"
            )
        with tempfile.TemporaryDirectory(prefix="zm-verify-") as folder:
            if nursery is not None:
                run.judge(nursery, Path(folder))
            else:
                with Nursery(run.limits) as own:
                    run.judge(own, Path(folder))
    return run.report(round(time.monotonic() - began, 3))


@dataclass(slots=True, kw_only=True)
class _Run:
    contract: Contract
    contract_id: str
    new: bool
    quick: bool
    source: Source
    entries: dict[str, Entry]
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
        return "cpu" if self.contract.device == "cpu" else "cuda"

    def tick(self) -> None:
        """Called before every request: the whole verification has a limit too."""
        if time.monotonic() > self.deadline:
            raise StoppedError("time", f"was not done after {self.limits.wall_seconds:.0f} s")

    def judge(self, nursery: Nursery, folder: Path) -> None:
        """All questions; the first rule that ends a worker ends them."""
        (folder / "candidate.py").write_text(self.source.text)
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
        worker = nursery.start(folder, threads=threads, pattern=pattern, device=self.device)
        held = isolation(worker, self.allowed)
        self.isolation = self.isolation or held
        head: dict[str, Any] = {"do": "load", "source": "candidate.py"}
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
            for case, expected in cases_of(entry, seed, quick=self.quick, new=self.new):
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
        accuracy = Accuracy(op=self.contract.op, device=self.contract.device)
        backward = tuple(name for name in self.entries if name != "forward")
        judged = Gradients(names=backward)
        forwards: list[tuple[Any, list[Tensor]]] = []
        gradients: list[tuple[Entry, Any, list[Tensor]]] = []
        for entry in self.entries.values():
            question = "accuracy" if entry.name == "forward" else "gradient"
            if question not in self.questions:
                continue
            if entry.name == "forward" and not accuracy.applies():
                continue
            for label, arguments in plain_cases(entry, self._seed(entry) + 1):
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
        served = self._served(self.entries["forward"])
        asked = [call for call in calls if call.entry == "forward"]
        if served is not None and asked:
            trusted.ask({"do": "trust", **served}, seconds=60.0)
            self.controls.append(controls.stale_kernel(trusted, asked, pattern="nan"))
        trusted.end()
        if plain:
            op, device = self.contract.op, self.contract.device
            self.controls.append(controls.cut_mantissa(op, device, plain))
        if gradients and self.gradient.status in ("pass", "fail"):
            self.controls.append(controls.zero_gradient(gradients))

    def _served(self, entry: Entry) -> dict[str, Any] | None:
        """Who a candidate stands beside: the admitted implementation, else plain torch."""
        chosen = choose(entry.contract.id)
        if chosen.name.startswith(PREFIX):  # a recipe's, which a worker cannot find by its name
            chosen = next(
                (each for each in implementations(entry.contract.id)
                 if not each.name.startswith(PREFIX) and admitted(each.contract, each.name)),
                reference(entry.contract.id),
            )  # fmt: skip
        if chosen.name != "reference":
            module = getattr(chosen.run, "__module__", "") or ""
            modules = [module] if module.startswith("zeromismatch.") else []
            served = {"contract": entry.contract.id, "implementation": chosen.name}
            return {**served, "modules": modules}
        if entry.name == "forward" and self.contract.op in FORMULAS:
            return {"formula": self.contract.op}
        return None

    def _speed(self, nursery: Nursery, folder: Path, library: Path | None) -> None:
        self.progress("speed")
        candidate = self._candidate(nursery, folder, library, pattern=None)
        baseline = nursery.start(folder, device=self.device, trusted=True)
        clock = Clock(candidate=candidate, baseline=baseline, floor=FLOOR, goal=GOAL)
        rows = SPEED_ROWS[:1] if self.quick else SPEED_ROWS
        broken = {str(each.where).split(",")[0] for each in self.violations}
        for entry in self.entries.values():
            served = self._served(entry)
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
                    clock.measure(entry, name, self.seed, num_rows=num_rows, new=self.new)
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
        if self.new:
            review.append(f"{self.contract_id} is a new contract: its order and rounding are yours "
                          "to accept")  # fmt: skip
        for name, answer in (("accuracy", self.accuracy), ("gradient", self.gradient)):
            if answer.status == "not-applicable" and "formula" in answer.detail:
                review.append(f"{name} was not judged: {answer.detail}")
        secret = all(has_own_shapes(each.contract) for each in self.entries.values())
        if not self.violations and not secret:
            review.append("the shapes of this operator's cases are public, only the data is secret")
        if status == "pass" and review:
            status, reason = "needs-review", f"four times green; {review[0]}"
        return Verification(
            status=status,
            reason=reason,
            file=workspace_file(self.source.path),
            digest=hashlib.blake2b(self.source.path.read_bytes(), digest_size=16).hexdigest(),
            contract=self.contract_id,
            new_contract=self.new,
            needs_review=tuple(review),
            device=self.contract.device,
            quick=self.quick,
            isolation=self.isolation,
            violations=tuple(self.violations),
            bits=self.bits,
            accuracy=self.accuracy,
            gradient=self.gradient,
            speed=self.speed,
            controls=tuple(self.controls),
            hashes=digests(self.contract),
            seconds=seconds,
        )
