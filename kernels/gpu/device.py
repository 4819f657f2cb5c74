"""Facts about the current GPU, and how tensors are brought into the form that kernels take.

The bits of matrix instructions belong to an architecture, so contracts name it (``sm90``). On a GPU
for which no contract is proved, operators refuse instead of running other numbers.
"""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from ..errors import CapabilityError, ContractError

PROVED_ARCHITECTURES = ("sm90",)
HALF_DTYPES = (torch.bfloat16, torch.float16)
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_ALIGNMENT = 16
_SERVED: set[int | None] = set()
"""Devices on which nothing was missing: asking takes longer than a launch."""


@functools.cache
def architecture(index: int | None = None) -> str:
    """``sm90`` and so on: the name that contracts use."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm{major}{minor}"


@functools.cache
def num_multiprocessors(index: int = 0) -> int:
    """Multiprocessors of a device: schedule only."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def missing() -> str | None:
    """None where the GPU contracts can be served, else the reason."""
    if torch.version.hip is not None:
        return "AMD GPUs have no proved contract yet"
    if not torch.cuda.is_available():
        return "there is no GPU here"
    if architecture() not in PROVED_ARCHITECTURES:
        return f"{architecture()} has no proved contract; {', '.join(PROVED_ARCHITECTURES)} has"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


@functools.cache
def programs(package: str | None, name: str) -> ModuleType:
    """A module of Triton programs, imported at the first launch."""
    return importlib.import_module(f".{name}", package)


def require(
    op: str, *tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = tuple(NAMES)
) -> None:
    """CUDA tensors of one device and one of ``dtypes``, on a GPU with proved contracts."""
    given = [tensor for tensor in tensors if tensor is not None]
    devices = {tensor.device for tensor in given}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        names = ", ".join(sorted(map(str, devices)))
        raise ContractError(
            f"{op} on the GPU takes CUDA tensors of one device, not of {names}; move them"
        )
    dtype = given[0].dtype
    if dtype not in dtypes:
        names = ", ".join(NAMES[each] for each in dtypes)
        raise ContractError(f"{op} has no GPU contract for {dtype}; convert to one of {names}")
    if torch.compiler.is_compiling():
        return  # the operator asks again when it runs
    index = given[0].device.index
    if index in _SERVED:
        return
    why = missing()
    if why:
        raise CapabilityError(f"{op} cannot run on this GPU: {why}; use the CPU contracts instead")
    _SERVED.add(index)


def require_no_gradient(op: str, *tensors: Tensor | None) -> None:
    """CapabilityError where a gradient is asked of an operator that has none on the GPU."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise CapabilityError(
            f"{op}s have no gradient on the GPU yet; train on the CPU, or wrap the forward in "
            "torch.no_grad()"
        )


def aligned(x: Tensor) -> Tensor:
    """``x`` itself if contiguous and 16-byte aligned, else a copy: same values, same bits."""
    if x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
