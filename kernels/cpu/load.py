"""Load the compiled CPU core (ctypes, no torch headers) and pick a variant of it.

The shared library holds every operator three times: ``avx512``, ``avx2`` and ``portable``. All
three have the same bits (each is proved before it serves): the choice is speed. ``make install``
builds the library; without a C++ compiler the build is skipped and :func:`core` says what to do.

    >>> core().name                                   # doctest: +SKIP
    'avx512'
"""

import ctypes
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch  # loads libgomp first, so that both share one thread pool

from ..errors import CapabilityError, ContractError

VARIANTS = ("avx512", "avx2", "portable")
DOTS = "avx512bf16"
"""The avx512 variant with bf16 products by the processor's dot instruction (``gemm_tiles.h``)."""
_NEEDS = {"avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}, "avx2": {"avx2", "fma"}}


@dataclass(frozen=True, slots=True)
class Core:
    """One variant of the CPU core. ``core.call("gemm", ...)`` runs ``zm_<variant>_gemm``."""

    name: str
    library: ctypes.CDLL
    entries: dict[str, Callable[..., None]] = field(default_factory=dict[str, Callable[..., None]])

    def call(self, function: str, *arguments: Any) -> None:
        """Call a core function: tensors become pointers, ints int64, floats fp32, None null."""
        entry = self.entries.get(function)
        if entry is None:
            kinds = [_KINDS.get(type(argument), ctypes.c_void_p) for argument in arguments]
            entry = _entry(self.library, f"zm_{self.name}_{function}", kinds)
            self.entries[function] = entry
        entry(*[_plain(argument) for argument in arguments])


_KINDS: dict[type, Any] = {int: ctypes.c_int64, bool: ctypes.c_int64, float: ctypes.c_float}
_PLAIN = frozenset({int, bool, float, type(None)})  # isinstance would cost 0.3 us each


def _plain(argument: Any) -> Any:
    if type(argument) in _PLAIN:
        return argument
    if not isinstance(argument, torch.Tensor):
        raise ContractError(
            f"the CPU core takes tensors and numbers, not {type(argument).__name__}; convert it"
        )
    if not argument.is_contiguous() or not argument.is_cpu:
        raise ContractError(
            "the CPU core takes contiguous CPU tensors; call .contiguous() first "
            f"(got {argument.device.type}, strides {argument.stride()})"
        )
    return argument.data_ptr()


def _entry(library: ctypes.CDLL, symbol: str, kinds: list[Any]) -> Callable[..., None]:
    entry = getattr(library, symbol)
    entry.restype, entry.argtypes = None, kinds
    return entry


def library_path() -> Path | None:
    """Where the built core is, or None when it was not built."""
    found = sorted(Path(__file__).resolve().parent.glob("_core*.so"))
    return found[0] if found else None


@functools.cache
def library_digest() -> str:
    """BLAKE2b of the built core: part of every CPU certificate."""
    path = library_path()
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path else "absent"


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags of this processor (Linux); empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((entry for entry in text.splitlines() if entry.startswith("flags")), ":")
    return frozenset(line.split(":", 1)[1].split())


@functools.cache
def available_variants() -> tuple[str, ...]:
    """Variants this processor can run, fastest first."""
    library = _library()
    usable = []
    for name in VARIANTS:
        runs_here = _NEEDS.get(name, set()) <= cpu_flags()
        if runs_here and hasattr(library, f"zm_{name}_gemm"):
            usable.append(name)
    return tuple(usable)


@functools.cache
def _library() -> ctypes.CDLL:
    path = library_path()
    if path is None:
        raise CapabilityError(
            "the CPU core is not built: install a C++ compiler with OpenMP (for example "
            "`apt-get install g++`), then run `make install` again; `zm doctor` shows the result"
        )
    return ctypes.CDLL(str(path))


@functools.cache
def core(variant: str | None = None) -> Core:
    """The CPU core: the fastest variant for this processor, or the one named."""
    usable = available_variants()
    name = variant or usable[0]
    if name not in usable:
        raise CapabilityError(
            f"variant {name!r} does not run here; choose one of {', '.join(usable)}"
        )
    return Core(name, _library())


def missing(variant: str) -> str | None:
    """Why a variant cannot run here, or None: what an implementation answers to dispatch."""
    if library_path() is None:
        return "the CPU core is not built; install a C++ compiler and run `make install` again"
    if variant == DOTS:
        return _missing_dots()
    return None if variant in available_variants() else f"this processor cannot run {variant} code"


@functools.cache
def _missing_dots() -> str | None:
    if "avx512" not in available_variants() or "avx512_bf16" not in cpu_flags():
        return f"this processor cannot run {DOTS} code"
    yes = ctypes.c_int64()
    _entry(_library(), "zm_avx512_dots_are_chains", [ctypes.c_void_p])(ctypes.byref(yes))
    return None if yes.value else "this processor's bf16 dot product is not two FMAs in order"
