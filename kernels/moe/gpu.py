"""Mixtures of experts on the GPU: contracts and operators that survive compile and capture.

Scores are exp2 of fp32 logits and sums in the tree of ``kernels/gpu/tree.py``; choices are those of
the CPU contract (value descending, index ascending); grouped products are GEMM class L, the very
chain of dense linear layers, whatever the load of an expert; slots are combined by one fp32 FMA
chain. dX of a token adds its slots in order in fp32; dW adds an expert's slots, tokens ascending,
in blocks of TOKEN_BLOCK tokens.

References are the same kernels at another launch shape, and for grouped products the dense
reference expert by expert: what they define is an order, which launch shapes cannot change.

A NaN in a router's logits is refused on a CPU; here it would cost a synchronisation in every layer:
the token's weights become NaN instead, and its logprob fails at the end.

Legend: T tokens, E experts, K slots per token, H width, I inputs, N outputs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..accumulation import chain_of
from ..contract import Contract
from ..dispatch import choose
from ..gpu.device import require
from ..gpu.operator import gpu_operator
from ..gpu.register import register_gpu, serving
from ..linear import gpu_gemm
from ..linear.gpu import CHAINS, grad_weight, head, linear_grad_op
from ..linear.gpu import check as check_linear
from ..linear.gpu_gemm import VERSIONS
from . import gpu_launch as launch

_HERE = "zeromismatch.kernels.moe.gpu:"
_FUNCTIONS = "ex2.approx, div.rn"


def grouped_linear(x: Tensor, chosen: Tensor, weight: Tensor, **tile: Any) -> Tensor:
    """[T, K, N]."""
    rows = x.flatten(0, 1) if x.dim() == 3 else x
    return launch.grouped(rows, chosen, weight, **tile).unflatten(0, chosen.shape)


def grouped_linear_grad(
    grad: Tensor,
    x: Tensor,
    chosen: Tensor,
    weight: Tensor,
    initial: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dX like x, dW like the weight, or fp32 in ``out``)."""
    rows = x.flatten(0, 1) if x.dim() == 3 else x
    grad = grad.flatten(0, 1).to(x.dtype)
    d_slots = launch.grouped(grad, chosen, weight, transposed=True, out_dtype=torch.float32)
    d_x = d_slots.unflatten(0, chosen.shape)
    d_x = launch.combine(d_x, None, x.dtype) if x.dim() == 2 else d_x.to(x.dtype)
    total = out
    if total is None:  # one block is rounded where it is computed: fp32 would be moved twice
        one = initial is None and len(chosen) <= launch.TOKEN_BLOCK
        total = torch.empty(
            weight.shape, dtype=weight.dtype if one else torch.float32, device=x.device
        )
    if initial is not None and initial is not total:
        total.copy_(initial)
    launch.grouped_weight(grad, rows, chosen, len(weight), total, accumulate=initial is not None)
    return d_x, total if out is not None else total.to(weight.dtype)


def combine(y: Tensor, weights: Tensor, *, block: int = 512) -> Tensor:
    """[T, H]."""
    return launch.combine(y, weights, y.dtype, block=block)


