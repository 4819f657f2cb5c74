"""Embedding on the GPU: a copy forward, and a backward with one defined order and no atomics.

Contract ``embedding_grad.runs.<dtype>.sm90.v1``: the occurrences of an id, in token order, are cut
into runs of RUN; a run is summed ascending in fp32, the runs are added ascending, one rounding. So
a row's gradient depends on that id's own tokens alone. An id outside the table gives a row of NaN
forward and nothing backward: looking at ids would make the GPU wait for the host.

Legend: T tokens, V vocabulary, H columns.
"""

from typing import Any

import torch
from torch import Tensor

from ..accumulation import chain_of
from ..dispatch import choose
from ..errors import ContractError
from ..gpu.device import aligned, programs, require
from ..gpu.operator import gpu_operator
from ..gpu.register import register_gpu, serving
from ..taps import tapped

RUN = 64
_COLUMNS = 512


def gather(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows ``weight[ids]`` of [V, H], bit for bit."""
    gpu_kernels = programs(__package__, "gpu_kernels")

    weight, ids = aligned(weight), ids.contiguous()
    rows, width = ids.numel(), weight.shape[1]
    out = torch.empty(rows, width, dtype=weight.dtype, device=weight.device)
    if out.numel():
        gpu_kernels.embedding_gather_kernel[(rows, -(-width // _COLUMNS))](
            ids, weight, out, weight.shape[0], width, BH=_COLUMNS, num_warps=2
        )
    return out


def grad_weight(
    dy: Tensor,
    ids: Tensor,
    vocabulary: int,
    initial: Tensor | None = None,
    out: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """dW [V, H] from dy [T, H] and ids [T], zero where an id does not occur; plus ``initial``."""
    gpu_kernels = programs(__package__, "gpu_kernels")

    dy = aligned(dy)
    tokens, width = dy.shape
    dw = torch.zeros(vocabulary, width, dtype=out_dtype, device=dy.device)
    if dy.numel():
        sorted_ids, order = torch.sort(ids.to(torch.int32), stable=True)
        first = torch.searchsorted(sorted_ids, sorted_ids, out_int32=True)
        part = torch.empty(
            2 * (-(-tokens // RUN)) + 2, width, dtype=torch.float32, device=dy.device
        )
        columns = -(-width // _COLUMNS)
        shape = {"RUN": RUN, "BH": _COLUMNS, "num_warps": 4}
        gpu_kernels.embedding_runs_kernel[(tokens, columns)](
            dy, order, sorted_ids, first, part, dw, tokens, width, vocabulary, **shape
        )
        gpu_kernels.embedding_combine_kernel[(-(-tokens // RUN), columns)](
            sorted_ids, first, part, dw, tokens, width, vocabulary, **shape
        )
    if initial is not None:
        dw = initial + dw
    return dw if out is None else out.copy_(dw)


@gpu_operator("zeromismatch::embedding")
def embedding_op(ids: Tensor, weight: Tensor) -> Tensor:
    """[T, H] from ids [T]."""
    run = choose(serving(CONTRACTS, "embedding", weight.dtype)).run
    return tapped("embedding", run(ids, weight))


@embedding_op.register_fake
def _(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(ids.numel(), weight.shape[1])


@gpu_operator("zeromismatch::embedding_grad")
def embedding_grad_op(dy: Tensor, ids: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """dW [V, H]."""
    run = choose(serving(GRADIENTS, "embedding_grad", dy.dtype)).run
    return (
        run(dy, ids, vocabulary, out_dtype=dtype)
        if run is grad_weight
        else run(dy, ids, vocabulary).to(dtype)
    )


@embedding_grad_op.register_fake
def _(dy: Tensor, ids: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    return dy.new_empty(vocabulary, dy.shape[1], dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, weight = inputs
    ctx.save_for_backward(ids, weight)


def _grad(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None]:
    ids, weight = ctx.saved_tensors
    chain = chain_of(weight, "embedding")
    if chain is None:
        return None, embedding_grad_op(dy, ids, weight.shape[0], weight.dtype)
    accumulate(dy, ids, weight.shape[0], chain)
    return None, None


embedding_op.register_autograd(_grad, setup_context=_keep)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows ``weight[ids]``: [..., H]; differentiable in weight."""
    require("embedding", weight)
    if weight.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.is_cuda:
        raise ContractError(
            f"embedding needs integer ids on the GPU and weight [V, H], not {ids.dtype} on "
            f"{ids.device}, {tuple(weight.shape)}; pass token ids"
        )
    return embedding_op(ids.reshape(-1), weight).view(*ids.shape, weight.shape[1])


def accumulate(
    grad_TH: Tensor, ids_T: Tensor, vocabulary: int, accumulate_into: Tensor | None
) -> Tensor:
    """See ``kernels/embedding``; what came before is added to the finished sum of this call."""
    require("embedding_grad", grad_TH, ids_T)
    run = choose(serving(GRADIENTS, "embedding_grad", grad_TH.dtype)).run
    return run(grad_TH, ids_T, vocabulary, accumulate_into, accumulate_into)


def reference(ids: Tensor, weight: Tensor) -> Tensor:
    """The definition: torch's own indexing."""
    return weight[ids]


def reference_grad(
    dy: Tensor,
    ids: Tensor,
    vocabulary: int,
    initial: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The definition, as a loop over ids, runs and tokens."""
    dw = torch.zeros(vocabulary, dy.shape[1], dtype=torch.float32, device=dy.device)
    for token in ids.unique().tolist():
        rows = dy[ids == token].float()
        total = torch.zeros_like(dw[0])
        for start in range(0, rows.shape[0], RUN):
            run = torch.zeros_like(total)
            for row in rows[start : start + RUN]:
                run = run + row
            total = total + run if rows.shape[0] > RUN else run
        dw[token] = total
    if initial is not None:
        dw = initial + dw
    return dw if out is None else out.copy_(dw)


CONTRACTS = register_gpu(
    {"triton": gather},
    name="embedding.gather",
    op="embedding",
    formula="y[t] = W[ids[t]]",
    order="none: a copy",
    rounding="none",
    functions="none",
    reference="zeromismatch.kernels.embedding.gpu:reference",
    rtol=(1e-5, 2e-2),
)
GRADIENTS = register_gpu(
    {"triton": grad_weight},
    name="embedding_grad.runs",
    op="embedding_grad",
    formula="dW[v] = sum of dy[t] over tokens t with id v, plus what came before",
    order=f"runs of {RUN} occurrences ascending, then the runs ascending",
    rounding="fp32 sums, one rounding",
    functions="none",
    reference="zeromismatch.kernels.embedding.gpu:reference_grad",
    rtol=(1e-5, 2e-2),
)
