"""Embedding on the GPU: a copy forward, and a backward with one defined order and no atomics.

Contract ``embedding_grad.runs.<dtype>.sm90.v1``: the occurrences of an id, in token order, are cut
into runs of RUN; a run is summed ascending in fp32, the runs are added ascending, one rounding. So
a row's gradient depends on that id's own tokens alone. The forward moves bits and has no contract
to prove. Legend: T tokens, V vocabulary, H columns.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import Contract, Implementation, register_contract, register_implementation
from ..errors import ContractError
from ..gpu.device import NAMES, aligned, missing, require

RUN = 64
_COLUMNS = 512


def grad_weight(
    dy: Tensor, ids: Tensor, vocabulary: int, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """dW [V, H] from dy [T, H] and ids [T]; fully written, zero where an id does not occur."""
    from . import gpu_kernels

    dy = aligned(dy)
    tokens, width = dy.shape
    dw = torch.zeros(vocabulary, width, dtype=out_dtype or dy.dtype, device=dy.device)
    if not dy.numel():
        return dw
    sorted_ids, order = torch.sort(ids.to(torch.int32), stable=True)
    first = torch.searchsorted(sorted_ids, sorted_ids, out_int32=True)
    part = torch.empty(2 * (-(-tokens // RUN)) + 2, width, dtype=torch.float32, device=dy.device)
    columns = -(-width // _COLUMNS)
    gpu_kernels.embedding_runs_kernel[(tokens, columns)](
        dy, order, sorted_ids, first, part, dw, tokens, width, RUN=RUN, BH=_COLUMNS, num_warps=4
    )
    gpu_kernels.embedding_combine_kernel[(-(-tokens // RUN), columns)](
        sorted_ids, first, part, dw, tokens, width, RUN=RUN, BH=_COLUMNS, num_warps=4
    )
    return dw


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = (weight.shape[0], weight.dtype)
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        vocabulary, dtype = ctx.weight
        return None, grad_weight(
            dy.reshape(-1, dy.shape[-1]), ids.reshape(-1), vocabulary, out_dtype=dtype
        )


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows ``weight[ids]``: [..., H]; differentiable in weight. ids must lie in [0, V)."""
    require("embedding", weight)
    if weight.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ContractError(
            f"embedding needs integer ids and weight [V, H], not {ids.dtype}, "
            f"{tuple(weight.shape)};"
            " pass token ids"
        )
    return _Embedding.apply(ids, weight)


def reference(dy: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
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
    return dw.to(dy.dtype)


for _name in NAMES.values():
    register_contract(
        Contract(
            id=f"embedding_grad.runs.{_name}.sm90.v1",
            op="embedding_grad",
            dtype=_name,
            device="sm90",
            formula="dW[v] = sum of dy[t] over tokens t with id v",
            order=f"runs of {RUN} occurrences ascending, then the runs ascending",
            rounding="fp32 sums, one rounding",
            functions="none",
            reference="zeromismatch.kernels.embedding.gpu:reference",
            gradient_rtol=1e-5 if _name == "float32" else 2e-2,
        )
    )
    register_implementation(
        Implementation(
            contract=f"embedding_grad.runs.{_name}.sm90.v1",
            name="triton",
            run=grad_weight,
            missing=missing,
        )
    )
