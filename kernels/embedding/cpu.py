"""Embedding on the CPU: contracts and the compiled core's variants as implementations.

    embedding.gather       rows of the table, copied byte for byte
    embedding_grad.scatter per vocabulary row, the gradients of its tokens added in fp32, ascending

Signatures are those of ``kernels/reference/embedding.py``. Threads own columns in the scatter, so
no atomics exist and the order is the order of the tokens.
"""

import torch
from torch import Tensor

from ..cpu.load import core
from ..cpu.register import is_bf16, register_core


def embedding(variant: str, ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    """[T, H]; every id must be inside the table."""
    rows, width = ids_T.shape[0], weight_VH.shape[1]
    out = torch.empty(rows, width, dtype=weight_VH.dtype)
    row_bytes = width * weight_VH.element_size()
    core(variant).call(
        "gather_rows", weight_VH, ids_T, out, rows, row_bytes, torch.get_num_threads()
    )
    return out


def grad_weight(
    variant: str,
    grad_TH: Tensor,
    ids_T: Tensor,
    vocabulary: int,
    initial_VH: Tensor | None = None,
    out_VH: Tensor | None = None,
) -> Tensor:
    """dW fp32 [V, H], from ``initial`` and into ``out`` where given; both may be one tensor."""
    rows, width = grad_TH.shape
    if out_VH is None:
        out_VH = torch.empty(vocabulary, width)
    if initial_VH is None:
        out_VH.zero_()
    elif initial_VH.data_ptr() != out_VH.data_ptr():
        out_VH.copy_(initial_VH)
    core(variant).call(
        "scatter_rows", grad_TH, is_bf16(grad_TH), ids_T, out_VH, rows, width,
        torch.get_num_threads(),
    )  # fmt: skip
    return out_VH


_OPERATIONS = {
    "embedding.gather": (embedding, "y[t] = W[ids[t]]", "none: a copy", "none"),
    "embedding_grad.scatter": (
        grad_weight,
        "dW[v] = sum of dY[t] over t with ids[t] = v",
        "tokens ascending, from +0 or the given accumulator",
        "gradients widened exactly, one fp32 addition per token",
    ),
}

for _name, (_function, _formula, _order, _rounding) in _OPERATIONS.items():
    for _storage, _rtol in (("float32", 1e-5), ("bfloat16", 1e-2)):
        register_core(
            _function,
            name=_name,
            storages=(_storage,),
            op=_name.partition(".")[0],
            formula=_formula,
            order=_order,
            rounding=_rounding,
            functions="none",
            reference=f"zeromismatch.kernels.reference.embedding:{_function.__name__}",
            gradient_rtol=_rtol,
        )
