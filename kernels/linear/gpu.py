"""Linear on the GPU, forward and backward: GEMM class L (:mod:`.gpu_gemm`) under every form.

    linear, lm_head        y  = round(x W^T + b)      lm_head: fp32 logits, not rounded
    linear_grad_input      dX = round(dY W)           row-invariant: class L over outputs
    linear_grad_weight     dW = dY^T X                class L over tokens, in blocks of DW_CHUNK
    linear_grad_bias       db = 1 dY                  likewise

dY is rounded to the weight's dtype first. Blocks of DW_CHUNK tokens are added ascending in fp32, so
micro-batches that end on that grid give the bits of the whole batch (:mod:`..accumulation`).

Legend: T tokens, K inputs, N outputs.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..accumulation import chain_of
from ..dispatch import choose
from ..errors import ContractError
from ..gpu.device import NAMES, aligned, require
from ..gpu.operator import gpu_operator
from ..gpu.register import ARCHITECTURE, register_gpu
from ..taps import tapped
from .gpu_gemm import SHORT, VERSIONS, gemm, own_tile, reference, run_tile, sizes_of
from .gpu_table import Tile

DW_CHUNK = 8192
_DTYPES = {name: dtype for dtype, name in NAMES.items()}


def contract_id(op: str, dtype: torch.dtype) -> str:
    """The contract of ``linear``, ``lm_head`` or ``linear_grad_*`` at a dtype."""
    return f"{op}.L.{NAMES[dtype]}.{ARCHITECTURE}.{VERSIONS.get(NAMES[dtype], 'v1')}"


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """[T, N]."""
    return gemm("nt", x, weight, bias, out_dtype=out_dtype)


def head(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """fp32 [T, V]."""
    return gemm("nt", x, weight, bias, out_dtype=torch.float32, out=out)


def input_grad(grad: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """dX [T, K]."""
    return gemm("nn", grad.to(weight.dtype), weight, out_dtype=out_dtype)


def weight_grad(
    grad: Tensor,
    x: Tensor,
    initial: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """dW [N, K]; ``initial`` and ``out`` are fp32 and may be one tensor."""
    grad, tokens = grad.to(x.dtype), grad.shape[0]
    if initial is None and out is None and tokens <= DW_CHUNK:
        return gemm("tn", grad, x, out_dtype=out_dtype or torch.float32)
    total = (
        out
        if out is not None
        else torch.empty(grad.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    )
    if initial is not None and initial is not total:
        total.copy_(initial)
    for start in range(0, max(tokens, 1), DW_CHUNK):
        block = slice(start, start + DW_CHUNK)
        continued = initial is not None or start > 0
        gemm("tn", grad[block], x[block], out=total, accumulate=continued)
    return total if out is not None or out_dtype is None else total.to(out_dtype)


def bias_grad(
    grad: Tensor,
    initial: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """db [N]: the weight gradient of a column of ones."""
    ones = torch.ones(grad.shape[0], 1, dtype=grad.dtype, device=grad.device)
    first = None if initial is None else initial[None]
    total = weight_grad(ones, grad, first, torch.float32)[0]
    total = total if out_dtype is None else total.to(out_dtype)
    return total if out is None else out.copy_(total)


@gpu_operator("zeromismatch::linear")
def linear_op(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """[T, N]: torch.compile leaves the choice of a kernel to the launch."""
    run = choose(contract_id("linear", x.dtype)).run
    return tapped("linear", run(x, weight, bias, out_dtype))


@linear_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)


@gpu_operator("zeromismatch::linear_grad")
def linear_grad_op(
    grad: Tensor, x: Tensor, weight: Tensor, bias_dtype: torch.dtype, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX, dW, db); empty where not wanted."""
    grad = grad.to(x.dtype).contiguous()
    empty = x.new_empty
    run = {op: choose(contract_id(f"linear_grad_{op}", x.dtype)).run for op in _GRADIENTS}
    return (
        run["input"](grad, weight) if wanted[0] else empty(0),
        run["weight"](grad, x, None, weight.dtype) if wanted[1] else empty(0),
        run["bias"](grad, None, bias_dtype) if wanted[2] else empty(0, dtype=bias_dtype),
    )


