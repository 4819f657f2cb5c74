"""Questions two and three: how far from fp64, and do the gradients agree with autograd of it?

Both are asked on plain data, beside plain torch at the same dtype, and never decide about bits.
Errors are the largest absolute error over the largest magnitude of each tensor; accuracy sums them
over its cases, so that one lucky case decides nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...kernels import adversarial
from ...kernels.entry_points import Entry
from ...kernels.trial import outputs as parts_of
from .draw import Draw
from .formulas import Formula, wanted, widened
from .inputs import has_own_shapes, held_out
from .records import AccuracyAnswer, GradientAnswer

ROWS_OF_PLAIN = (9, 129)
MOST_TIMES_STOCK = 2.0


class PlainDraw(Draw):
    """The same shapes with normal numbers: cancelling ones say nothing about accuracy."""

    def rows(
        self, num_rows: int, width: int, *, scale: float = 1.0, kind: str | None = None
    ) -> Tensor:
        """Normal ``[num_rows, width]``."""
        return adversarial.rows(
            num_rows, width, seed=self.random.getrandbits(60), dtype=self.dtype,
            device=self.device, scale=scale, kind="plain",
        )  # fmt: skip


def plain_cases(entry: Entry, seed: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments) for accuracy and gradient."""
    contract = entry.contract
    if has_own_shapes(contract):
        for case in held_out(contract, PlainDraw(contract, seed), quick=True):
            yield case.label, case.arguments


def distance(got: Tensor, exact: Tensor) -> float:
    """Largest error over the largest magnitude of ``exact``; infinite where it is no number."""
    if exact.numel() == 0:
        return 0.0
    if got.shape != exact.shape:
        return float("inf")
    error = (got.double().cpu() - exact.double().cpu()).abs().max()
    scale = exact.double().abs().max().cpu()
    value = float(error / scale) if float(scale) else float(error)
    return value if value == value else float("inf")


@dataclass(slots=True, kw_only=True)
class Accuracy:
    """Errors of the forward, the candidate's and plain torch's. why: there is no formula."""

    formula: Formula | None
    why: str = ""
    error: float = 0.0
    stock: float = 0.0
    allowance: float = 0.0
    compared: int = 0

    def add(self, arguments: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        """One answer of the forward."""
        assert self.formula is not None
        run = self.formula.run
        with torch.no_grad():
            exact = parts_of(run(*widened(arguments)))
            plain = parts_of(run(*arguments))
        for got, true, stock in zip(outputs, exact, plain, strict=False):
            self.error += distance(got, true)
            self.stock += distance(stock, true)
            self.allowance += torch.finfo(got.dtype).eps if got.is_floating_point() else 0.0
            self.compared += got.numel()

    def answer(self) -> AccuracyAnswer:
        """``pass`` within twice plain torch's error and one rounding a tensor."""
        if self.formula is None:
            return AccuracyAnswer(status="not-applicable", detail=self.why)
        if self.compared == 0:
            return AccuracyAnswer(status="not-run", detail="no call of the forward succeeded")
        bound = MOST_TIMES_STOCK * self.stock + self.allowance
        good = self.error <= bound
        return AccuracyAnswer(
            status="pass" if good else "fail",
            error=self.error,
            stock_error=self.stock,
            compared=self.compared,
            detail="" if good else f"error {self.error:.3g}, at most {bound:.3g} is allowed",
        )


Wanted = Callable[[Entry, Sequence[Any]], list[Tensor | None] | None]


def of_contract(entry: Entry, arguments: Sequence[Any]) -> list[Tensor | None] | None:
    """fp64 gradients of a contract of this package."""
    return wanted(entry.contract.op, arguments)


@dataclass(slots=True, kw_only=True)
class Gradients:
    """Errors of the backwards against fp64 autograd, as a share of what is allowed."""

    names: tuple[str, ...]
    wanted: Wanted = of_contract
    error: float = 0.0
    tolerance: float = 0.0
    worst: str = ""
    share: float = 0.0
    compared: int = 0
    seen: set[str] = field(default_factory=set[str])
    without: set[str] = field(default_factory=set[str])

    def add(self, entry: Entry, arguments: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        """One answer of a backward."""
        exact = self.wanted(entry, arguments)
        if exact is None:
            self.without.add(entry.name)
            return
        self.seen.add(entry.name)
        true = [each for each in exact if each is not None]
        for number, (got, each) in enumerate(zip(outputs, true, strict=False), 1):
            error = distance(got, each)
            stored = torch.finfo(getattr(torch, entry.contract.dtype)).eps
            allowed = max(entry.contract.gradient_rtol, stored)
            self.compared += got.numel()
            if error / allowed >= self.share:
                self.share, self.error, self.tolerance = error / allowed, error, allowed
                self.worst = f"{entry.name}, output {number}"

    def answer(self) -> GradientAnswer:
        """``pass`` where every backward was judged and none is off."""
        if not self.names or self.without == set(self.names):
            detail = "the contract has no gradient of its own"
            detail = detail if not self.names else f"no fp64 formula for {sorted(self.without)}"
            return GradientAnswer(status="not-applicable", detail=detail)
        left = sorted(set(self.names) - self.seen - self.without)
        if self.compared == 0 or (left and self.share <= 1.0):
            return GradientAnswer(status="not-run", detail=f"no answer of {', '.join(left)}")
        good = self.share <= 1.0
        return GradientAnswer(
            status="pass" if good else "fail",
            error=self.error,
            tolerance=self.tolerance,
            compared=self.compared,
            detail="" if good else f"{self.worst}: error {self.error:.3g}",
        )