def reference_grouped(x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """Expert by expert, the dense reference."""
    top_k, owner = chosen.shape[1], chosen.flatten()
    rows = x.flatten(0, 1) if x.dim() == 3 else x.repeat_interleave(top_k, 0)
    out = torch.empty(len(owner), weight.shape[1], dtype=x.dtype, device=x.device)
    for expert in owner.unique().tolist():
        mine = owner == expert
        out[mine] = gpu_gemm.reference("nt", rows[mine], weight[expert], None, x.dtype)
    return out.unflatten(0, chosen.shape)


def reference_grouped_grad(
    grad: Tensor,
    x: Tensor,
    chosen: Tensor,
    weight: Tensor,
    initial: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Expert by expert and block by block, the dense reference; slots added in order."""
    (tokens, top_k), owner = chosen.shape, chosen.flatten()
    rows = x.flatten(0, 1) if x.dim() == 3 else x.repeat_interleave(top_k, 0)
    grad = grad.flatten(0, 1).to(x.dtype)
    d_rows = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    total = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
    total = total if initial is None else initial.clone()
    block = torch.arange(tokens, device=x.device).repeat_interleave(top_k) // launch.TOKEN_BLOCK
    for expert in owner.unique().tolist():
        mine = owner == expert
        d_rows[mine] = gpu_gemm.reference("nn", grad[mine], weight[expert], None, torch.float32)
        for part in block[mine].unique().tolist():
            here = mine & (block == part)
            sums = gpu_gemm.reference("tn", grad[here], rows[here], None, torch.float32)
            first = part == 0 and initial is None
            total[expert] = sums if first else total[expert] + sums
    d_x = d_rows.unflatten(0, chosen.shape)
    if x.dim() == 2:
        added = torch.zeros_like(d_x[:, 0])
        for k in range(top_k):
            added = added + d_x[:, k]
        d_x = added
    return d_x.to(x.dtype), total.to(weight.dtype) if out is None else out.copy_(total)


reference_topk = partial(launch.topk, rows=1, warps=1)
reference_weights = partial(launch.topk_weights, rows=1, warps=1)
reference_weights_grad = partial(launch.topk_weights_grad, rows=1, warps=1)
reference_combine = partial(combine, block=64)
reference_combine_grad = partial(launch.combine_grad, warps=1)

_ROUNDING = "fp32 inside, one rounding at the end"
_MMA = "Hopper mma of 16-wide groups, fp32 sums; fma in fp32"


def _class_l(
    run: Mapping[str, Callable[..., Any]], axis: str, more: str = "", **fields: Any
) -> dict[torch.dtype, Contract]:
    """Contracts of class L: fp32's chains are short, and have a version of their own."""
    found: dict[torch.dtype, Contract] = {}
    for name, chain in CHAINS.items():
        order = f"GEMM class L: {chain.format(axis=axis)}{more}"
        version = VERSIONS.get(name, "v1")
        found |= register_gpu(run, storages=(name,), version=version, order=order, **fields)
    return found


ROUTER = _class_l(
    {"dispatched": head}, "inputs", name="router.L", op="router", formula="logits = sum_k x W",
    rounding="fp32 accumulator, not rounded", functions=_MMA,
    reference="zeromismatch.kernels.linear.gpu:reference_head",
)  # fmt: skip
TOPK = register_gpu(
    {"triton": launch.topk}, name="topk.scores", storages=("float32",), op="topk",
    formula="the K largest of scores + correction bias, within the best groups",
    order="row_sum of exp2; groups by their two best; all by (value desc, index asc)",
    rounding="fp32 throughout", functions=_FUNCTIONS, reference=_HERE + "reference_topk",
)  # fmt: skip
WEIGHTS = register_gpu(
    {"triton": launch.topk_weights}, name="topk_weights.slots", storages=("float32",),
    op="topk_weights", formula="w = score / (sum over slots + eps) where normed, times scale",
    order="row_sum of exp2; slots in order", rounding="fp32 throughout", functions=_FUNCTIONS,
    reference=_HERE + "reference_weights",
)  # fmt: skip
WEIGHTS_GRADIENT = register_gpu(
    {"triton": launch.topk_weights_grad}, name="topk_weights_grad.slots", storages=("float32",),
    op="topk_weights_grad", formula="d_logits of topk_weights", order="slots in order",
    rounding="fp32 throughout", functions=_FUNCTIONS, reference=_HERE + "reference_weights_grad",
)  # fmt: skip
GROUPED = _class_l(
    {"triton": grouped_linear}, "inputs", name="grouped_linear.L", op="grouped_linear",
    formula="y[t, k] = round(W[expert of slot k] x[t])",
    rounding=_ROUNDING, functions=_MMA, reference=_HERE + "reference_grouped",
)  # fmt: skip
GROUPED_GRADIENT = _class_l(
    {"triton": grouped_linear_grad}, "outputs, then slots in order; for dW an expert's slots",
    f", tokens in blocks of {launch.TOKEN_BLOCK} added ascending",
    name="grouped_linear_grad.L", op="grouped_linear_grad",
    formula="dX = sum over slots of dY W; dW[e] = sum over its slots of dY^T X",
    rounding=_ROUNDING, functions=_MMA, reference=_HERE + "reference_grouped_grad",
)  # fmt: skip
COMBINE = register_gpu(
    {"triton": combine}, name="combine.slots", op="combine", formula="y[t] = round(sum_k w y)",
    order="one FMA chain over slots in order, from +0", rounding=_ROUNDING, functions="fma",
    reference=_HERE + "reference_combine",
)  # fmt: skip
COMBINE_GRADIENT = register_gpu(
    {"triton": launch.combine_grad}, name="combine_grad.slots", op="combine_grad",
    formula="dy = round(w g); dw[t, k] = sum_h g y",
    order="1,024 lanes of FMA over the width, then tile_sum", rounding=_ROUNDING, functions="fma",
    reference=_HERE + "reference_combine_grad",
)  # fmt: skip

Options = tuple[bool, bool, float, float]


@gpu_operator("zeromismatch::router")
def router_op(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 [T, E]; gradients are those of a linear layer, the logits' rounded to the operands'."""
    return choose(serving(ROUTER, "router", x.dtype)).run(x, weight)


@router_op.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(len(x), len(weight), dtype=torch.float32)


def _keep_router(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grad_router(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad, False]
    chain = chain_of(weight, "router") if wanted[1] else None
    if chain is not None:
        grad_weight(grad, x, chain, None)
        wanted[1] = False
    d_x, d_weight, _ = linear_grad_op(grad, x, weight, grad.dtype, wanted)
    return d_x if wanted[0] else None, d_weight if wanted[1] else None


router_op.register_autograd(_grad_router, setup_context=_keep_router)


@gpu_operator("zeromismatch::topk")
def topk_op(
    logits: Tensor, bias: Tensor | None, top_k: int, groups: int, kept: int, sigmoid: bool
) -> Tensor:
    """int64 [T, K]."""
    run = choose(serving(TOPK, "topk", logits.dtype)).run
    return run(logits, bias, top_k, groups, kept, sigmoid)


@topk_op.register_fake
def _(logits: Tensor, bias: Tensor | None, top_k: int, *_: Any) -> Tensor:
    return logits.new_empty(len(logits), top_k, dtype=torch.int64)


@gpu_operator("zeromismatch::topk_weights")
def weights_op(
    logits: Tensor, chosen: Tensor, sigmoid: bool, normed: bool, eps: float, scale: float
) -> Tensor:
    """fp32 [T, K]."""
    run = choose(serving(WEIGHTS, "topk_weights", logits.dtype)).run
    return run(logits, chosen, sigmoid, normed, eps, scale)


@weights_op.register_fake
def _(logits: Tensor, chosen: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(chosen.shape)


@gpu_operator("zeromismatch::topk_weights_grad")
def weights_grad_op(
    grad: Tensor,
    logits: Tensor,
    chosen: Tensor,
    sigmoid: bool,
    normed: bool,
    eps: float,
    scale: float,
) -> Tensor:
    """fp32 [T, E]."""
    run = choose(serving(WEIGHTS_GRADIENT, "topk_weights_grad", logits.dtype)).run
    return run(grad.contiguous(), logits, chosen, sigmoid, normed, eps, scale)


@weights_grad_op.register_fake
def _(grad: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits)


def _keep_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.options = inputs[2:]


def _grad_weights(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return weights_grad_op(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 5


weights_op.register_autograd(_grad_weights, setup_context=_keep_weights)


@gpu_operator("zeromismatch::grouped_linear")
def grouped_op(x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """[T, K, N]."""
    return choose(serving(GROUPED, "grouped_linear", x.dtype)).run(x, chosen, weight)


@grouped_op.register_fake
def _(x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*chosen.shape, weight.shape[1])


@gpu_operator("zeromismatch::grouped_linear_grad")
def grouped_grad_op(
    grad: Tensor, x: Tensor, chosen: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """(dX, dW)."""
    run = choose(serving(GROUPED_GRADIENT, "grouped_linear_grad", x.dtype)).run
    return run(grad.contiguous(), x, chosen, weight)


@grouped_grad_op.register_fake
def _(grad: Tensor, x: Tensor, chosen: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grad_grouped(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, chosen, weight = ctx.saved_tensors
    chain = chain_of(weight, "grouped_linear") if ctx.needs_input_grad[2] else None
    if chain is not None:  # it is continued where it lies: nothing that could be traced
        run = choose(serving(GROUPED_GRADIENT, "grouped_linear_grad", x.dtype)).run
        return run(grad.contiguous(), x, chosen, weight.detach(), chain, chain)[0], None, None
    d_x, d_weight = grouped_grad_op(grad, x, chosen, weight)
    return d_x, None, d_weight


grouped_op.register_autograd(_grad_grouped, setup_context=_keep_grouped)


@gpu_operator("zeromismatch::combine")
def combine_op(y: Tensor, weights: Tensor) -> Tensor:
    """[T, H]."""
    return choose(serving(COMBINE, "combine", y.dtype)).run(y, weights)


@combine_op.register_fake
def _(y: Tensor, weights: Tensor) -> Tensor:
    return y.new_empty(y.shape[0], y.shape[2])


@gpu_operator("zeromismatch::combine_grad")
def combine_grad_op(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(dY, d_weights)."""
    run = choose(serving(COMBINE_GRADIENT, "combine_grad", y.dtype)).run
    return run(grad.contiguous(), y, weights)


@combine_grad_op.register_fake
def _(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(weights)


def _grad_combine(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return combine_grad_op(grad, *ctx.saved_tensors)


combine_op.register_autograd(_grad_combine, setup_context=_keep_grouped)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 [T, E] by the router's own contract."""
    check_linear(x, weight, None, torch.float32)
    return router_op(x.contiguous(), weight)


def check(op: str, *tensors: Tensor) -> None:
    """CUDA tensors of one device on a GPU with proved contracts."""
    require(op, *tensors)
