"""Prove implementations bit-equal to their contract's reference, on data made to show differences.

The sweep of an operator is a list of cases (:mod:`.cases` holds them); the reference computes each
once, and every candidate runs it in all variations of :mod:`.trial`. What comes out is a
certificate for each: admitted with zero differing bits, or refused with the first difference.

    >>> certify(["linear.chain.float32.cpu.v1"])          # doctest: +SKIP
    [Certificate(implementation='core-avx512', admitted=True, elements=2210880, differing=0, ...),
     Certificate(implementation='stock-torch', role='red-control', admitted=False, ...), ...]

Each full sweep also runs red controls: stock torch where a stock operator is registered, and the
first candidate with one bit flipped in one row of a hundred. A sweep that admits one of them proves
nothing and raises. Gradients are judged by tests, against fp64. ``zm kernels certify`` runs the
full sweep; :mod:`.dispatch` runs the quick one at first use.
"""

import concurrent.futures
import hashlib
import importlib
import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import bits, certificates, dispatch
from .certificates import Certificate
from .contract import Contract, Implementation, contracts, get_contract, implementations
from .errors import CapabilityError, ContractError, InconclusiveError
from .trial import Case, Trial, outputs

Cases = Callable[[Contract, bool, int, tuple[int, ...]], Iterable[Case]]
Progress = Callable[[str, int, int], None]

_CASES: dict[tuple[str, str | None], Cases] = {}
_STOCK: dict[str, Callable[..., Any]] = {}


def register_cases(op: str, cases: Cases, *, device: str | None = None) -> None:
    """``cases(contract, quick, seed, key)`` yields an operator's cases, on one device or all."""
    _CASES[(op, device)] = cases


def register_stock(contract_id: str, run: Callable[..., Any]) -> None:
    """The stock operator that a contract replaces: a red control with the reference's signature."""
    _STOCK[contract_id] = run


def load_operators() -> None:
    """Import every operator of this package, so that all its contracts are registered."""
    for path in sorted(Path(__file__).resolve().parent.glob("*/[cg]pu.py")):
        importlib.import_module(f"{__package__}.{path.parent.name}")


def _load_cases() -> None:
    """Register cases and stock operators."""
    importlib.import_module(f"{__package__}.cases")


def cases_of(
    contract: Contract, *, quick: bool, seed: int, key: tuple[int, ...] = ()
) -> Iterable[Case]:
    """The cases of a contract's sweep; ContractError where none are registered."""
    _load_cases()
    found = _CASES.get((contract.op, contract.device)) or _CASES.get((contract.op, None))
    if found is None:
        raise ContractError(
            f"no cases are registered for operator {contract.op!r}, so {contract.id} cannot be "
            "certified; call certify.register_cases for it"
        )
    cases = found(contract, quick, seed, key)
    # On a GPU each new shape is compiled, and first use should not wait for more than it needs.
    return itertools.islice(cases, 0, None, 2) if quick and contract.device != "cpu" else cases


def prove(
    contract: Contract,
    candidates: Sequence[Implementation],
    *,
    quick: bool,
    seed: int = 0,
    key: tuple[int, ...] = (),
    controls: Sequence[Implementation] = (),
    progress: Callable[[str], None] | None = None,
) -> list[Certificate]:
    """Run one sweep; a certificate per candidate and red control, nothing stored.

    InconclusiveError when the sweep has no cases or admits a red control.
    """
    reference = dispatch.reference(contract.id).run
    trials = [Trial(implementation=each) for each in candidates]
    trials += [Trial(implementation=each, role="red-control") for each in controls]
    labels, total, largest, size = [], hashlib.blake2b(digest_size=16), None, -1
    with torch.no_grad():
        for case in cases_of(contract, quick=quick, seed=seed, key=key):
            if progress is not None:
                progress(case.label)
            expected = outputs(reference(*case.arguments))
            for each in expected:
                total.update(bits.digest_tensor(each).encode())
            labels.append(case.label)
            elements = sum(each.numel() for each in expected)
            if elements > size:
                largest, size = case, elements
            for trial in trials:
                if trial.reason is None:
                    trial.run_case(case, expected, quick=quick)
        if largest is None:
            raise InconclusiveError(f"the sweep of {contract.id} has no cases; register some")
        for trial in trials:
            if trial.reason is None and trial.role == "candidate":
                trial.measure(largest)
    sweep = {"key": key, "quick": quick, "seed": seed, "cases": tuple(labels)}
    sweep |= {"output_digest": total.hexdigest()}
    return [_certificate(contract, trial, sweep) for trial in trials]


