"""Queries' and keys' norms and rotation in one launch, for rollouts on the GPU.

Contract ``norm_rotary.<dtype>.sm90.v1`` is a composition, nothing of its own: the bits of
``rmsnorm.lanes`` of each head (left out without weights), then of ``rotary.halves`` with the
tables' rows at the tokens' positions. Its reference is the two references in sequence; the packed
trainer calls the two operators. Five launches and four passes over memory become one.

It covers heads of a power of two that are one warp's load or less (128 columns of fp32, 256 of
16-bit types), wholly turned, with queries and keys side by side in one row, as a fused projection
leaves them. :func:`serves` says whether a call is one of these. No autograd.

Legend: T tokens, N heads (HQ of queries, then HK of keys), D head size, P positions.
"""

import torch
from torch import Tensor

from ..dispatch import admitted, choose
from ..errors import ContractError
from ..gpu.device import aligned, programs
from ..gpu.register import register_gpu, serving
from ..rmsnorm import gpu as rmsnorm
from . import gpu as rotary

_COLUMNS = 1024  # of one half, per program


def serves(q: Tensor, k: Tensor, cos: Tensor) -> bool:
    """Whether ``q [T, HQ, D]`` and ``k [T, HK, D]`` lie side by side in rows of a covered kind."""
    size = q.shape[-1]
    vector = 16 // q.element_size()
    beside = q.data_ptr() + q.shape[1] * size * q.element_size() == k.data_ptr()
    rows = q.stride() == (q.stride(0), size, 1) and k.stride() == q.stride()
    reaches = q.shape[1] + k.shape[1] <= q.stride(0) // size
    whole = cos.shape[-1] == size and size & (size - 1) == 0 and 2 * vector <= size <= 32 * vector
    fits = q.is_cuda and beside and rows and reaches and whole and q.data_ptr() % 16 == 0
    return fits and q.stride(0) % vector == 0 and q.dtype in CONTRACTS


def side_by_side(q: Tensor, k: Tensor) -> Tensor:
    """The heads of both as one ``[T, HQ + HK, D]``, where :func:`serves` says yes."""
    return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride())


def proved(dtype: torch.dtype) -> bool:
    """Whether the fused kernel gave its contract's bits on this machine."""
    return admitted(serving(CONTRACTS, "norm_rotary", dtype), "triton")


def norm_rotary(
    x: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """``(q [T, HQ, D], k [T, HK, D])`` of ``x [T, HQ + HK, D]``; ``heads`` is HQ.

    positions: int64 ``[T]`` into fp32 ``cos, sin [P, D]``. ContractError where one weight is
    missing. By certified dispatch.
    """
    if (q_weight is None) != (k_weight is None):
        raise ContractError("norm_rotary needs both weights or none; check the layer's norms")
    run = choose(serving(CONTRACTS, "norm_rotary", x.dtype)).run
    return run(x, q_weight, k_weight, eps, positions, cos, sin, heads)


def forward(
    x: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """See :func:`norm_rotary`."""
    tokens, both, size = x.shape
    if x.stride()[1:] != (size, 1) or x.data_ptr() % 16 or x.stride(0) * x.element_size() % 16:
        x = aligned(x)
    cos, sin, positions = aligned(cos), aligned(sin), positions.contiguous()
    q = torch.empty(tokens, heads, size, dtype=x.dtype, device=x.device)
    k = torch.empty(tokens, both - heads, size, dtype=x.dtype, device=x.device)
    rows = max(1, 2 * _COLUMNS // size)
    if x.numel():
        programs(__package__, "gpu_fused_kernels").norm_rotary_kernel[(-(-tokens * both // rows),)](
            x,
            x if q_weight is None else aligned(q_weight),
            x if k_weight is None else aligned(k_weight),
            positions,
            cos,
            sin,
            q,
            k,
            tokens,
            x.stride(0),
            eps,
            HQ=heads,
            HK=both - heads,
            HALF=size // 2,
            VEC=16 // x.element_size(),
            R=rows,
            NORM=q_weight is not None,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return q, k


def reference(
    x: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """The definition: the references of the two contracts, one after the other."""
    turned: list[Tensor] = []
    for part, weight in ((x[:, :heads], q_weight), (x[:, heads:], k_weight)):
        if weight is not None:
            rows = part.reshape(-1, part.shape[-1])
            part = rmsnorm.reference(rows, weight, eps).view(part.shape)
        turned.append(rotary.reference(part, cos[positions], sin[positions]))
    return turned[0].contiguous(), turned[1].contiguous()


CONTRACTS = register_gpu(
    {"triton": forward},
    name="norm_rotary",
    op="norm_rotary",
    formula="rotary.halves of rmsnorm.lanes of each head (of the head itself without weights), "
    "with the tables' rows at the tokens' positions",
    order="as rmsnorm.lanes",
    rounding="as rmsnorm.lanes, then as rotary.halves",
    functions="IEEE division and square root, no FMA",
    reference="zeromismatch.kernels.rotary.gpu_fused:reference",
    rtol=(0.0, 0.0),
)
