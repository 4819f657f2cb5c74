"""Certified dispatch: an implementation may serve a contract only after it proved its bits here.

``choose`` is called on every operator call, so it is a dictionary lookup after the first time. The
first time it reads the stored certificates of the contract's implementations, proves the ones that
have none
(a sweep of a second or so) and stores the result; among the admitted it takes the fastest. An
implementation that differs is refused with a warning that names the first difference. When none is
left, the contract's own reference serves, with a warning: the same bits, slower. Never another
contract.

    run = choose("linear.chain.float32.cpu.v1").run
    y = run(x, weight, bias)

Nothing is proved inside a CUDA graph capture: call the operator once before capturing. ``recheck``
goes through the stored certificates and says which hold; ``zm kernels list`` and gate C0 show it.
"""

import contextlib
import importlib
import threading
import warnings
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from .contract import Contract, Implementation, get_contract, implementations
from .errors import ContractError, DiskError, NotCertifiedError

if TYPE_CHECKING:
    from .certificates import Certificate

TIE = 1.1  # speeds this close count as equal: the order of registration decides

_CHOSEN: dict[tuple[str, tuple[int, ...]], Implementation] = {}
_ADMITTED: dict[str, frozenset[str]] = {}
_DECIDING = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rechecked:
    """What became of one stored certificate.

    status: ``valid``; ``refused`` (valid, and says that the implementation is wrong); ``void``
    (something changed since); ``foreign`` (another machine, or nothing registered by that name);
    ``unreadable``.

        Rechecked(file="linear.chain...json", status="void", reason="the core code changed", ...)
    """

    file: str
    status: Literal["valid", "refused", "void", "foreign", "unreadable"]
    reason: str | None
    contract: str | None = None
    implementation: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def choose(contract_id: str, key: tuple[int, ...] = ()) -> Implementation:
    """The implementation that serves ``contract_id`` at ``key`` on this machine, proved before."""
    chosen = _CHOSEN.get((contract_id, key))
    return chosen if chosen is not None else _decide(contract_id, key)


def admitted(contract_id: str, name: str) -> bool:
    """Whether one implementation is proved here: for phases that have implementations of their own.

    Decides like :func:`choose`, so everything offered is proved at the first question.
    """
    if contract_id not in _ADMITTED:
        chosen = _decide(contract_id, ())
        _ADMITTED.setdefault(contract_id, frozenset({chosen.name}))  # adopted, not decided here
    return name in _ADMITTED[contract_id]


def first_admitted(contract_id: str, *names: str) -> str:
    """The first of ``names`` that is proved here, for phases that the reference cannot serve.

    NotCertifiedError where none is: nothing else may run in its place.
    """
    for name in names:
        if admitted(contract_id, name):
            return name
    raise NotCertifiedError(
        f"none of {', '.join(names)} gave the bits of {contract_id} on this machine; "
        f"`zm kernels certify {contract_id}` shows the first difference"
    )


def forget() -> None:
    """Drop this process's decisions; the next call of a contract reads its certificates again."""
    _CHOSEN.clear()
    _ADMITTED.clear()


def adopt(contract_id: str, name: str) -> None:
    """Take over a choice that another process of this machine proved: no file is read for it."""
    offered = (*implementations(contract_id), reference(contract_id))
    _CHOSEN[(contract_id, ())] = next(each for each in offered if each.name == name)


@contextlib.contextmanager
def substituted(contract_id: str, run: Callable[..., Any]) -> Generator[None]:
    """Another function serves ``contract_id`` until the block ends, unproved: to plant faults."""
    key = (contract_id, ())
    held = choose(contract_id)
    _CHOSEN[key] = Implementation(contract=contract_id, name="substituted", run=run)
    try:
        yield
    finally:
        _CHOSEN[key] = held


def reference(contract_id: str) -> Implementation:
    """The contract's frozen definition, as an implementation."""
    module, _, name = get_contract(contract_id).reference.partition(":")
    run = getattr(importlib.import_module(module), name, None)
    if run is None:
        raise ContractError(f"{contract_id} names a reference that does not exist: {module}:{name}")
    return Implementation(contract=contract_id, name="reference", run=run)


def _decide(contract_id: str, key: tuple[int, ...]) -> Implementation:
    with _DECIDING:
        if (contract_id, key) in _CHOSEN:
            return _CHOSEN[(contract_id, key)]
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            where = f"{contract_id} {key}" if key else contract_id
            raise NotCertifiedError(
                f"{where} is not certified, nor can it be inside a CUDA graph capture; run the "
                "operator once before capturing, or `zm kernels certify`"
            )
        contract = get_contract(contract_id)
        offered = implementations(contract_id)
        missing = {each.name: each.missing() for each in offered}
        able = [each for each in offered if missing[each.name] is None]
        # The caller's modes (an audit, a default device) are not about the sweep.
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            held = _certificates_of(contract, able, key)
        serving = [each for each in able if held[each.name].admitted]
        for each in able:
            if not held[each.name].admitted:
                _warn(f"{each.name} may not serve {contract_id}: it {held[each.name].reason}")
        if serving:
            speeds = {each.name: held[each.name].speed_ns or float("inf") for each in serving}
            bar = TIE * min(speeds.values())
            chosen = next(each for each in serving if speeds[each.name] <= bar)
        else:
            chosen = reference(contract_id)
            reasons = "; ".join(f"{name}: {why or 'refused'}" for name, why in missing.items())
            _warn(
                f"no implementation of {contract_id} may serve here ({reasons or 'none exists'}), "
                "so its reference does: the same bits, but slowly. `zm doctor` says what to install"
            )
        _ADMITTED.setdefault(contract_id, frozenset(each.name for each in serving))
        _CHOSEN[(contract_id, key)] = chosen
        return chosen


