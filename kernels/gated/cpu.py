"""silu, gelu, their gated products and the softcap on the CPU core, forward and gradient."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..cpu.load import core
from ..cpu.register import is_bf16, register_core


def _gated(gelu: bool, variant: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    y = torch.empty_like(gate)
    core(variant).call(
        "gated", gate, up, y, gate.numel(), gelu, is_bf16(gate), torch.get_num_threads()
    )
    return y


def _gated_grad(
    gelu: bool, variant: str, dy: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
    core(variant).call(
        "gated_backward", dy, gate, up, dgate, dup, gate.numel(), gelu, is_bf16(gate),
        torch.get_num_threads(),
    )
    return dgate, dup


def _activation_grad(gelu: bool, variant: str, dy: Tensor, x: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    core(variant).call(
        "gated_backward", dy, x, None, dx, None, x.numel(), gelu, is_bf16(x),
        torch.get_num_threads(),
    )
    return dx


_ELEMENTWISE: dict[str, Any] = {"order": "none: elementwise", "gradient_rtol": 1e-5}
_FUNCTIONS = "exp.cpu.v1, correctly rounded division"
_REFERENCE = "zeromismatch.kernels.reference.gated:"

ACTIVATION = register_core(
    partial(_gated, False),
    name="activation.silu",
    op="activation",
    formula="y = x / (1 + exp(-x))",
    rounding="fp32 inside, once to storage",
    functions=_FUNCTIONS,
    reference=f"{_REFERENCE}silu",
    **_ELEMENTWISE,
)
ACTIVATION_GELU = register_core(
    partial(_gated, True),
    name="activation.gelu_tanh",
    op="activation_gelu",
    formula="y = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)",
    rounding="fp32 inside, once to storage",
    functions=_FUNCTIONS,
    reference=f"{_REFERENCE}gelu",
    **_ELEMENTWISE,
)
GATED = register_core(
    partial(_gated, False),
    name="gated.silu",
    op="gated",
    formula="y = silu(gate) * up",
    rounding="silu rounded to storage, then the product: as if not fused",
    functions=_FUNCTIONS,
    reference=f"{_REFERENCE}silu_mul",
    **_ELEMENTWISE,
)
GATED_GELU = register_core(
    partial(_gated, True),
    name="gated.gelu_tanh",
    op="gated_gelu",
    formula="y = gelu(gate) * up",
    rounding="gelu rounded to storage, then the product: as if not fused",
    functions=_FUNCTIONS,
    reference=f"{_REFERENCE}gelu_mul",
    **_ELEMENTWISE,
)
ACTIVATION_GRADIENTS = register_core(
    partial(_activation_grad, False),
    name="activation_grad.silu",
    op="activation_grad",
    formula="dx = dy sig (1 + x (1 - sig)), sig = 1 / (1 + exp(-x))",
    rounding="fp32 inside, once to storage",
    functions=_FUNCTIONS,
    reference=f"{_REFERENCE}silu_grad",
    **_ELEMENTWISE,
)
ACTIVATION_GELU_GRADIENTS = register_core(
    partial(_activation_grad, True),
    name="activation_grad.gelu_tanh",
    op="activation_gelu_grad",
    formula="dx = dy sig (1 + x (1 - sig) d(2 u)/dx), sig = 1 / (1 + exp(-2 u))",
    rounding="fp32 inside, once to storage",
    functions=_FUNCTIONS,
    reference=f"{_REFERENCE}gelu_grad",
    **_ELEMENTWISE,
)
GATED_GRADIENTS = register_core(
    partial(_gated_grad, False),
    name="gated_grad.silu",
    op="gated_grad",
    formula="dgate = silu_grad(round(dy up), gate), dup = dy silu(gate)",
    rounding="each of the two steps rounded to storage: as if not fused",
    functions=_FUNCTIONS,
    reference=f"{_REFERENCE}silu_mul_grad",
    **_ELEMENTWISE,
)
GATED_GELU_GRADIENTS = register_core(
    partial(_gated_grad, True),
    name="gated_grad.gelu_tanh",
    op="gated_gelu_grad",
    formula="dgate = gelu_grad(round(dy up), gate), dup = dy gelu(gate)",
    rounding="each of the two steps rounded to storage: as if not fused",
    functions=_FUNCTIONS,
    reference=f"{_REFERENCE}gelu_mul_grad",
    **_ELEMENTWISE,
)


def _softcap(variant: str, x: Tensor, cap: float) -> Tensor:
    return _softcap_grad(variant, None, x, cap)


def _softcap_grad(variant: str, dy: Tensor | None, x: Tensor, cap: float) -> Tensor:
    y = torch.empty_like(x)
    core(variant).call("softcap", dy, x, y, float(cap), x.numel(), torch.get_num_threads())
    return y


SOFTCAP = register_core(
    _softcap,
    name="softcap.tanh",
    storages=("float32",),
    op="softcap",
    formula="y = cap tanh(x / cap)",
    rounding="each of the three steps rounded once",
    functions="tanh.cpu.v1, correctly rounded division",
    reference=f"{_REFERENCE}softcap",
    **_ELEMENTWISE,
)
SOFTCAP_GRADIENTS = register_core(
    _softcap_grad,
    name="softcap_grad.tanh",
    storages=("float32",),
    op="softcap_grad",
    formula="dx = dy fma(-t, t, 1), t = tanh(x / cap)",
    rounding="each step rounded once",
    functions="tanh.cpu.v1, correctly rounded division",
    reference=f"{_REFERENCE}softcap_grad",
    **_ELEMENTWISE,
)
