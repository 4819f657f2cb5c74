"""cuBLASLt with a pinned algorithm and no split of the reduced axis.

``torch.mm`` asks a heuristic at every call; it may split K at one row count and not at the next, so
its bits depend on the batch. Here the heuristic is asked once per problem, with every reduction
scheme forbidden, and the chosen algorithm (a 64-byte value) is kept and named. Whether such an
algorithm is in a bit class is not assumed: :mod:`.certificate` compares it with the class's
reference at the very shape before it may serve.

    >>> lt = Problem("nt", 512, 4096, 4096, torch.bfloat16, torch.bfloat16)   # doctest: +SKIP
    >>> lt.algorithms()[0].name                                                # doctest: +SKIP
    'lt-66.tile18.stages35.cluster3'

Left out: epilogues other than a bias, FP8, batched products.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CapabilityError

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F = 68
_DESC_TRANSA, _DESC_TRANSB, _DESC_EPILOGUE, _DESC_BIAS, _DESC_BIAS_TYPE = 3, 4, 7, 8, 26
_EPILOGUE_BIAS = 4
_PREF_WORKSPACE, _PREF_REDUCTION = 1, 3
_CONFIG = {
    "id": 0,
    "tile": 1,
    "splitk": 2,
    "reduction": 3,
    "swizzle": 4,
    "custom": 5,
    "stages": 6,
    "inner": 7,
    "cluster": 8,
}


class _Algo(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algo", _Algo),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One pinned algorithm: its printable name and cuBLASLt's own 64 bytes."""

    name: str
    raw: bytes


@functools.cache
def library() -> ctypes.CDLL | None:
    """The cuBLASLt that torch itself uses, or None where there is none."""
    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.split(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return None


def _lib() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise CapabilityError(
            "no cuBLASLt beside this torch; the class's own kernels serve instead"
        )
    return found


@functools.cache
def _matmul() -> Any:
    """cublasLtMatmul, told its argument types once: a product is called thousands of times."""
    run = _lib().cublasLtMatmul
    run.argtypes = [*[ctypes.c_void_p] * 14, ctypes.c_size_t, ctypes.c_void_p]
    return run


@functools.cache
def _algo(raw: bytes) -> _Algo:
    return _Algo.from_buffer_copy(raw)


def _check(status: int, call: str) -> None:
    if status != 0:
        raise CapabilityError(
            f"cuBLASLt {call} failed with status {status}; run `zm kernels certify` so that "
            f"the class's "
            "own kernels serve this shape"
        )


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(_lib().cublasLtCreate(ctypes.byref(handle)), "create")
    return handle


def _layout(dtype: torch.dtype, rows: int, cols: int, ld: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    _check(
        _lib().cublasLtMatrixLayoutCreate(
            ctypes.byref(layout),
            _TYPES[dtype],
            ctypes.c_uint64(rows),
            ctypes.c_uint64(cols),
            ctypes.c_int64(ld),
        ),
        "layout",
    )
    return layout


class Problem:
    """``c[M, N] = a . b`` for one shape; forms name how the row-major operands lie.

    nt: a[M, K], b[N, K] (forward)   nn: a[M, K], b[K, N] (dX)   tn: a[K, M], b[K, N] (dW)
    """

    def __init__(
        self,
        form: str,
        m: int,
        n: int,
        k: int,
        dtype: torch.dtype,
        out: torch.dtype,
        device: int = 0,
        bias: bool = False,
    ) -> None:
        lib = _lib()
        self.shape, self.device = (form, m, n, k), device
        self._desc = ctypes.c_void_p()
        _check(
            lib.cublasLtMatmulDescCreate(ctypes.byref(self._desc), _COMPUTE_32F, 0), "descriptor"
        )
        # cuBLAS is column-major: it computes c^T[N, M] from b^T and a^T.
        transposed = {"nt": (1, 0), "nn": (0, 0), "tn": (0, 1)}[form]
        self._set(_DESC_TRANSA, ctypes.c_int32(transposed[0]))
        self._set(_DESC_TRANSB, ctypes.c_int32(transposed[1]))
        if bias:
            self._set(_DESC_EPILOGUE, ctypes.c_uint32(_EPILOGUE_BIAS))
            self._set(_DESC_BIAS_TYPE, ctypes.c_int32(_TYPES[dtype]))
        self._b = _layout(dtype, k, n, k) if form == "nt" else _layout(dtype, n, k, n)
        self._a = _layout(dtype, m, k, m) if form == "tn" else _layout(dtype, k, m, k)
        self._c = _layout(out, n, m, n)

    def _set(self, attribute: int, value: Any) -> None:
        _check(
            _lib().cublasLtMatmulDescSetAttribute(
                self._desc, attribute, ctypes.byref(value), ctypes.sizeof(value)
            ),
            "descriptor attribute",
        )

    def algorithms(self, count: int = 1) -> list[Algorithm]:
        """The heuristic's first ``count`` choices that keep K in one piece without workspace."""
        lib = _lib()
        preference = ctypes.c_void_p()
        _check(lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "preference")
        for attribute, value in (
            (_PREF_WORKSPACE, ctypes.c_uint64(0)),
            (_PREF_REDUCTION, ctypes.c_uint32(0)),
        ):
            _check(
                lib.cublasLtMatmulPreferenceSetAttribute(
                    preference, attribute, ctypes.byref(value), ctypes.sizeof(value)
                ),
                "preference",
            )
        results = (_Heuristic * count)()
        found = ctypes.c_int(0)
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            _handle(self.device),
            self._desc,
            self._b,
            self._a,
            self._c,
            self._c,
            preference,
            count,
            results,
            ctypes.byref(found),
        )
        lib.cublasLtMatmulPreferenceDestroy(preference)
        if status != 0:
            return []
        return [
            Algorithm(_name(r.algo), bytes(r.algo)) for r in results[: found.value] if r.state == 0
        ]

    def run(
        self,
        algorithm: Algorithm,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        """Compute into ``c``; with ``accumulate``, add to what ``c`` holds."""
        if bias is not None:
            self._set(_DESC_BIAS, ctypes.c_void_p(bias.data_ptr()))
        out, stream = c.data_ptr(), _C._cuda_getCurrentRawStream(self.device)
        status = _matmul()(
            _handle(self.device),
            self._desc,
            ctypes.byref(_ONE),
            b.data_ptr(),
            self._b,
            a.data_ptr(),
            self._a,
            ctypes.byref(_ONE if accumulate else _ZERO),
            out,
            self._c,
            out,
            self._c,
            ctypes.byref(_algo(algorithm.raw)),
            None,
            0,
            stream,
        )
        _check(status, "matmul")


def _name(algo: _Algo) -> str:
    values = {}
    for key, attribute in _CONFIG.items():
        value, written = ctypes.c_uint32(0), ctypes.c_size_t(0)
        size = 2 if key in ("inner", "cluster") else 4
        status = _lib().cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(algo),
            attribute,
            ctypes.byref(value),
            ctypes.c_size_t(size),
            ctypes.byref(written),
        )
        values[key] = value.value if status == 0 else "x"
    return "lt-" + ".".join(f"{key}{value}" for key, value in values.items())
