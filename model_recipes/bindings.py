"""Operator classes and the kernels that serve them; nothing else here names kernels.

A class is what :class:`.sites.Site` calls ``op_class``. For a dtype and device the registry offers
at most one contract per class; a few classes are exact by IEEE 754 whoever computes them (adds,
products, copies) and carry a contract that says so.

    aligned_contract("linear", "float32", "cpu")   ->  "linear.chain.float32.cpu.v1"

Left out: choosing an implementation of a contract; that is certified dispatch in ``kernels``.
"""

import importlib
from types import ModuleType

import torch

from ..kernels import contract as registry
from ..kernels.errors import RecipeError, UsageError
from .extension import contract_of, op_classes

POINTWISE = "pointwise.ieee.v1"
"""One IEEE operation per element, rounded once: the same bits on every device."""
COPY = "movement.copy.v1"
"""Bits are moved, never computed."""

# Operator class, which is also the registry's name of the operator (or see _NAMED) -> folder in
# kernels.
_KERNELS = {
    "embedding": "embedding",
    "linear": "linear",
    "rmsnorm": "rmsnorm",
    "rmsnorm_wide": "rmsnorm",
    "rotary_table": "rotary",
    "rotary": "rotary",
    "attention": "attention",
    "gated": "gated",
    "gated_gelu": "gated",
    "activation": "gated",
    "activation_gelu": "gated",
    "router": "moe",
    "topk": "moe",
    "topk_weights": "moe",
    "grouped_linear": "moe",
    "combine": "moe",
    "convolution": "convolution",
    "recurrence_ssd": "recurrence",
    "recurrence_gated_delta": "recurrence",
    "recurrence_kda": "recurrence",
    "l2norm": "gated_norm",
    "gated_rmsnorm": "gated_norm",
    "gated_rmsnorm_wide": "gated_norm",
    "sigmoid": "gates",
    "activation_relu2": "gates",
    "decay": "gates",
    "time_step": "gates",
    "discretised": "gates",
    "skip": "gates",
    "lm_head": "logprob",
    "softcap": "gated",
    "logprob": "logprob",
}
_NAMED = {
    "recurrence_ssd": ("recurrence", "recurrence.ssd."),
    "recurrence_gated_delta": ("recurrence", "recurrence.gated_delta."),
    "recurrence_kda": ("recurrence", "recurrence.kda."),
    "gated_rmsnorm_wide": ("gated_rmsnorm", ""),
    "activation_relu2": ("relu_squared", ""),
}
"""Class -> the registry's operator, and how its contract's id begins where one operator has several
formulas."""
_ADOPTED = ("attention.flash3.",)
"""Other contracts that a plan's rule may name; nothing takes them by themselves."""
BLOCKS = "recurrence_blocks"
"""What bf16 models take for their recurrences where there is one; ``recurrence.*`` of fp32 rows may
be named instead."""
# Whatever the dtype of the model.
_ALWAYS_FP32 = frozenset(
    ("rotary_table", "softcap", "logprob", "topk", "topk_weights", "recurrence_ssd",
     "recurrence_gated_delta", "recurrence_kda", "gated_rmsnorm_wide")
)  # fmt: skip
_EXACT = {"add": POINTWISE, "mul": POINTWISE, "kv_write": COPY}

OP_CLASSES = (*_KERNELS, *_EXACT)


def dtype_name(dtype: torch.dtype | str) -> str:
    """``torch.float32`` or ``"float32"`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def device_kind(device: torch.device | str) -> str:
    """How contracts name a device: ``cpu``, or an architecture such as ``sm90``."""
    if isinstance(device, str) and device.startswith("sm"):
        return device
    device = torch.device(device)
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise UsageError(f"device {device} is not supported; use cpu or cuda")
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def kernel(op_class: str) -> ModuleType:
    """The kernel package that serves an operator class."""
    return importlib.import_module(f"..kernels.{_KERNELS[op_class]}", __package__)


def aligned_contract(
    op_class: str, dtype: torch.dtype | str, device: torch.device | str
) -> str | None:
    """The contract that the registry offers for a class, or None."""
    if op_class in op_classes():
        own = contract_of(op_class, dtype_name(dtype), device_kind(device))
        if own is not None or op_class not in OP_CLASSES:
            return own
    if op_class in _EXACT:
        return _EXACT[op_class]
    if op_class not in _KERNELS:
        return None
    kernel(op_class)
    op, beginning = _NAMED.get(op_class, (op_class, ""))
    if op == "recurrence":
        blocks = beginning.replace(op, BLOCKS)
        offered = _offered(BLOCKS, blocks, dtype_name(dtype), device)
        if offered is not None:
            return offered
    name = "float32" if op_class in _ALWAYS_FP32 else dtype_name(dtype)
    return _offered(op, beginning, name, device)


def _offered(op: str, beginning: str, dtype: str, device: torch.device | str) -> str | None:
    """The newest contract of an operator whose id begins so."""
    found = registry.contracts(op=op, device=device_kind(device), dtype=dtype)
    offered = [entry.id for entry in found if entry.id.startswith(beginning)]
    return offered[-1] if offered else None


def check_contract(
    contract: str, op_class: str, dtype: torch.dtype | str, device: torch.device | str
) -> None:
    """Raise RecipeError unless this build serves ``op_class`` here by exactly this contract."""
    offered = aligned_contract(op_class, dtype, device)
    found = registry.contracts(op=op_class, device=device_kind(device), dtype=dtype_name(dtype))
    named: list[str | None] = [entry.id for entry in found if entry.id.startswith(_ADOPTED)]
    op, beginning = _NAMED.get(op_class, (op_class, ""))
    if op == "recurrence":
        named.append(_offered(op, beginning, "float32", device))
    if contract not in (offered, *named):
        kind = f"{dtype_name(dtype)} on {device_kind(device)}"
        raise RecipeError(
            f"contract {contract!r} does not serve {op_class} at {kind}; "
            f"{f'this build has {offered}' if offered else 'this build has none'}: align again, or "
            "install the version that wrote the recipe"
        )
