"""The only comparer and the only digest: equal means equal bits.

Everything that decides whether two tensors are the same asks this module. It compares integer
views, so -0.0 differs from +0.0 and two NaN payloads differ from each other; nothing here has a
tolerance. Digests are ``digest.v1`` (:mod:`.reference.digest`): 128 bits per row from integer
arithmetic alone, the same on every device. On the CPU the compiled core computes them at memory
speed, on a GPU a Triton kernel those of short rows in one launch; the torch definition serves
elsewhere. Each is compared with the definition on a probe before its first use.

    >>> a = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    >>> b = torch.tensor([[1.0, 2.0], [3.0, -0.0]])
    >>> equal_rows(a, b).tolist()
    [True, False]
    >>> first_difference(a, b).coordinate
    (1, 1)

Left out on purpose: mean and maximum differences, k3 and other reports (see ``agent_tools``); they
never decide. ``pytest tests/kernels/bits`` shows the weak oracles that pass where these functions
do not.
"""

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .cpu.load import core, library_path
from .errors import CapabilityError, ContractError, NonFiniteError
from .reference import digest as definition

_INT_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_INT64 = (1 << 63) - 1

_SHORT_ROW = 1 << 22  # bytes; the kernel gives each row to one program

Digest = Callable[[int, int, int, int, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where two tensors differ, in row-major order.

    Difference(coordinate=(1, 1), left_bits="00000000", right_bits="80000000",
               left=0.0, right=-0.0, ulp=1, differing=1, elements=4)

    ulp: distance in representable values. differing, elements: how many of how many differ.
    """

    coordinate: tuple[int, ...]
    left_bits: str
    right_bits: str
    left: float
    right: float
    ulp: int
    differing: int
    elements: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values; non-finite numbers as text, so that any JSON reader takes them."""
        values = asdict(self)
        for side in ("left", "right"):
            number = values[side]
            values[side] = number if abs(number) < float("inf") else str(number)
        return values

    def __str__(self) -> str:
        return (
            f"at {list(self.coordinate)}: {self.left!r} (0x{self.left_bits}) against "
            f"{self.right!r} (0x{self.right_bits}), {self.ulp} ulp; "
            f"{self.differing} of {self.elements} elements differ"
        )


def int_view(x: Tensor) -> Tensor:
    """The bits of ``x`` as integers of its width and shape (complex: one more dimension of 2)."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.view(_INT_OF_WIDTH[x.element_size()])


def _views(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ContractError(
            f"bits are compared between tensors of one dtype and shape, not {a.dtype} "
            f"{tuple(a.shape)} and {b.dtype} {tuple(b.shape)}; convert or unshard one side first"
        )
    if a.device != b.device:
        b = b.to(a.device)
    return int_view(a), int_view(b)


def equal(a: Tensor, b: Tensor) -> bool:
    """True when every bit is equal. Different dtypes or shapes raise ContractError."""
    return torch.equal(*_views(a, b))


def equal_rows(a: Tensor, b: Tensor) -> Tensor:
    """bool [rows]: which rows (dimension 0) have equal bits."""
    left, right = _views(a, b)
    if left.dim() == 0:
        raise ContractError("equal_rows needs at least one dimension; use equal for a scalar")
    same = left == right
    return same if same.dim() == 1 else same.flatten(1).all(dim=1)


def first_difference(a: Tensor, b: Tensor) -> Difference | None:
    """The first differing element in row-major order, or None when all bits are equal."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    left, right = _views(a, b)
    differs = left != right
    count = int(differs.sum())
    if count == 0:
        return None
    flat = int(differs.reshape(-1).to(torch.uint8).argmax())
    coordinate = tuple(int(axis) for axis in torch.unravel_index(torch.tensor(flat), left.shape))
    one, other = a.detach()[coordinate], b.detach()[coordinate]
    mask = (1 << 8 * left.element_size()) - 1
    digits = 2 * left.element_size()
    return Difference(
        coordinate=coordinate,
        left_bits=f"{int(left[coordinate]) & mask:0{digits}x}",
        right_bits=f"{int(right[coordinate]) & mask:0{digits}x}",
        left=float(one),
        right=float(other),
        ulp=int(ulp_distance(one, other.to(one.device))),
        differing=count,
        elements=left.numel(),
    )


def _ordered(x: Tensor) -> Tensor:
    """int64 that grows with the value; -0.0 is just below +0.0."""
    view = int_view(x)
    if not x.is_floating_point():
        return x.detach().to(torch.int64)
    top = 8 * view.element_size() - 1
    bits = view.to(torch.int64)
    magnitude = bits & ((1 << top) - 1)
    return torch.where((bits >> top & 1) == 1, -magnitude - 1, magnitude)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """int64, same shape: how many representable values apart; 0 exactly where the bits are equal.

    -0.0 and +0.0 are 1 apart. Distances beyond int64 (fp64, opposite signs) are clamped to its
    maximum.
    """
    if a.is_complex() or a.dtype == torch.uint64:
        raise ContractError(f"no ulp distance for {a.dtype}; compare its parts or an integer view")
    _views(a, b)
    left, right = _ordered(a), _ordered(b.to(a.device))
    low, high = torch.minimum(left, right), torch.maximum(left, right)
    gap = high - low
    return torch.where(gap < 0, _MAX_INT64, gap)


def ulp_histogram(a: Tensor, b: Tensor) -> dict[str, int]:
    """Elements by distance: ``{"0": 90, "1": 7, "2-3": 2, "4-7": 1}``; empty buckets are left out.

    Elements that differ and are not finite on either side count as ``nonfinite``.
    """
    distance = ulp_distance(a, b)
    histogram = {}
    if a.is_floating_point():
        finite = torch.isfinite(a.detach().float()) & torch.isfinite(
            b.detach().float().to(a.device)
        )
        outside = int((~finite & (distance > 0)).sum())
        distance = distance[finite | (distance == 0)]
        histogram["nonfinite"] = outside
    edges = torch.tensor([1 << power for power in range(63)], device=distance.device)
    counts = torch.bincount(torch.bucketize(distance.reshape(-1), edges, right=True), minlength=1)
    for bucket, count in enumerate(counts.tolist()):
        low, high = (1 << bucket) >> 1, (1 << bucket) - 1
        histogram[str(low) if low == high else f"{low}-{high}"] = count
    return {name: count for name, count in histogram.items() if count}


def nonfinite(x: Tensor) -> tuple[int, ...] | None:
    """Coordinate of the first NaN or infinity in row-major order, or None. Integers are finite."""
    x = x.detach()
    if not (x.is_floating_point() or x.is_complex()):
        return None
    bad = ~torch.isfinite(x if x.element_size() > 1 else x.float())
    if not bool(bad.any()):
        return None
    flat = bad.reshape(-1).to(torch.uint8).argmax().cpu()
    return tuple(int(axis) for axis in torch.unravel_index(flat, x.shape))


def check_finite(x: Tensor, name: str) -> None:
    """Raise NonFiniteError naming tensor and coordinate unless every element is finite."""
    where = nonfinite(x)
    if where is not None:
        raise NonFiniteError(
            f"{name} holds {float(x[where])} at {list(where)}; repair or replace that tensor first"
        )


@functools.cache
def _core_digest() -> Digest | None:
    """The core's digest, proved against the definition on a probe; None where no core was built."""
    if library_path() is None:
        return None
    chosen = core()
    entry = chosen.library[f"zm_{chosen.name}_digest_rows"]
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    entry.argtypes, entry.restype = [pointer, number, number, number, number, pointer], None
    probe = torch.arange(3 * 1030, dtype=torch.int64).mul(0x5DEECE66D).to(torch.int32).view(3, 1030)
    out = torch.empty(3, 2, dtype=torch.int64)
    entry(probe.data_ptr(), 3, 1030, 4, definition.dtype_code(probe.dtype), out.data_ptr())
    if not torch.equal(out, definition.digest_rows(probe)):
        raise CapabilityError(
            "the compiled CPU core's digest differs from its definition, so the build is out of "
            "date or damaged; run `make install` again"
        )
    return entry


@functools.cache
def _gpu_digest(device: torch.device) -> Callable[[Tensor, Tensor], None] | None:
    """The GPU's kernel, proved against the definition on a probe; None where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from .gpu.digest import launch

    probe = torch.arange(3 * 1030, device=device).mul(0x5DEECE66D).to(torch.int32).view(3, 1030)
    for same in (probe, probe.view(torch.bfloat16), probe.view(torch.uint8)):
        out = torch.empty(3, 2, dtype=torch.int64, device=device)
        launch(same, out)
        if not torch.equal(out, definition.digest_rows(same)):
            raise CapabilityError(
                f"the digest kernel on {device} differs from its definition; run `zm doctor` and "
                "install the Triton that came with this torch"
            )
    return launch


def digest_rows(x: Tensor) -> Tensor:
    """Digest of every row: [rows, ...] -> int64 [rows, 2] on the same device.

    Depends on each element's bits and position, the row's length and the dtype; on nothing else
    (strides, neighbours, device, threads). Unsupported dtypes raise ContractError.
    """
    if x.dim() == 0:
        raise ContractError(
            "digest_rows needs at least one dimension; use digest_tensor for a scalar"
        )
    entry = _core_digest() if x.device.type == "cpu" else None
    if entry is None:
        launch = _gpu_digest(x.device) if x.is_cuda and _fits_kernel(x) else None
        if launch is None:
            return definition.digest_rows(x.detach())
        found = torch.empty((x.shape[0], 2), dtype=torch.int64, device=x.device)
        launch(x.detach(), found)
        return found
    code = definition.DTYPE_CODES.get(x.dtype) or definition.dtype_code(x.dtype)
    rows = x.shape[0]
    out = torch.empty((rows, 2), dtype=torch.int64)
    if rows:
        x = x.contiguous()
        entry(x.data_ptr(), rows, x.numel() // rows, x.itemsize, code, out.data_ptr())
    return out


def _fits_kernel(x: Tensor) -> bool:
    return 0 < x.nbytes // x.shape[0] <= _SHORT_ROW if len(x) else False


def digest_tensor(x: Tensor) -> str:
    """Digest of a whole tensor, shape included: 32 hexadecimal digits. For weights."""
    lanes = digest_rows(x.detach().reshape(1, -1))[0].tolist()
    first, second = definition.fold_shape(
        (lanes[0] % (1 << 64), lanes[1] % (1 << 64)), tuple(x.shape)
    )
    return f"{first:016x}{second:016x}"


def digest_hex(digest: Tensor) -> str:
    """One row's digest, int64 [2], as 32 hexadecimal digits."""
    first, second = digest.tolist()
    return f"{first % (1 << 64):016x}{second % (1 << 64):016x}"
