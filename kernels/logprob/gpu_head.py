"""LM head and logprob in one operator that never holds all logits, forward and backward.

Forward takes ROWS rows of logits at a time. Backward goes over the vocabulary CHUNK columns at a
time, recomputes the logits of all rows for the chunk, and finishes that part of dW at once. dH adds
the chunks ascending in fp32 (CHUNK is part of the gradient's order; it is not part of the
forward's). d_logits are rounded to the dtype of h before the two products. dW is class L over
tokens in blocks of ``linear.gpu.DW_CHUNK``, and continues the chain of earlier micro-batches.

Where a gradient will be wanted, the forward keeps the logits of the first chunks, KEPT of the
vocabulary at most, and the backward takes those instead of computing them again; later chunks reuse
their memory. So a graph can be differentiated once.

Legend: T rows, V vocabulary, H hidden size, C chunks kept.
"""

from typing import Any

import torch
from torch import Tensor

from ..accumulation import chain_of
from ..dispatch import choose
from ..errors import ContractError
from ..gpu.device import aligned, require
from ..gpu.operator import gpu_operator
from ..gpu.register import serving
from ..linear import gpu as linear
from ..linear.gpu_gemm import gemm
from ..taps import tapped
from .gpu import CONTRACTS, d_logits, no_rows, temperatures

ROWS = 768
CHUNK = 16384
KEPT = 0.22

_Head = tuple[Tensor, Tensor, Tensor, Tensor]


@gpu_operator("zeromismatch::lm_head_logprob")
def lm_head_logprob_op(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    kept_chunks: int,
) -> _Head:
    """(lp, row maximum, log of the row sum, kept logits [C, T, CHUNK])."""
    h, weight = aligned(h), aligned(weight)
    head = choose(linear.contract_id("lm_head", h.dtype)).run
    run = choose(serving(CONTRACTS, "logprob", torch.float32)).run
    kept = torch.empty(kept_chunks, h.shape[0], CHUNK, device=h.device)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, h.shape[0], ROWS):
        part = slice(start, start + ROWS)
        logits = head(h[part], weight, bias)
        parts.append(run(logits, targets[part], temperature[part]))
        for chunk in range(kept_chunks):
            kept[chunk, part] = logits[:, chunk * CHUNK : (chunk + 1) * CHUNK]
        del logits
    if not parts:
        return *no_rows(h), kept
    lp, row_max, log_sum = (torch.cat(each) for each in zip(*parts, strict=True))
    return tapped("logprob", lp), row_max, log_sum, kept


@lm_head_logprob_op.register_fake
def _(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    kept_chunks: int,
) -> _Head:
    kept = h.new_empty(kept_chunks, h.shape[0], CHUNK, dtype=torch.float32)
    return *no_rows(h), kept


def _gradients(
    g: Tensor,
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    kept: Tensor,
    wanted: list[bool],
    chain: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dH, dW, db), CHUNK columns at a time; empty where not wanted, or in ``chain`` (dW)."""
    h, weight = aligned(h), aligned(weight)
    head = choose(linear.contract_id("lm_head", h.dtype)).run
    rows, vocabulary = h.shape[0], weight.shape[0]
    dh = torch.zeros(h.shape, dtype=torch.float32, device=h.device) if wanted[0] else None
    dw = torch.empty_like(weight) if wanted[1] and chain is None else h.new_empty(0)
    db = torch.empty(vocabulary if wanted[2] else 0, device=h.device)
    g, scratch = g.contiguous(), kept[0].view(-1) if kept.shape[0] else None
    for number, first in enumerate(range(0, vocabulary, CHUNK)):
        part = slice(first, min(first + CHUNK, vocabulary))
        if number < kept.shape[0]:
            logits = kept[number]
        else:
            width = part.stop - first
            out = None if scratch is None else scratch[: rows * width].view(rows, width)
            logits = head(h, weight[part], None if bias is None else bias[part], out)
        d = torch.empty(logits.shape, dtype=h.dtype, device=h.device)
        d_logits(logits, targets, temperature, row_max, log_sum, g, d, first=first)
        del logits
        if dh is not None:
            gemm("nn", d, weight[part], out=dh, accumulate=True)
        if wanted[1] and chain is not None:
            linear.weight_grad(d, h, chain[part], out=chain[part])
        elif wanted[1] and rows <= linear.DW_CHUNK:
            gemm("tn", d, h, out=dw[part])
        elif wanted[1]:
            dw[part] = linear.weight_grad(d, h)
        if wanted[2]:
            db[part] = gemm("nn", d.new_ones(1, rows), d, out_dtype=torch.float32)[0]
    first_grad = h.new_empty(0) if dh is None else dh.to(h.dtype)
    return first_grad, dw, db.to(h.dtype)


@torch.library.custom_op("zeromismatch::lm_head_logprob_grad", mutates_args=("kept",))
def lm_head_logprob_grad_op(
    g: Tensor,
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    kept: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dH, dW, db); empty where not wanted. The memory of ``kept`` is used up."""
    return _gradients(
        g, h, weight, targets, bias, temperature, row_max, log_sum, kept, wanted, None
    )


@lm_head_logprob_grad_op.register_fake
def _(g: Tensor, h: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    wanted = args[-1]
    return (
        h.new_empty(h.shape if wanted[0] else (0,)),
        h.new_empty(weight.shape if wanted[1] else (0,)),
        h.new_empty(weight.shape[:1] if wanted[2] else (0,)),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: _Head) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], *output[1:])


def _grad(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    wants_h, wants_weight, _targets, wants_bias, *_others = ctx.needs_input_grad
    wanted, saved = [wants_h, wants_weight, wants_bias], ctx.saved_tensors
    chain = chain_of(saved[1], "lm_head") if wants_weight else None
    if chain is None:
        dh, dw, db = lm_head_logprob_grad_op(g, *saved, wanted)
    else:
        dh, dw, db = _gradients(g, *saved, wanted=wanted, chain=chain)
        torch.autograd.graph.increment_version(saved[-1])
    return (
        dh if wants_h else None,
        dw if wants_weight and chain is None else None,
        None,
        db if wants_bias else None,
        None,
        None,
    )


lm_head_logprob_op.register_autograd(_grad, setup_context=_keep)


def lm_head_logprob(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """fp32 [T]: the bits of ``logprob(lm_head(h, weight, bias), targets, temperature)``."""
    linear.check(h, weight, bias, torch.float32)
    require("lm_head_logprob", h, targets)
    if h.dim() != 2 or targets.shape != h.shape[:1]:
        raise ContractError(
            f"lm_head_logprob needs h [T, H] and targets [T], not {tuple(h.shape)}, "
            f"{tuple(targets.shape)}; flatten the leading axes and pass one target per row"
        )
    at = temperatures(temperature, h.shape[0], h.device)
    trained = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (h, weight, bias)
    )
    chunks = int(KEPT * weight.shape[0]) // CHUNK if trained else 0
    return lm_head_logprob_op(h, weight, targets, bias, at, chunks)[0]