def _certificates_of(
    contract: Contract, candidates: list[Implementation], key: tuple[int, ...]
) -> dict[str, "Certificate"]:
    """The certificate of each candidate by name: stored ones that hold, the rest proved now."""
    from . import certificates, certify  # they import this module, and pydantic

    held = {}
    for each in candidates:
        found = certificates.load(contract, each, key)
        if found is not None:
            held[each.name] = found
    unproved = [each for each in candidates if each.name not in held]
    if unproved:
        for certificate in certify.prove(contract, unproved, quick=True, key=key):
            held[certificate.implementation] = certificate
            try:
                certificates.save(certificate, contract)
            except DiskError as error:
                _warn(f"{error}; until then every process proves its kernels again")
    return held


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def certificates() -> list["Certificate"]:
    """The stored certificates that hold on this machine now, refusals included."""
    return [
        found for found, checked in _stored() if checked.status in ("valid", "refused") and found
    ]


def recheck(*, rerun: bool = False) -> list[Rechecked]:
    """Every stored certificate and whether it holds; ``rerun`` also repeats the valid sweeps."""
    results = []
    for found, checked in _stored():
        again = _rerun(found) if rerun and found and checked.status == "valid" else None
        results.append(checked if again is None else _restated(checked, again))
    return results + _shapes(rerun=rerun)


def _shapes(*, rerun: bool) -> list[Rechecked]:
    """The files of shapes at which a pinned library algorithm was proved on a GPU."""
    from .linear import gpu_gemm, gpu_shapes

    results: list[Rechecked] = []
    for path in sorted(gpu_shapes.path_of("any").parent.glob("*.json")):
        found = gpu_shapes.read(path)
        status, reason = "unreadable", None
        if isinstance(found, str):
            reason = found
        elif not torch.cuda.is_available():
            status, reason = "foreign", "it is about a GPU, and there is none here"
        else:
            reason = found.void(*gpu_shapes.circumstances(found.contract))
            if reason is None and rerun:
                dtype = get_contract(found.contract).dtype
                reason = gpu_gemm.reprove(getattr(torch, dtype))
            status = "valid" if reason is None else "void"
        results.append(
            Rechecked(
                file=f"shapes/{path.name}",
                status=status,
                reason=reason,
                contract=path.stem,
                implementation="cublaslt",
            )
        )
    return results


def _restated(checked: Rechecked, reason: str) -> Rechecked:
    return Rechecked(
        file=checked.file,
        status="void",
        reason=reason,
        contract=checked.contract,
        implementation=checked.implementation,
    )


def _rerun(found: "Certificate") -> str | None:
    from . import certify

    offered = {each.name: each for each in implementations(found.contract)}
    contract, candidate = get_contract(found.contract), offered[found.implementation]
    again = certify.prove(contract, [candidate], quick=found.quick, seed=found.seed, key=found.key)[
        0
    ]
    if not again.admitted:
        return again.reason
    return (
        None
        if again.output_digest == found.output_digest
        else "the reference gives other outputs now"
    )


def _stored() -> list[tuple["Certificate | None", Rechecked]]:
    from . import certificates, certify

    certify.load_operators()
    results: list[tuple[Certificate | None, Rechecked]] = []
    for path, found in certificates.stored():
        if isinstance(found, str):
            results.append((None, Rechecked(file=path.name, status="unreadable", reason=found)))
            continue
        status, reason = _standing(found, path.name)
        checked = Rechecked(
            file=path.name,
            status=status,
            reason=reason,
            contract=found.contract,
            implementation=found.implementation,
        )
        results.append((found, checked))
    return results


def _standing(
    found: "Certificate", file: str
) -> tuple[Literal["valid", "refused", "void", "foreign"], str | None]:
    from . import certificates

    try:
        contract = get_contract(found.contract)
    except ContractError:
        return "foreign", f"no contract {found.contract} is registered"
    offered = {each.name: each for each in implementations(found.contract)}
    if found.implementation not in offered:
        return "foreign", f"no implementation {found.implementation} is registered"
    if contract.device != "cpu" and not torch.cuda.is_available():
        return "foreign", "it is about a GPU, and there is none here"
    if certificates.path_of(contract, found.implementation, found.key).name != file:
        return "foreign", f"it is about another machine: {found.environment.processor}"
    changed = certificates.void(found, contract, offered[found.implementation])
    if changed:
        return "void", changed
    return ("valid", None) if found.admitted else ("refused", found.reason)
