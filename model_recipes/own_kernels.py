"""Kernels that a recipe brings for operators of this package: verified files, offered to dispatch.

    serve_own_kernel(Path("model_recipes/org/model"), recipe.kernels[0])

The recipe names file, digest and contract. The digest is compared before anything of the file is
parsed or run; then the static rules of ``zm verify`` are applied again, the C++ is compiled (once a
machine, compiler and text) and each function becomes an implementation of its contract. Certified
dispatch does the rest: it proves the implementation's bits on this machine at first use, refuses it
by name where they differ, and among those admitted takes the fastest. So a recipe's kernel serves
where it is right and pays, and a model's bits do not depend on whether it does.

Left out on purpose: contracts that this build does not know. There is no reference here that could
be held against them; :mod:`.extension` serves them, once a person has ticked them.
"""

import functools
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernels import certificates, certify, dispatch
from ..kernels.contract import (
    Contract,
    Implementation,
    contracts,
    implementations,
    register_implementation,
)
from ..kernels.cpu.load import cpu_flags
from ..kernels.entry_points import entries_of
from ..kernels.errors import DiskError, RecipeError
from .candidate import Source, check, parse_candidate
from .native import FLAGS, SECONDS, Native, command, compiler, errors_of, functions_of

if TYPE_CHECKING:
    from .schema import RecipeKernel

PREFIX = "recipe-"
"""How the names of such implementations begin."""
_SERVED: set[tuple[str, str]] = set()
_CLEAR = re.compile(r"[^A-Za-z0-9_]+")


def is_registered(contract_id: str) -> bool:
    """Whether a contract is one of this package's own; every other one waits for a person."""
    return contract_id in _known()


def is_served(own: "RecipeKernel") -> bool:
    """Whether this very kernel is offered to dispatch in this process."""
    return (own.contract, own.digest) in _SERVED


def _known() -> dict[str, Contract]:
    """The package's own contracts by id: those that extensions registered are not among them."""
    certify.load_operators()
    return {
        entry.id: entry for entry in contracts() if entry.reference.startswith("zeromismatch.")
    }


def serve_own_kernel(folder: Path, own: "RecipeKernel") -> tuple[Implementation, ...]:
    """Check, build and offer one kernel of a recipe; what dispatch may choose from now on.

    folder: the recipe's. RecipeError for another digest, a rule that the file breaks (a missing
    entry point is one) and C++ that does not compile; CapabilityError where a compiler is needed
    and missing. The contract is one that :func:`is_registered` knows.
    """
    path = folder / own.path
    content = _content(path, own)
    contract = _known()[own.contract]
    source = parse_candidate(path, content)
    entries = entries_of(contract)
    faults = check(source, {name: entry.parameters for name, entry in entries.items()})
    if faults:
        told = "; ".join(f"{fault.rule}: {fault.detail}" for fault in faults[:3])
        raise RecipeError(
            f"kernel {path} cannot serve {contract.id} ({told}); correct it until "
            f"`zm verify {path.name} --contract {contract.id}` is green"
        )
    name = _name(source, content)
    if any(each.name == name for each in implementations(contract.id)):
        return tuple(
            each for entry in entries.values() for each in implementations(entry.contract.id)
            if each.name == name
        )  # fmt: skip
    library = compile_cached(source)
    native = None if library is None else Native(str(library), source.symbols)
    functions = functions_of(content, str(path.resolve()), native)
    offered = tuple(
        register_implementation(
            Implementation(contract=entry.contract.id, name=name, run=functions[entry_name])
        )
        for entry_name, entry in entries.items()
    )
    dispatch.forget()  # what was decided without them
    _SERVED.add((own.contract, own.digest))
    return offered


def _content(path: Path, own: "RecipeKernel") -> bytes:
    """The file's bytes, once: what is compared is what runs."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"kernel {path} cannot be read ({error.strerror}); restore it or align again"
        ) from error
    found = hashlib.blake2b(content, digest_size=16).hexdigest()
    if found != own.digest:
        raise RecipeError(
            f"kernel {path} has digest {found}, the recipe certifies {own.digest}; restore the "
            "file, or verify the new one and write its digest into the recipe"
        )
    return content


def _name(source: Source, content: bytes) -> str:
    """Certificates go by it, so it changes with the file and with whatever compiles it."""
    total = hashlib.blake2b(content, digest_size=6)
    if source.cpp is not None:
        total.update(build_key(source.cpp).encode())
    return f"{PREFIX}{_CLEAR.sub('-', source.path.stem)}-{total.hexdigest()}"


@functools.cache
def _circumstances() -> str:
    """Compiler, flags and processor: what else decides the machine code."""
    path = compiler()
    told = subprocess.run(
        [path, "--version"], capture_output=True, text=True, check=False, timeout=SECONDS
    ).stdout
    return "\n".join((path, told, *FLAGS, *sorted(cpu_flags())))


def build_key(cpp: str) -> str:
    """Digest of C++ text, compiler, flags and processor: equal keys, equal machine code."""
    return hashlib.blake2b(f"{_circumstances()}\n{cpp}".encode(), digest_size=16).hexdigest()


def compile_cached(source: Source) -> Path | None:
    """The shared library of a kernel's ``CPP``, compiled once on this machine; None without one.

    It lies in ``~/.cache/zero-mismatch/native``. RecipeError with the compiler's words, DiskError
    where the cache cannot be written.
    """
    if source.cpp is None:
        return None
    folder = certificates.directory().parent / "native"
    library = folder / f"{build_key(source.cpp)}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as place:
            (Path(place) / "native.cpp").write_text(source.cpp)
            _compile(source, Path(place), library.name)
            os.replace(Path(place) / library.name, library)
    except OSError as error:
        raise DiskError(
            f"cannot compile {source.path.name} in {folder}: {error}; make room there, or set "
            "XDG_CACHE_HOME to a writable directory"
        ) from error
    return library


def _compile(source: Source, place: Path, name: str) -> None:
    try:
        done = subprocess.run(
            command(name, "native.cpp"), cwd=place, capture_output=True, text=True, check=False,
            timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RecipeError(
            f"the C++ of {source.path.name} did not compile in {SECONDS:.0f} s; make it smaller"
        ) from error
    if done.returncode != 0:
        raise RecipeError(
            f"the C++ of {source.path.name} does not compile: {errors_of(done.stderr)}; correct "
            "it, then `zm verify` it again"
        )
