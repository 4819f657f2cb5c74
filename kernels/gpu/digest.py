"""Digest taps: ``digest.v1`` of a tensor's rows, written on the GPU into memory you hold.

    buffer = torch.empty(rows, 2, dtype=torch.int64, device="cuda")
    digest_into(x, buffer)            # also inside torch.compile and CUDA graph capture

The values are those of ``kernels.bits.digest_rows``. As a custom operator that mutates its buffer,
a tap stays in place under torch.compile; in a captured graph each replay refreshes the same buffer,
so traces survive replay.
"""

import torch
from torch import Tensor

from ..errors import ContractError
from ..reference.digest import GOLDEN, digest_rows, dtype_code, mix_int, signed
from .device import programs

_MASK = (1 << 64) - 1


def _head(elements: int, dtype: torch.dtype) -> int:
    return signed(mix_int(((elements << 8 | dtype_code(dtype)) * GOLDEN) & _MASK))


def launch(x: Tensor, out: Tensor) -> None:
    """The digest's kernel."""
    digest_kernels = programs(__package__, "digest_kernels")

    rows = x.shape[0]
    if not rows:
        return
    elements = x[0].numel()
    flat = x.contiguous().view(rows, elements)
    bits = 8 if x.element_size() == 1 else 16 if x.element_size() == 2 else 32
    words = flat.view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits])
    digest_kernels.digest_rows_kernel[(rows,)](
        words, out, words.shape[1], words.shape[1], _head(elements, x.dtype), BITS=bits, num_warps=4
    )


@torch.library.custom_op("zeromismatch::digest_into", mutates_args=("out",))
def digest_into_op(x: Tensor, out: Tensor) -> None:
    """See :func:`digest_into`; on a CPU the definition itself."""
    if x.is_cuda:
        launch(x, out)
    else:
        out.copy_(digest_rows(x))


@digest_into_op.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


def digest_into(x: Tensor, out: Tensor) -> Tensor:
    """Digest each row of ``x[rows, ...]`` into int64 ``out[rows, 2]``, which is returned."""
    if (
        out.dtype != torch.int64
        or out.shape != (x.shape[0], 2)
        or not out.is_contiguous()
        or x.is_complex()
    ):
        raise ContractError(
            f"digest_into needs a real x and contiguous int64 out [{x.shape[0]}, 2], not "
            f"{x.dtype} and "
            f"{out.dtype} {tuple(out.shape)}; allocate it with torch.empty"
        )
    digest_into_op(x, out)
    return out
