"""silu and silu_mul on the CPU core: contracts, implementations and the backward calls."""

import torch
from torch import Tensor

from ..cpu.load import core
from ..cpu.register import is_bf16, register_core


def _silu(variant: str, x: Tensor) -> Tensor:
    return _silu_mul(variant, x, None)


def _silu_mul(variant: str, gate: Tensor, up: Tensor | None) -> Tensor:
    y = torch.empty_like(gate)
    core(variant).call("silu", gate, up, y, gate.numel(), is_bf16(gate), torch.get_num_threads())
    return y


_FUNCTIONS = "exp.cpu.v1, correctly rounded division"
ACTIVATION = register_core(
    _silu,
    name="activation.silu",
    op="activation",
    formula="y = x / (1 + exp(-x))",
    order="none: elementwise",
    rounding="fp32 inside, once to storage",
    functions=_FUNCTIONS,
    reference="zeromismatch.kernels.reference.gated:silu",
    gradient_rtol=1e-5,
)
GATED = register_core(
    _silu_mul,
    name="gated.silu",
    op="gated",
    formula="y = silu(gate) * up",
    order="none: elementwise",
    rounding="silu rounded to storage, then the product: as if not fused",
    functions=_FUNCTIONS,
    reference="zeromismatch.kernels.reference.gated:silu_mul",
    gradient_rtol=1e-5,
)


def backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, variant: str | None = None
) -> tuple[Tensor, Tensor | None]:
    """``(dgate, dup)``; without ``up`` the gradient of silu alone."""
    dgate = torch.empty_like(gate)
    dup = None if up is None else torch.empty_like(gate)
    core(variant).call(
        "silu_backward", dy, gate, up, dgate, dup, gate.numel(), is_bf16(gate),
        torch.get_num_threads(),
    )
    return dgate, dup
