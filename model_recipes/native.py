"""The C++ of a kernel file: how it is compiled, and how its functions are called.

    subprocess.run(command("norm.so", "norm.cpp"))
    entries = functions_of(content, "norm.py", Native("norm.so", ("norm", "norm_grad")))
    entries["forward"](x, weight, eps)

The verifier and :mod:`.own_kernels` share all of it: what was verified is what a recipe gets. Only
the standard library and torch, since the verifier's workers import it.
"""

import ctypes
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..kernels.errors import CapabilityError

FLAGS = ("-O3", "-std=c++17", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp")
SECONDS = 60.0
_TENSORS = frozenset((Tensor, Parameter))
_CONVERTERS = {int: ctypes.c_int64, bool: ctypes.c_int64, float: ctypes.c_double}


def compiler() -> str:
    """Path of the C++ compiler; CapabilityError where there is none."""
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise CapabilityError(
            "this kernel holds C++ and there is no compiler here: install one (for example "
            "`apt-get install g++`), then try again"
        )
    return found


def command(library: str, text: str) -> list[str]:
    """The words that make the shared library ``library`` of the C++ file ``text``."""
    return [compiler(), *FLAGS, "-shared", "-fPIC", "-o", library, text]


class Native:
    """What a candidate sees as ``native``: its compiled C++ functions, called by name.

    Tensors become pointers, int and bool int64, float double, None a null pointer.
    """

    __slots__ = ("_functions",)

    def __init__(self, path: str, names: Sequence[str]) -> None:
        library = ctypes.CDLL(path)
        self._functions = {name: getattr(library, name) for name in names}
        for function in self._functions.values():
            function.restype = None

    def __call__(self, name: str, *arguments: Any) -> None:
        """Run ``extern "C" void name(...)``."""
        self._functions[name](*[_converted(each) for each in arguments])


def _converted(argument: Any) -> Any:
    converter = _CONVERTERS.get(type(argument))
    if converter is not None:
        return converter(argument)
    if argument is None:
        return ctypes.c_void_p()
    if not (type(argument) in _TENSORS and argument.is_contiguous() and argument.is_cpu):
        raise TypeError("native functions take contiguous CPU tensors, numbers and None")
    return ctypes.c_void_p(argument.data_ptr())


def functions_of(
    content: bytes, name: str, native: Native | None, given: Mapping[str, Any] | None = None
) -> dict[str, Callable[..., Any]]:
    """Run a kernel file as a module of its own; its functions by name. name: for tracebacks.

    given: names that it finds besides ``native``.
    """
    namespace: dict[str, Any] = {"__name__": "candidate", "native": native, **(given or {})}
    exec(compile(content, name, "exec"), namespace)
    return {name: each for name, each in namespace.items() if callable(each)}


def errors_of(said: str) -> str:
    """The first errors in a compiler's output, on one line."""
    lines = [line for line in said.splitlines() if "error" in line] or said.splitlines()
    return " / ".join(lines[:3])[:400]
