"""Log-probabilities on the GPU from fp32 logits, forward and backward.

Contract ``logprob.blocks.float32.sm90.v1`` (formula and order in :mod:`.gpu_kernels`): fp32 logits,
IEEE division by the temperature, blocks of BLOCK columns at absolute places, blocks merged
ascending. Logits are class L with fp32 output, so a row's log-probability depends on that row
alone.

:mod:`.gpu_head` fuses them with the LM head.

Legend: T rows, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from ..dispatch import choose
from ..errors import ContractError
from ..gpu.device import aligned, programs, require
from ..gpu.operator import gpu_operator
from ..gpu.register import register_gpu, serving
from ..linear import gpu as linear
from ..taps import tapped

BLOCK = 4096
LANES = 128
_GRADIENT_BLOCK = 2048
_MAX_ROWS = 65535


def forward(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(lp, row maximum, log of the row sum) of fp32 logits."""
    gpu_kernels = programs(__package__, "gpu_kernels")

    logits, targets, temperature = aligned(logits), targets.contiguous(), temperature.contiguous()

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


def d_logits(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    g: Tensor,
    out: Tensor | None = None,
    *,
    first: int = 0,
) -> Tensor:
    """d_logits [T, V] of columns from ``first`` on; ``out`` may have another dtype."""
    gpu_kernels = programs(__package__, "gpu_kernels")

    logits = aligned(logits)
    saved = (targets, temperature, row_max, log_sum, g)
    targets, temperature, row_max, log_sum, g = (each.contiguous() for each in saved)
    out = torch.empty_like(logits) if out is None else out
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


def temperatures(temperature: float | Tensor, rows: int, device: torch.device) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.to(device=device, dtype=torch.float32).expand(rows).contiguous()
    return torch.full((rows,), temperature, dtype=torch.float32, device=device)


@gpu_operator("zeromismatch::logprob")
def logprob_op(
    logits: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(lp, row maximum, log of the row sum), fp32 [T]."""
    run = choose(serving(CONTRACTS, "logprob", logits.dtype)).run
    lp, row_max, log_sum = run(logits, targets, temperature)
    return tapped("logprob", lp), row_max, log_sum


@logprob_op.register_fake
def _(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return no_rows(logits)


def no_rows(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = (like.new_empty(like.shape[0], dtype=torch.float32) for _ in range(3))
    return a, b, c


@gpu_operator("zeromismatch::logprob_grad")
def logprob_grad_op(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    g: Tensor,
) -> Tensor:
    """d_logits fp32 [T, V]."""
    run = choose(serving(GRADIENTS, "logprob_grad", logits.dtype)).run
    return run(logits, targets, temperature, row_max, log_sum, g)


@logprob_grad_op.register_fake
def _(logits: Tensor, *args: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])


def _grad(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
    return logprob_grad_op(*ctx.saved_tensors, g), None, None


logprob_op.register_autograd(_grad, setup_context=_keep)


def logprob(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """fp32 [T] from fp32 logits [T, V]; differentiable in logits; NaN for an id outside [0, V)."""
    require("logprob", logits, targets, dtypes=(torch.float32,))
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ContractError(
            f"logprob needs logits [T, V], targets [T], not {tuple(logits.shape)}, "
            f"{tuple(targets.shape)}; pass one target per row"
        )
    at = temperatures(temperature, logits.shape[0], logits.device)
    return logprob_op(logits, targets, at)[0]


def lm_head(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """fp32 logits [..., V] of class L; differentiable once."""
    return linear.linear(h, weight, bias, out_dtype=torch.float32)


def reference(
    logits: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same kernels, one row at a time: order and functions are theirs; rows cannot matter."""
    rows = [
        forward(logits[i : i + 1].clone(), targets[i : i + 1], temperature[i : i + 1])
        for i in range(logits.shape[0])
    ]
    if not rows:
        return no_rows(logits)
    lp, row_max, log_sum = (torch.cat(each) for each in zip(*rows, strict=True))
    return lp, row_max, log_sum


def reference_grad(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    g: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """The kernel on one column at a time, as chunks of width 1."""
    columns = [
        d_logits(logits[:, i : i + 1], targets, temperature, row_max, log_sum, g, first=i)
        for i in range(logits.shape[1])
    ]
    d = torch.cat(columns, dim=1)
    return d if out is None else out.copy_(d)


CONTRACTS = register_gpu(
    {"triton": forward},
    name="logprob.blocks",
    storages=("float32",),
    op="logprob",
    formula="lp = (z_t - max z) - log sum exp(z - max z), z = logit / T",
    order=f"blocks of {BLOCK} columns at absolute places, a tree of halves, neighbours and halves "
    "inside, blocks ascending",
    rounding="fp32 throughout, no FMA",
    functions="ex2.approx.ftz, lg2.approx, IEEE division",
    reference="zeromismatch.kernels.logprob.gpu:reference",
    rtol=(1e-3, 1e-3),
)
GRADIENTS = register_gpu(
    {"triton": d_logits},
    name="logprob_grad.elementwise",
    storages=("float32",),
    op="logprob_grad",
    formula="d_logit = (grad (onehot - exp((z - max) - log_sum))) / T",
    order="elementwise",
    rounding="every operation in fp32, no FMA",
    functions="ex2.approx.ftz, IEEE division",
    reference="zeromismatch.kernels.logprob.gpu:reference_grad",
    rtol=(1e-3, 1e-3),
)
