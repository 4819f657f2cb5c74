"""Certificates: the stored proof that one implementation serves a contract on one machine.

A certificate says what was compared (contract, implementation, cases, data seed, number of
elements, digest of the expected outputs) and under which circumstances (processor or GPU and
driver, library versions, digests of every source that makes the number). It holds for exactly those
circumstances: any change voids it, and the implementation is proved again. A refusal is stored in
the same form, with the first difference, so that it is named again without another sweep.

    ~/.cache/zero-mismatch/certificates/linear.chain.float32.cpu.v1--core-avx512--91b2e0c4.json

One JSON file each, replaced atomically; a file that cannot be read or that belongs elsewhere is
ignored and :func:`.dispatch.recheck` says why. What a *recipe* proves is something else
(``Evidence`` in ``model_recipes``). ``zm kernels certify`` writes full certificates;
:mod:`.dispatch` writes quick ones.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from .contract import Contract, Implementation
from .cpu.load import cpu_flags, library_digest
from .errors import DiskError
from .files import replace_whole

SCHEMA_VERSION = 1


class Environment(BaseModel):
    """Everything besides sources that an implementation's bits may depend on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    processor: str
    """Processor model, or GPU name."""
    features: str
    """Digest of the instruction-set flags, or the compute capability."""
    driver: str | None = None
    """GPU driver; None on a CPU."""
    torch: str
    triton: str | None = None
    """Triton's version; None on a CPU."""
    cuda: str | None = None
    """CUDA and cuBLAS as torch was built with; None on a CPU."""
    workspace: str | None = None
    """The cuBLAS workspace variables, which choose its algorithms; None on a CPU."""


class Certificate(BaseModel):
    """One implementation, proved or refused.

    Certificate(contract="linear.chain.float32.cpu.v1", implementation="core-avx512", admitted=True,
                key=(), quick=True, seed=0, cases=("rows 1, 40 to 24", ...), elements=10488,
                differing=0, ...)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    contract: str
    implementation: str
    role: Literal["candidate", "red-control"] = "candidate"
    """A red control is known to be wrong and must be refused by the same sweep."""
    admitted: bool
    reason: str | None = None
    """Why it was refused; None when admitted."""
    first_difference: str | None = None
    """Case and coordinate of the first differing element."""
    key: tuple[int, ...] = ()
    """The key it was proved at; empty: the cases of the contract's own sweep."""
    quick: bool
    """True for the short sweep at first use."""
    seed: int
    cases: tuple[str, ...]
    """What was compared: one label per case."""
    elements: int
    """Compared elements, over all cases and variations."""
    differing: int
    """Elements with other bits; 0 when admitted."""
    output_digest: str
    """Digest of all expected outputs, from the contract's reference."""
    sources: dict[str, str]
    """Digests of all code that makes the number: implementation, operators, compiled core."""
    environment: Environment
    seconds: float
    speed_ns: int | None = None
    """Shortest time on the largest case; None when refused. Decides among the admitted."""