@linear_grad_op.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, bias_dtype: torch.dtype, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    empty = x.new_empty
    return (
        empty(x.shape if wanted[0] else (0,)),
        empty(weight.shape if wanted[1] else (0,)),
        empty(weight.shape[:1] if wanted[2] else (0,), dtype=bias_dtype),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.bias_dtype = weight.dtype if bias is None else bias.dtype


def _grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    chains = [
        chain_of(each, "linear") if want else None
        for each, want in zip((weight, bias), wanted[1:], strict=True)
    ]
    if chains[0] is not None:
        grad_weight(grad, x, chains[0], None)
    if chains[1] is not None:
        grad_bias(grad.to(x.dtype), chains[1], None)
    wanted[1:] = [want and chain is None for want, chain in zip(wanted[1:], chains, strict=True)]
    got = linear_grad_op(grad, x, weight, ctx.bias_dtype, wanted)
    return *(each if want else None for each, want in zip(got, wanted, strict=True)), None


linear_op.register_autograd(_grad, setup_context=_keep)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x[..., K]`` times ``weight[N, K]`` transposed, plus ``bias[N]``; differentiable once."""
    check(x, weight, bias, out_dtype)
    lead = x.shape[:-1]
    rows = x.reshape(math.prod(lead), x.shape[-1])
    return linear_op(rows, weight, bias, out_dtype or x.dtype).view(*lead, weight.shape[0])


def check(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
    """Raise ContractError where class L does not cover these tensors."""
    require("linear", x, weight, bias)
    alike = weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype)
    fits = weight.dim() == 2 and x.dim() >= 1 and x.shape[-1] == weight.shape[1]
    if not alike or not fits or (bias is not None and bias.shape != weight.shape[:1]):
        given = [(str(t.dtype), tuple(t.shape)) for t in (x, weight, bias) if t is not None]
        raise ContractError(
            f"linear needs x [..., K], weight [N, K], bias [N] of one dtype, not {given}; check "
            "which weight belongs to this layer"
        )
    if out_dtype not in (None, torch.float32, x.dtype):
        raise ContractError(
            f"linear rounds to {x.dtype} or float32, not {out_dtype}; cast the result"
        )


def grad_input(grad: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """See ``kernels/linear``."""
    run = choose(contract_id("linear_grad_input", weight.dtype)).run
    return run(grad, weight.detach(), out_dtype)


def grad_weight(
    grad: Tensor, x: Tensor, accumulate_into: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """See ``kernels/linear``; what came before takes part as a block of its own."""
    run = choose(contract_id("linear_grad_weight", x.dtype)).run
    return run(grad, x, accumulate_into, out_dtype, accumulate_into)


def grad_bias(
    grad: Tensor, accumulate_into: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """See ``kernels/linear``; what came before takes part as a block of its own."""
    run = choose(contract_id("linear_grad_bias", grad.dtype)).run
    return run(grad, accumulate_into, out_dtype, accumulate_into)


def _offered(tile: Tile, form: str, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    bias, out_dtype = (*rest, None, None)[:2]
    m, n, _ = sizes_of(form, a, b)
    out = torch.empty(m, n, dtype=out_dtype or a.dtype, device=a.device)
    return run_tile(tile, form, aligned(a), aligned(b), bias, out)


def _dispatched(form: str, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    bias, out_dtype = (*rest, None, None)[:2]
    return gemm(form, a, b, bias, out_dtype=out_dtype)


def reference_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The class's pointer kernel."""
    return reference("nt", x, weight, bias, out_dtype)


def reference_head(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The class's pointer kernel, fp32 out."""
    logits = reference("nt", x, weight, bias, torch.float32)
    return logits if out is None else out.copy_(logits)


def reference_input(grad: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """The class's pointer kernel."""
    return reference("nn", grad.to(weight.dtype), weight, None, out_dtype)


def reference_weight(
    grad: Tensor,
    x: Tensor,
    initial: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Blocks of tokens by the class's pointer kernel, added ascending."""
    grad, total = grad.to(x.dtype), initial
    for start in range(0, max(grad.shape[0], 1), DW_CHUNK):
        block = slice(start, start + DW_CHUNK)
        part = reference("tn", grad[block], x[block], None, torch.float32)
        total = part if total is None else total + part
    assert total is not None
    total = total if out_dtype is None else total.to(out_dtype)
    return total if out is None else out.copy_(total)


def reference_bias(
    grad: Tensor,
    initial: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The weight gradient of a column of ones."""
    ones = torch.ones(grad.shape[0], 1, dtype=grad.dtype, device=grad.device)
    first = None if initial is None else initial[None]
    total = reference_weight(ones, grad, first)[0]
    total = total if out_dtype is None else total.to(out_dtype)
    return total if out is None else out.copy_(total)


CHAINS = dict.fromkeys(
    NAMES.values(), "one fp32 accumulator per output, {axis} ascending, never split"
) | {"float32": f"FMA chains over {SHORT} {{axis}} ascending, each from +0, added ascending"}
_GRADIENTS = ("input", "weight", "bias")
_BLOCKS = f" within blocks of {DW_CHUNK} tokens; blocks added ascending in fp32"
_HERE = "zeromismatch.kernels.linear.gpu:"
for _op, _run, _formula, _axis, _more, _reference in (
    ("linear", forward, "y = round(sum_k x W + b)", "inputs", "", "reference_linear"),
    ("lm_head", head, "logits = sum_k x W + b", "inputs", "", "reference_head"),
    ("linear_grad_input", input_grad, "dX = sum_n dY W", "outputs", "", "reference_input"),
    ("linear_grad_weight", weight_grad, "dW = sum_t dY X", "tokens", _BLOCKS, "reference_weight"),
    ("linear_grad_bias", bias_grad, "db = sum_t dY", "tokens", _BLOCKS, "reference_bias"),
):
    for _dtype, _name in NAMES.items():
        register_gpu(
            {"dispatched": _run},
            name=f"{_op}.L",
            storages=(_name,),
            op=_op,
            formula=_formula,
            order=CHAINS[_name].format(axis=_axis) + _more,
            version=VERSIONS.get(_name, "v1"),
            rounding="fp32 accumulator, bias added in fp32, one rounding to nearest even",
            functions="fma" if _name == "float32" else "Hopper mma of 16-wide groups, fp32 sums",
            reference=_HERE + _reference,
        )
for _dtype, _name in NAMES.items():
    _tiles = {own_tile(m, n, _dtype) for m in (1, 32, 64, 256, 1024) for n in (1024, 8192)}
    register_gpu(
        {"dispatched": _dispatched} | {t.name: partial(_offered, t) for t in _tiles},
        name="gemm.L",
        storages=(_name,),
        op="gemm",
        formula="c[m, n] = round(sum_k a[m, k] b[n, k] + bias[n])",
        order=CHAINS[_name].format(axis="reduced axis"),
        version=VERSIONS.get(_name, "v1"),
        rounding="fp32 accumulator, bias added in fp32, one rounding to nearest even",
        functions="fma" if _name == "float32" else "Hopper mma of 16-wide groups, fp32 sums",
        reference="zeromismatch.kernels.linear.gpu_gemm:reference",
    )
