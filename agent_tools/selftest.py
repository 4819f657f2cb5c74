"""The 1-ULP self-test: does this very set-up find one flipped bit?

A verdict counts only if the tool that gives it can see the smallest fault there is. On one short
request of the left side, run as it will be compared: the same run twice must be equal; with one
activation bit flipped the comparison must convict exactly that site, at that row; with one weight
bit flipped it must report MISALIGNED and name tensor and row.

    result = self_test(runner)
    result.passed, result.activation
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from torch import nn

from ..kernels import bits
from ..trainer.engines.base import Observer, Request
from .anchor import prove_alignment
from .compare import Comparison
from .flips import FlipBit
from .records import SelfTest
from .sides import Runner, closure
from .trace import Trace, Tracer

Fault = Callable[[Observer], Observer]
"""Plants a fault: takes an observer, returns one that disturbs what it sees."""


def self_test(runner: Runner, fault: Fault = lambda observer: observer) -> SelfTest:
    """Flip one activation bit and one weight bit; both must be found."""
    with runner.held():
        return _self_test(runner, fault)


def _self_test(runner: Runner, fault: Fault) -> SelfTest:
    assert runner.schedule is not None
    shortest = min(runner.requests, key=lambda request: len(request.tokens))
    names = closure([runner.schedule], [shortest.id])

    def run(extra: Fault = lambda observer: observer) -> Trace:
        tracer = Tracer()
        return runner.traced(extra(fault(tracer)), tracer, only=names)

    plain = run()
    again = Comparison(run(), plain, repeated=True)
    moved = again.count()[1]
    if moved:
        first = again.first()
        where = "" if first is None else f", first at {first.site}"
        repeats = f"the left side does not repeat itself: {moved} rows differ between two runs"
        return SelfTest(passed=False, activation=repeats + where, weight="not tried")
    site = runner.sites[len(runner.sites) // 2].name
    activation_found, activation = _activation(plain, site, _own_row(plain, shortest), run)
    weight_found, weight = weight_test(plain, runner.model.module)
    return SelfTest(passed=activation_found and weight_found, activation=activation, weight=weight)


def _own_row(plain: Trace, request: Request) -> tuple[str, int]:
    """A row in the middle of what ran: the request's own, where a prefix hit left it any.

    A hit takes leading rows from another request; those never run under this one's name.
    """
    name = [each.id for each in plain.requests].index(request.id)
    if name not in plain.table.request:
        name = int(plain.table.request[0])
    own = np.unique(plain.table.position[plain.table.request == name])
    return plain.requests[name].id, int(own[len(own) // 2])


def _activation(
    plain: Trace, site: str, row: tuple[str, int], run: Callable[[Fault], Trace]
) -> tuple[bool, str]:
    request, position = row

    def flip(observer: Observer) -> Observer:
        return FlipBit(observer, site=site, request=request, position=position, element=1)

    comparison = Comparison(run(flip), plain, repeated=True)
    convicted = [found for found in comparison.sites if found.affected]
    where = f"one bit of {site}, request {request}, position {position}"
    first = comparison.first()
    exact = (
        first is not None
        and [found.site for found in convicted] == [site]
        and (first.at.request, first.at.position) == row
    )
    if exact:
        return True, f"{where}: found there, and only there"
    named = ", ".join(found.site for found in convicted[:3]) or "nothing"
    return False, f"{where}: the comparison named {named}"


def weight_test(plain: Trace, module: nn.Module) -> tuple[bool, str]:
    """Whether one flipped bit of a weight is placed, and where."""
    name, tensor = next(iter(module.named_parameters()))
    row = tensor.shape[0] // 2
    changed = tensor.detach()[row : row + 1].clone()
    bits.int_view(changed).view(-1)[0] ^= 1
    digests = dict(plain.weights)
    digests[name] = digests[name].copy()
    digests[name][row] = bits.digest_rows(changed).cpu().numpy()[0]
    found = prove_alignment(plain, dataclasses.replace(plain, weights=digests)).misalignment
    right = found is not None and found.tensor == name and found.index == (row,)
    placed = "placed by digest" if right else "not placed"
    return right, f"one bit of {name}, row {row}: {placed}"