def directory() -> Path:
    """``zero-mismatch/certificates`` under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zero-mismatch" / "certificates"


@functools.cache
def environment(device: str) -> Environment:
    """The circumstances on this machine: ``cpu``, or an architecture (the current GPU)."""
    if device == "cpu":
        flags = hashlib.blake2b(" ".join(sorted(cpu_flags())).encode(), digest_size=8).hexdigest()
        return Environment(processor=_processor(), features=flags, torch=torch.__version__)
    triton = importlib.import_module("triton")
    major, minor = torch.cuda.get_device_capability()
    names = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
    return Environment(
        processor=torch.cuda.get_device_name(),
        features=f"sm{major}{minor}",
        driver=_driver(),
        torch=torch.__version__,
        triton=triton.__version__,
        cuda=f"{torch.version.cuda}, cuBLAS {_cublas()}",
        workspace=" ".join(f"{name}={os.environ.get(name, '')}" for name in names),
    )


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    line = next((entry for entry in text.splitlines() if entry.startswith("model name")), None)
    return line.split(":", 1)[1].strip() if line else platform.machine()


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].strip()
    except OSError:
        return f"CUDA driver {torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]


def _cublas() -> str:
    for package in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of the system"


@functools.cache
def _folder_digest(folder: Path) -> str:
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.py")):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def _folder_of(function: Any) -> Path:
    while isinstance(function, functools.partial):
        function = function.func
    return Path(str(inspect.getsourcefile(inspect.unwrap(function)))).resolve().parent


@functools.cache
def _operators_digest(device: str) -> str:
    """All operator folders of this package, references included; without GPU code on a CPU."""
    folders = sorted(path for path in Path(__file__).resolve().parent.iterdir() if path.is_dir())
    total = hashlib.blake2b(digest_size=16)
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        if device != "cpu" or not (path.name.startswith("gpu") or path.parent.name == "gpu"):
            total.update(f"{path.parent.name}/{path.name}".encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def sources(contract: Contract, implementation: Implementation) -> dict[str, str]:
    """Digests of all code that may make the number: operators use one another, so all count."""
    digests = {
        "implementation": _folder_digest(_folder_of(implementation.run)),
        "operator": _operators_digest(contract.device),
    }
    return {**digests, "core": library_digest()} if contract.device == "cpu" else digests


def path_of(contract: Contract, implementation: str, key: tuple[int, ...]) -> Path:
    """The file of one certificate: one per contract, implementation, key and kind of machine."""
    here = environment(contract.device)
    place = hashlib.blake2b(f"{here.processor}/{here.features}/{key}".encode(), digest_size=4)
    return directory() / f"{contract.id}--{implementation}--{place.hexdigest()}.json"


def void(
    certificate: Certificate, contract: Contract, implementation: Implementation
) -> str | None:
    """What has changed since the certificate was written, or None while it holds."""
    here, there = environment(contract.device).model_dump(), certificate.environment.model_dump()
    changed = [
        f"{name}: {there[name]} is now {here[name]}" for name in here if here[name] != there[name]
    ]
    digests = sources(contract, implementation)
    names = sorted(digests.keys() | certificate.sources.keys())
    changed += [
        f"the {name} code changed"
        for name in names
        if digests.get(name) != certificate.sources.get(name)
    ]
    return "; ".join(changed) or None


def read(path: Path) -> Certificate | str:
    """The certificate in a file, or the reason why it cannot be used."""
    try:
        certificate = Certificate.model_validate_json(path.read_bytes())
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValidationError as error:
        return f"is not a certificate of this version: {error.errors()[0]['msg']}"
    if certificate.schema_version != SCHEMA_VERSION:
        return f"has schema version {certificate.schema_version}, not {SCHEMA_VERSION}"
    if not path.name.startswith(f"{certificate.contract}--{certificate.implementation}--"):
        return (
            f"belongs to {certificate.contract} {certificate.implementation}, not to its file name"
        )
    return certificate


def load(
    contract: Contract, implementation: Implementation, key: tuple[int, ...]
) -> Certificate | None:
    """The stored certificate that holds for this implementation here and now, or None."""
    found = read(path_of(contract, implementation.name, key))
    if isinstance(found, str) or found.key != key or void(found, contract, implementation):
        return None
    return found


def stored() -> Iterator[tuple[Path, Certificate | str]]:
    """Every file in the directory, read; sorted by name."""
    for path in sorted(directory().glob("*.json")):
        yield path, read(path)


def save(certificate: Certificate, contract: Contract) -> Path:
    """Write a temporary file, then rename it; DiskError where that cannot be done."""
    path = path_of(contract, certificate.implementation, certificate.key)
    try:
        return replace_whole(path, certificate.model_dump_json(indent=1))
    except OSError as error:
        raise DiskError(
            f"cannot store a certificate in {path.parent}: {error.strerror}; make room there, or "
            "set XDG_CACHE_HOME to a writable directory"
        ) from error
