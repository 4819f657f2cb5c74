"""silu and silu_mul on the CPU core: contracts and implementations, forward and gradient."""

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


def _silu_grad(variant: str, dy: Tensor, x: Tensor) -> Tensor:
    return _silu_mul_grad(variant, dy, x, None)[0]


def _silu_mul_grad(
    variant: str, dy: Tensor, gate: Tensor, up: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    dgate = torch.empty_like(gate)
    dup = None if up is None else torch.empty_like(gate)
    core(variant).call(
        "silu_backward", dy, gate, up, dgate, dup, gate.numel(), is_bf16(gate),
        torch.get_num_threads(),
    )
    return dgate, dup


ACTIVATION_GRADIENTS = register_core(
    _silu_grad,
    name="activation_grad.silu",
    op="activation_grad",
    formula="dx = dy sig (1 + x (1 - sig)), sig = 1 / (1 + exp(-x))",
    order="none: elementwise",
    rounding="fp32 inside, once to storage",
    functions=_FUNCTIONS,
    reference="zeromismatch.kernels.reference.gated:silu_grad",
    gradient_rtol=1e-5,
)
GATED_GRADIENTS = register_core(
    _silu_mul_grad,
    name="gated_grad.silu",
    op="gated_grad",
    formula="dgate = silu_grad(round(dy up), gate), dup = dy silu(gate)",
    order="none: elementwise",
    rounding="each of the two steps rounded to storage: as if not fused",
    functions=_FUNCTIONS,
    reference="zeromismatch.kernels.reference.gated:silu_mul_grad",
    gradient_rtol=1e-5,
)
