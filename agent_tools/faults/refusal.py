"""Why the sweep refused a kernel: experiments on the case that it failed, against the reference.

cause = cause_of_refusal(served.run, reference.run, case)
cause.name, cause.detail           # "tie-break", "equal to the reference where no scores ..."

experiment    what it does                                      a difference means
again         the same arguments three times                    nondeterminism
threads       under one, two and three threads                  reduction order
neighbours    NaN in the other rows                             batch leak
no ties       choices only: scores of which no two are equal    none left: tie-break
size          error against the reference, in norm              over 1/32: wrong formula
one term      the first argument has one number in each row     none left: reduction order;
                                                                still one: rounding point
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import bits
from ...kernels.trial import THREADS, Case, outputs
from ..cause import conclude
from ..records import Cause, Probe

Kernel = Callable[..., Any]
FAR = 1 / 32
"""No order or rounding moves a whole tensor by as much."""


def cause_of_refusal(run: Kernel, reference: Kernel, case: Case) -> Cause:
    """The class that the experiments decide on."""
    own = outputs(run(*case.arguments))
    probes = [_again(run, case, own), _threads(run, case, own), _neighbours(run, case, own)]
    if not own[0].is_floating_point():
        return conclude([*probes, _no_ties(run, reference, case)])
    probes.append(_size(run, reference, case))
    if probes[-1].decided is None:
        probes.append(_term(run, reference, case))
    return conclude(probes)


def _equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(bits.equal(mine, theirs) for mine, theirs in zip(left, right, strict=True))


def _again(run: Kernel, case: Case, own: Sequence[Tensor]) -> Probe:
    other = sum(not _equal(outputs(run(*case.arguments)), own) for _ in range(3))
    return Probe(
        name="again", result=f"{other} of 3 repeats gave other bits",
        decided="nondeterminism" if other else None,
    )  # fmt: skip


def _threads(run: Kernel, case: Case, own: Sequence[Tensor]) -> Probe:
    before, other = torch.get_num_threads(), []
    try:
        for count in THREADS:
            torch.set_num_threads(count)
            if not _equal(outputs(run(*case.arguments)), own):
                other.append(count)
    finally:
        torch.set_num_threads(before)
    result = f"other bits under {', '.join(map(str, other)) or 'no other number of'} threads"
    return Probe(name="threads", result=result, decided="reduction order" if other else None)


def _neighbours(run: Kernel, case: Case, own: Sequence[Tensor]) -> Probe:
    rows = own[0].shape[0] if case.rows else 0
    if rows < 2 or not own[0].is_floating_point():
        return Probe(name="neighbours", result="there are none")
    arguments = [
        _others_nan(each) if place in case.rows and each.is_floating_point() else each
        for place, each in enumerate(case.arguments)
    ]
    kept = [(each[:1], mine[:1]) for each, mine in zip(outputs(run(*arguments)), own, strict=True)
            if mine.shape[:1] == (rows,)]  # fmt: skip
    leaks = not all(bits.equal(*pair) for pair in kept)
    result = f"with NaN in the other rows, the first row {'changes' if leaks else 'stays'}"
    return Probe(name="neighbours", result=result, decided="batch leak" if leaks else None)


def _others_nan(tensor: Tensor) -> Tensor:
    spoiled = torch.full_like(tensor, float("nan"))
    spoiled[0] = tensor[0]
    return spoiled


def _no_ties(run: Kernel, reference: Kernel, case: Case) -> Probe:
    scores, *rest = case.arguments
    noise = torch.rand(scores.shape, generator=torch.Generator().manual_seed(0)).to(scores)
    same = _equal(outputs(run(noise, *rest)), outputs(reference(noise, *rest)))
    result = f"on scores of which no two are equal, {'equal' if same else 'other choices'}"
    return Probe(name="no ties", result=result, decided="tie-break" if same else "wrong formula")


def _size(run: Kernel, reference: Kernel, case: Case) -> Probe:
    generator = torch.Generator().manual_seed(0)
    plain = [
        (0.5 + 1.5 * torch.rand(each.shape, generator=generator)).to(each)
        if isinstance(each, Tensor) and each.is_floating_point()
        else each
        for each in case.arguments
    ]
    pairs = zip(outputs(run(*plain)), outputs(reference(*plain)), strict=True)
    worst = max(
        float((own.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-300))
        for own, wanted in pairs
    )
    return Probe(
        name="size", result=f"on plain numbers {worst:.1e} of the reference's norm away",
        decided=None if worst <= FAR else "wrong formula",
    )  # fmt: skip


def _term(run: Kernel, reference: Kernel, case: Case) -> Probe:
    first, *rest = case.arguments
    single = torch.zeros_like(first)
    flat = single.view(first.shape[0], -1)
    for row in range(first.shape[0]):
        flat[row, row * 7919 % flat.shape[1]] = 0.5 + (row + 1) * 0.6180339 % 0.5
    same = _equal(outputs(run(single, *rest)), outputs(reference(single, *rest)))
    result = f"with one term in every sum, {'equal' if same else 'still other'} bits"
    return Probe(
        name="one term", result=result, decided="reduction order" if same else "rounding point"
    )
