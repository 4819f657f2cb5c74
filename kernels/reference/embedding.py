"""The definition of ``embedding.gather.*.cpu.v1`` and of its gradient, in plain torch.

Forward: rows of the table, copied. Gradient: every vocabulary row adds the gradients of its tokens
in fp32, tokens ascending, starting from +0 or from a given accumulator; rows that no token names
keep it.

Frozen: what the fast kernels must equal bit for bit. Legend: T tokens, V vocabulary, H width.
"""

import torch
from torch import Tensor


def embedding(ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    """[T, H]: row ids[t] of the table."""
    return weight_VH[ids_T]


def grad_weight(
    grad_TH: Tensor,
    ids_T: Tensor,
    vocabulary: int,
    initial_VH: Tensor | None = None,
    out_VH: Tensor | None = None,
) -> Tensor:
    """dW fp32 [V, H]: per vocabulary row, tokens ascending; into ``out`` if given."""
    if initial_VH is None:
        width = grad_TH.shape[1]
        total = torch.zeros(vocabulary, width, dtype=torch.float32, device=grad_TH.device)
    else:
        total = initial_VH.clone()
    for t, row in enumerate(ids_T.tolist()):
        total[row] = total[row] + grad_TH[t].float()
    return total if out_VH is None else out_VH.copy_(total)
