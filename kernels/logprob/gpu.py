"""Log-probabilities on the GPU: from fp32 logits, and fused with the LM head, forward and backward.

Contract ``logprob.blocks.float32.sm90.v1`` (formula and order in :mod:`.gpu_kernels`): fp32 logits,
IEEE division by the temperature, blocks of BLOCK columns at absolute places, blocks merged
ascending. Logits are class L with fp32 output, so a row's log-probability depends on that row
alone.

``lm_head_logprob`` never holds all logits: rows are taken ROWS at a time forward; backward goes
over the vocabulary CHUNK columns at a time, recomputes the logits of all rows for the chunk, and
finishes that part of dW at once. dH adds the chunks ascending in fp32 (CHUNK is part of the
gradient's order; it is not part of the forward's). d_logits are rounded to the dtype of h before
the two products.

Legend: T rows, V vocabulary, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import Contract, Implementation, register_contract, register_implementation
from ..errors import ContractError
from ..gpu.device import aligned, missing, require
from ..linear.gpu import gemm

BLOCK = 4096
LANES = 128
ROWS = 2048
CHUNK = 16384
_GRADIENT_BLOCK = 2048
_MAX_ROWS = 65535


def _forward(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(lp, row maximum, log of the row sum) of contiguous fp32 logits."""
    from . import gpu_kernels

    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // BLOCK)
    lp, row_max, log_sum, chosen = (torch.empty(rows, device=logits.device) for _ in range(4))
    if not rows:
        return lp, row_max, log_sum
    block_max, block_sum = (torch.empty(rows, blocks, device=logits.device) for _ in range(2))
    for start in range(0, rows, _MAX_ROWS):
        part = slice(start, start + _MAX_ROWS)
        gpu_kernels.logprob_block_kernel[(blocks, logits[part].shape[0])](
            logits[part],
            temperature[part],
            block_max[part],
            block_sum[part],
            vocabulary,
            blocks,
            logits.stride(0),
            BV=BLOCK,
            W=LANES,
            VEC=4,
            num_warps=4,
            enable_fp_fusion=False,
        )
    grid = (-(-rows // 64),)
    gpu_kernels.logprob_chosen_kernel[grid](
        logits, targets, chosen, rows, 0, vocabulary, logits.stride(0), BT=64, num_warps=2
    )
    gpu_kernels.logprob_merge_kernel[grid](
        block_max,
        block_sum,
        chosen,
        temperature,
        lp,
        row_max,
        log_sum,
        rows,
        blocks,
        BT=64,
        BB=blocks,
        num_warps=2,
        enable_fp_fusion=False,
    )
    return lp, row_max, log_sum


def _d_logits(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    g: Tensor,
    first: int,
    out: Tensor,
) -> Tensor:
    from . import gpu_kernels

    rows, width = logits.shape
    for start in range(0, rows, _MAX_ROWS):
        part = slice(start, start + _MAX_ROWS)
        gpu_kernels.logprob_bwd_kernel[(-(-width // _GRADIENT_BLOCK), logits[part].shape[0])](
            logits[part],
            targets[part],
            temperature[part],
            row_max[part],
            log_sum[part],
            g[part],
            out[part],
            first,
            width,
            logits.stride(0),
            out.stride(0),
            BV=_GRADIENT_BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out


def _temperature(temperature: float | Tensor, rows: int, device: torch.device) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.to(device=device, dtype=torch.float32).expand(rows).contiguous()
    return torch.full((rows,), temperature, dtype=torch.float32, device=device)


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
        logits = aligned(logits)
        lp, row_max, log_sum = _forward(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, temperature, row_max, log_sum)
        return lp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        logits, *rest = ctx.saved_tensors
        return _d_logits(logits, *rest, g.contiguous(), 0, torch.empty_like(logits)), None, None


def logprob(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """fp32 [T] from fp32 logits [T, V]; differentiable in logits. Targets must lie in [0, V)."""
    require("logprob", logits, dtypes=(torch.float32,))
    if targets.shape != logits.shape[:1]:
        raise ContractError(
            f"logprob needs logits [T, V], targets [T], not {tuple(logits.shape)}, "
            f"{tuple(targets.shape)}; pass one target per row"
        )
    return _Logprob.apply(
        logits, targets.contiguous(), _temperature(temperature, logits.shape[0], logits.device)
    )


def lm_head(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """fp32 logits [T, V] of class L."""
    return gemm("nt", h, weight, bias, out_dtype=torch.float32)


class _LmHeadLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        temperature: Tensor,
    ) -> Tensor:
        parts = []
        for start in range(0, h.shape[0], ROWS):
            part = slice(start, start + ROWS)
            parts.append(_forward(lm_head(h[part], weight, bias), targets[part], temperature[part]))
        empty = (h.new_empty(0, dtype=torch.float32),) * 3
        lp, row_max, log_sum = (torch.cat(each) for each in zip(*(parts or [empty]), strict=True))
        ctx.save_for_backward(h, weight, targets, bias, temperature, row_max, log_sum)
        return lp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, targets, bias, temperature, row_max, log_sum = ctx.saved_tensors
        wants_h, wants_weight, _, wants_bias, _ = ctx.needs_input_grad
        rows, vocabulary = h.shape[0], weight.shape[0]
        dh = torch.zeros(h.shape, dtype=torch.float32, device=h.device) if wants_h else None
        dw = torch.empty_like(weight) if wants_weight else None
        db = torch.empty(vocabulary, device=h.device) if wants_bias else None
        g = g.contiguous()
        for first in range(0, vocabulary, CHUNK):
            part = slice(first, min(first + CHUNK, vocabulary))
            logits = lm_head(h, weight[part], None if bias is None else bias[part])
            d = _d_logits(
                logits,
                targets,
                temperature,
                row_max,
                log_sum,
                g,
                first,
                torch.empty(logits.shape, dtype=h.dtype, device=h.device),
            )
            del logits
            if dh is not None:
                gemm("nn", d, weight[part], out=dh, accumulate=True)
            if dw is not None:
                gemm("tn", d, h, out=dw[part])
            if db is not None:
                db[part] = gemm("nn", d.new_ones(1, rows), d, out_dtype=torch.float32)[0]
        return (
            None if dh is None else dh.to(h.dtype),
            dw,
            None,
            None if db is None else db.to(bias.dtype),
            None,
        )


def lm_head_logprob(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """fp32 [T]: the bits of ``logprob(lm_head(h, weight, bias), targets, temperature)``."""
    require("lm_head_logprob", h, weight, bias)
    return _LmHeadLogprob.apply(
        aligned(h),
        aligned(weight),
        targets.contiguous(),
        bias,
        _temperature(temperature, h.shape[0], h.device),
    )


def _run(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    return _forward(aligned(logits), targets, temperature)[0]


def reference(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """The same kernels, one row at a time: order and functions are theirs; rows cannot matter."""
    rows = [
        _run(logits[i : i + 1].clone(), targets[i : i + 1], temperature[i : i + 1])
        for i in range(logits.shape[0])
    ]
    return torch.cat(rows) if rows else logits.new_empty(0)


_CONTRACT = register_contract(
    Contract(
        id="logprob.blocks.float32.sm90.v1",
        op="logprob",
        dtype="float32",
        device="sm90",
        formula="lp = (z_t - max z) - log sum exp(z - max z), z = logit / T",
        order=(
            f"blocks of {BLOCK} columns at absolute places, a tree of halves, neighbours "
            f"and halves inside, blocks ascending"
        ),
        rounding="fp32 throughout, no FMA",
        functions="ex2.approx.ftz, lg2.approx, IEEE division",
        reference="zeromismatch.kernels.logprob.gpu:reference",
        gradient_rtol=1e-3,
    )
)
register_implementation(
    Implementation(contract=_CONTRACT.id, name="triton", run=_run, missing=missing)
)
