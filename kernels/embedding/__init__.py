"""Token embeddings: rows of a table out, gradients of rows in.

    y[t] = W[ids[t]]        dW[v] = sum over t ascending, where ids[t] = v, of dY[t]

Contracts ``embedding.gather.<dtype>.cpu.v1`` (a copy) and
``embedding_grad.scatter.<dtype>.cpu.v1``: per vocabulary row, tokens are added in fp32 in the order
of the call, starting from +0 or, with ``accumulate_into=``, from what earlier micro-batches left,
so that a split batch has the bits of the whole. CUDA tensors go
to :mod:`.gpu`. The autograd gradient is rounded once to the
table's dtype.

Left out on purpose: ``padding_idx`` (whoever applies the kernel detaches those rows, see
``model_recipes/operators.py``), ``max_norm`` and scaling by frequency.
``pytest tests/kernels/embedding`` exercises it. Legend: T tokens, V vocabulary, H width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..accumulation import chain_of
from ..dispatch import choose
from ..errors import ContractError
from . import cpu as cpu  # registers the contracts
from . import gpu

__all__ = ["embedding", "grad_weight"]

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """``weight[V, H]`` at ``ids[...]`` (int64 or int32): ``[..., H]``, the dtype of the table.

    Differentiable once in ``weight``. Raises ContractError for ids outside the table, and for
    tables that are not fp32 or bf16 on the CPU.
    """
    if weight.is_cuda:
        return gpu.embedding(ids, weight)
    _check(ids, weight)
    ids_T = ids.reshape(-1).to(torch.int64).contiguous()
    if torch.is_grad_enabled() and weight.requires_grad:
        y_TH = _Embedding.apply(ids_T, weight)
    else:
        y_TH = _gather(ids_T, weight)
    return y_TH.view(*ids.shape, weight.shape[1])


def grad_weight(
    grad_TH: Tensor, ids_T: Tensor, vocabulary: int, *, accumulate_into: Tensor | None = None
) -> Tensor:
    """dW fp32 ``[V, H]``; ``accumulate_into``: contiguous fp32, continued in place and returned."""
    shape = (vocabulary, grad_TH.shape[1])
    if accumulate_into is not None and (
        accumulate_into.dtype != torch.float32
        or accumulate_into.shape != shape
        or not accumulate_into.is_contiguous()
    ):
        raise ContractError(
            f"accumulate_into must be contiguous float32 {shape}, not {accumulate_into.dtype} "
            f"{tuple(accumulate_into.shape)}; allocate it with torch.zeros{shape}"
        )
    if grad_TH.is_cuda:
        return gpu.accumulate(grad_TH, ids_T, vocabulary, accumulate_into)
    _check_ids(ids_T, vocabulary)
    run = choose(f"embedding_grad.scatter.{_NAMES[grad_TH.dtype]}.cpu.v1").run
    return run(
        grad_TH.contiguous(), ids_T.contiguous(), vocabulary, accumulate_into, accumulate_into
    )


def _gather(ids_T: Tensor, weight: Tensor) -> Tensor:
    run = choose(f"embedding.gather.{_NAMES[weight.dtype]}.cpu.v1").run
    return run(ids_T, weight.detach().contiguous())


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids_T, weight)
        return _gather(ids_T, weight)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_TH: Tensor
    ) -> tuple[None, Tensor | None]:
        ids_T, weight = ctx.saved_tensors
        chain = chain_of(weight, "embedding")
        total = grad_weight(grad_TH, ids_T, weight.shape[0], accumulate_into=chain)
        return None, total.to(weight.dtype) if chain is None else None


def _check(ids: Tensor, weight: Tensor) -> None:
    if weight.dtype not in _NAMES or weight.dim() != 2:
        raise ContractError(
            f"embedding takes a float32 or bfloat16 table [V, H], not {weight.dtype} "
            f"{tuple(weight.shape)}; convert it first"
        )
    if weight.device.type != "cpu" or ids.device.type != "cpu":
        raise ContractError(
            f"embedding has no contract for ids on {ids.device} and a table on {weight.device}; "
            "move both to the CPU"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise ContractError(
            f"token ids must be int64 or int32, not {ids.dtype}; convert them first"
        )
    _check_ids(ids, weight.shape[0])


def _check_ids(ids: Tensor, vocabulary: int) -> None:
    if ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise ContractError(
            f"token id {low if low < 0 else high} is outside the table of {vocabulary} rows; check "
            "that the tokenizer belongs to this model"
        )
