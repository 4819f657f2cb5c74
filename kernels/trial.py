"""One implementation against its contract's reference, on one case in many variations.

A **case** is one set of arguments. The reference computes it once; an implementation must give the
same bits as it stands and again when repeated, with all memory one element off alignment, with rows
shuffled, one row alone, NaN in the neighbouring rows, and (full sweep) under other thread counts.
It must leave its inputs alone. The first difference ends the trial and is kept, coordinate and bits
included.

    trial = Trial(implementation=candidate)
    trial.run_case(Case(label="rows 7", arguments=(x, weight), rows=(0,)), expected, quick=True)
    trial.reason       # None, or why the candidate may not serve

Which cases exist is up to :mod:`.cases`, which verdict follows to :mod:`.certify`.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from . import adversarial, bits
from .contract import Implementation
from .errors import ContractError, ZeroMismatchError

THREADS = (1, 2, 3)
SPEED_SECONDS = 0.006
SPEED_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One set of arguments for a contract's reference and its implementations.

    rows: positions of the arguments whose dimension 0 is the outputs' row dimension; empty where
        rows cannot be moved freely (attention over a cache).

        Case(label="rows 7, 576 to 24", arguments=(x, weight, bias), rows=(0,))
    """

    label: str
    arguments: tuple[Any, ...]
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """Other arguments that must lead to known outputs.

    kept: rows of the output to compare (None: all); the others hold NaN. threads: to run under.
    """

    label: str
    arguments: tuple[Any, ...]
    expected: Sequence[Tensor]
    kept: Tensor | None = None
    threads: int | None = None


def outputs(result: Any) -> list[Tensor]:
    """The tensors that an operator returned."""
    return [result] if isinstance(result, Tensor) else [part for part in result if part is not None]


def _moved(case: Case, index: Tensor) -> tuple[Any, ...]:
    return tuple(
        each[index].contiguous() if place in case.rows and isinstance(each, Tensor) else each
        for place, each in enumerate(case.arguments)
    )


def _spoiled(each: Any, healthy: Tensor) -> Any:
    if not (isinstance(each, Tensor) and each.is_floating_point()):
        return each
    spoiled = torch.full_like(each, float("nan"))
    spoiled[healthy] = each[healthy]
    return spoiled


def _row_variations(case: Case, expected: Sequence[Tensor]) -> Iterator[Variation]:
    first = case.arguments[case.rows[0]]
    num_rows = first.shape[0]
    generator = torch.Generator().manual_seed(num_rows)
    order = torch.randperm(num_rows, generator=generator).to(first.device)
    yield Variation(
        label="rows shuffled",
        arguments=_moved(case, order),
        expected=[each[order] for each in expected],
    )
    for row in sorted({0, num_rows // 2, num_rows - 1}):
        one = torch.tensor([row], device=first.device)
        yield Variation(
            label=f"row {row} alone",
            arguments=_moved(case, one),
            expected=[each[one] for each in expected],
        )
    healthy = torch.arange(0, num_rows, 3, device=first.device)
    yield Variation(
        label="NaN in neighbouring rows",
        arguments=tuple(
            _spoiled(each, healthy) if place in case.rows else each
            for place, each in enumerate(case.arguments)
        ),
        expected=[each[healthy] for each in expected],
        kept=healthy,
    )


def variations(case: Case, expected: Sequence[Tensor], *, quick: bool) -> Iterator[Variation]:
    """The case itself, and everything that may not move a bit."""
    yield Variation(label="as it is", arguments=case.arguments, expected=expected)
    yield Variation(label="again", arguments=case.arguments, expected=expected)
    shifted = tuple(
        adversarial.misaligned(each) if isinstance(each, Tensor) else each
        for each in case.arguments
    )
    yield Variation(label="one element off alignment", arguments=shifted, expected=expected)
    if case.rows and case.arguments[case.rows[0]].shape[0] > 1:
        yield from _row_variations(case, expected)
    if not quick and expected[0].device.type == "cpu":
        for count in THREADS:
            yield Variation(
                label=f"{count} threads", arguments=case.arguments, expected=expected, threads=count
            )


def _poison_freed_memory(expected: Sequence[Tensor]) -> None:
    """Leave garbage in the allocator, so that an element nobody writes is not right by luck."""
    for each in expected:
        bits.int_view(torch.empty_like(each)).fill_(85)


def _digests(case: Case) -> list[str]:
    return [bits.digest_tensor(each) for each in case.arguments if isinstance(each, Tensor)]


@dataclass(slots=True, kw_only=True)
class Trial:
    """One implementation on its way through a sweep; ``reason`` is set when it has failed."""

    implementation: Implementation
    role: Literal["candidate", "red-control"] = "candidate"
    elements: int = 0
    differing: int = 0
    reason: str | None = None
    first_difference: str | None = None
    seconds: float = 0.0
    speed_ns: int | None = None

    def run_case(self, case: Case, expected: Sequence[Tensor], *, quick: bool) -> None:
        """Compare one case in all its variations."""
        started = time.perf_counter()
        before = _digests(case)
        try:
            for variation in variations(case, expected, quick=quick):
                self._compare(f"{case.label}, {variation.label}", variation)
                if self.differing:
                    self.reason = f"differs from the reference at {self.first_difference}"
                    break
            else:
                if _digests(case) != before:
                    self.reason = f"changes its inputs ({case.label})"
        except (ZeroMismatchError, RuntimeError) as error:  # a candidate may fail in its own way
            self.reason = f"fails on {case.label}: {type(error).__name__}: {error}"
        self.seconds += time.perf_counter() - started

    def measure(self, case: Case) -> None:
        """Shortest of a few calls on the case's rows, repeated: decides among the admitted."""
        arguments = case.arguments
        if case.rows:
            first = arguments[case.rows[0]]
            arguments = _moved(case, torch.arange(SPEED_ROWS, device=first.device) % first.shape[0])
        self.implementation.run(*arguments)
        times, started = [], time.perf_counter()
        while len(times) < 3 or time.perf_counter() - started < SPEED_SECONDS:
            begin = time.perf_counter_ns()
            result = self.implementation.run(*arguments)
            if outputs(result)[0].is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter_ns() - begin)
        self.speed_ns = min(times)

    def _compare(self, label: str, variation: Variation) -> None:
        _poison_freed_memory(variation.expected)
        got = outputs(self._run(variation))
        if len(got) != len(variation.expected):
            raise ContractError(
                f"{len(got)} outputs instead of {len(variation.expected)}; give the kernel its "
                "reference's signature"
            )
        for wanted, each in zip(variation.expected, got, strict=True):
            kept = each if variation.kept is None else each[variation.kept]
            difference = bits.first_difference(wanted, kept)
            self.elements += wanted.numel()
            if difference is not None:
                self.differing += difference.differing
                self.first_difference = self.first_difference or f"{label}, {difference}"

    def _run(self, variation: Variation) -> Any:
        if variation.threads is None:
            return self.implementation.run(*variation.arguments)
        before = torch.get_num_threads()
        torch.set_num_threads(variation.threads)
        try:
            return self.implementation.run(*variation.arguments)
        finally:
            torch.set_num_threads(before)