def _certificate(contract: Contract, trial: Trial, sweep: dict[str, Any]) -> Certificate:
    admitted = trial.reason is None
    if trial.role == "red-control" and not trial.differing:
        raise InconclusiveError(
            f"the sweep of {contract.id} sees no differing bit in {trial.implementation.name}, "
            f"which is known to be wrong ({trial.reason or 'admitted'}): it proves nothing; give "
            "the operator harder cases"
        )
    return Certificate(
        contract=contract.id,
        implementation=trial.implementation.name,
        role=trial.role,
        admitted=admitted,
        reason=trial.reason,
        first_difference=trial.first_difference,
        elements=trial.elements,
        differing=trial.differing,
        sources=certificates.sources(contract, trial.implementation),
        environment=certificates.environment(contract.device),
        seconds=round(trial.seconds, 3),
        speed_ns=trial.speed_ns,
        **sweep,
    )


def _one_bit_in_a_row(implementation: Implementation) -> Implementation:
    """The implementation with the lowest bit of one element flipped, in one row of a hundred."""

    def run(*arguments: Any) -> Any:
        result = implementation.run(*arguments)
        first = outputs(result)[0]
        if first.dim() and first.shape[0] >= 100 and first[0].numel():
            bits.int_view(first)[(73, *[0] * (first.dim() - 1))] ^= 1
        return result

    return Implementation(contract=implementation.contract, name="one-bit-in-one-row", run=run)


def _controls(contract: Contract, candidates: Sequence[Implementation]) -> list[Implementation]:
    _load_cases()
    controls = [_one_bit_in_a_row(candidates[0])] if candidates else []
    if contract.id in _STOCK:
        stock = _STOCK[contract.id]
        controls.append(Implementation(contract=contract.id, name="stock-torch", run=stock))
    return controls


def wanted(
    contract_ids: Sequence[str] | str | None = None,
) -> tuple[list[Contract], dict[str, str]]:
    """(contracts to prove here, why others of this machine's devices cannot be: id to reason).

    Default: all that this machine can run. CapabilityError where one that is named cannot.
    """
    load_operators()
    chosen = [contract_ids] if isinstance(contract_ids, str) else contract_ids
    here = {"cpu"} | (
        {certificates.environment("gpu").features} if torch.cuda.is_available() else set()
    )
    asked = [get_contract(each) for each in chosen] if chosen else list(contracts())
    able: list[Contract] = []
    left_out: dict[str, str] = {}
    for contract in asked:
        missing = [each.missing() for each in implementations(contract.id)]
        if contract.device not in here:
            reason = f"it is about {contract.device}, and here is {', '.join(sorted(here))}"
        elif missing and None not in missing:
            reason = str(missing[0])
        else:
            able.append(contract)
            continue
        if chosen:
            raise CapabilityError(
                f"{contract.id} cannot be proved: {reason}; certify it on a machine that can run it"
            )
        if contract.device in here:
            left_out[contract.id] = reason
    return able, left_out


def certify(
    contract_ids: Sequence[str] | str | None = None,
    *,
    quick: bool = False,
    seed: int = 0,
    jobs: int = 1,
    progress: Progress | None = None,
) -> list[Certificate]:
    """Prove contracts (default: all that this machine can run) afresh and store the certificates.

    jobs: processes side by side, each on a contract of its own. progress: called with (contract id
    and case, contracts done, contracts in all). The red controls are part of the result, but are
    not stored. Implementations that cannot run here are left out, contracts without one too
    (:func:`wanted` says why).
    """
    able, _ = wanted(contract_ids)
    if jobs > 1:
        return _side_by_side([each.id for each in able], quick, seed, jobs, progress)
    results: list[Certificate] = []
    for done, contract in enumerate(able):

        def report(label: str, done: int = done, name: str = contract.id) -> None:
            if progress is not None:
                progress(f"{name}: {label}", done, len(able))

        candidates = [each for each in implementations(contract.id) if each.missing() is None]
        controls = [] if quick else _controls(contract, candidates)
        proved = prove(
            contract, candidates, quick=quick, seed=seed, controls=controls, progress=report
        )
        for certificate in proved:
            if certificate.role == "candidate":
                certificates.save(certificate, contract)
        results += proved
    dispatch.forget()
    return results


def _side_by_side(
    ids: list[str], quick: bool, seed: int, jobs: int, progress: Progress | None
) -> list[Certificate]:
    """Each contract in one of several fresh processes (CUDA cannot be forked), ids' order kept."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        running = [pool.submit(certify, [each], quick=quick, seed=seed) for each in ids]
        names = dict(zip(running, ids, strict=True))
        try:
            for done, ended in enumerate(concurrent.futures.as_completed(running), start=1):
                ended.result()
                if progress is not None:
                    progress(names[ended], done, len(ids))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    dispatch.forget()
    return [certificate for each in running for certificate in each.result()]
