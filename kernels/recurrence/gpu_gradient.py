"""The recurrences' gradients on the GPU: contracts ``recurrence_grad.<kind>.float32.sm90.v1`` and,
of bf16 rows in blocks, ``recurrence_blocks_grad.<kind>.bfloat16.sm90.v1``.

Whole requests, from the rows u and the states at chunk boundaries that the forward left; blocks
leave states alone, so u is computed again from them, in fp32 like all else here. The
reference's formulas, orders as :mod:`.gpu_gradient_kernels` writes them, no atomics. A request's
gradients do not depend on its company; launch shapes are schedule, and the reference is the same
programs at another. Written to be right: every row and head is a program of its own, in fp32.

Legend: T rows, N chunks of C rows, B requests, HK, HV heads, K, V sizes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..gpu.device import aligned, programs
from ..gpu.register import register_gpu
from .gpu import padded
from .pages import owners, packed_rows

_COLUMNS, _KEYS = 32, 16

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The chunks of whole requests: int32 ``base [B + 1]`` chunks before a request, ``first`` row,
    ``count`` of rows and ``state`` (whose end it begins from, -1: none) ``[N]``, ``owner [T]``."""

    base: Tensor
    first: Tensor
    count: Tensor
    state: Tensor
    owner: Tensor

    @staticmethod
    def of(query_start: Tensor, rows: int, chunk: int) -> "Chunks":
        """Waits for the device once."""
        request = owners(query_start, rows).long()
        place = torch.arange(rows, device=query_start.device) - query_start[request]
        begins = place % chunk == 0
        first = begins.nonzero()[:, 0]
        stops = torch.minimum(first + chunk, query_start[request[first] + 1])
        count = stops - first
        full = (count == chunk).cumsum(0)
        state = torch.where(place[first] == 0, -1, full - (count == chunk).long() - 1)
        per_request = (query_start.diff() + chunk - 1) // chunk
        base = torch.cat((per_request.new_zeros(1), per_request.cumsum(0)))
        parts = base, first, count, state, begins.cumsum(0) - 1
        base, first, count, state, owner = (each.int().contiguous() for each in parts)
        return Chunks(base=base, first=first, count=count, state=state, owner=owner)


def gradient(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    u: Tensor | None,
    ends: Tensor,
    query_start: Tensor,
    size: int,
    *,
    columns: int = _COLUMNS,
    warps: int = 4,
) -> Gradients:
    """``(dq, dk, dv, dg, dbeta)``, as the CPU's contract gives them. u None: from the states."""
    d_o, q, k, v, g, ends = (aligned(each) for each in (d_o, q, k, v, g, ends))
    if not len(v):
        same = (torch.zeros_like(each) for each in (q, k, v, g))
        dq, dk, dv, dg = same
        return dq, dk, dv, dg, None if beta is None else torch.zeros_like(beta)
    strength = v if beta is None else aligned(beta)
    given = v if u is None else aligned(u)
    walk = _Walk(d_o, q, k, v, g, strength, given, ends, query_start, size, beta is not None, warps)
    walk.weights()
    if u is None and beta is not None:
        walk.updates(columns)
    walk.states(columns)
    dq, dk, dg, dbeta = walk.rows()
    d_u, group = walk.d_u, walk.heads // walk.key_heads
    dv = d_u if beta is None else strength[..., None] * d_u
    return _by_key_head(dq, group), _by_key_head(dk, group), dv, dg, dbeta


def block_gradient(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    ends: Tensor,
    query_start: Tensor,
    size: int,
    *,
    columns: int = _COLUMNS,
    warps: int = 4,
) -> Gradients:
    """fp32 ``(dq, dk, dv, dg, dbeta)`` for rows q, k, v of 16 bits, widened exactly."""
    q, k, v = (each.float() for each in (q, k, v))
    shape = {"columns": columns, "warps": warps}
    return gradient(d_o, q, k, v, g, beta, None, ends, query_start, size, **shape)


def _by_key_head(x: Tensor, group: int) -> Tensor:
    parts = x.unflatten(1, (-1, group))
    total = parts[:, :, 0]
    for h in range(1, group):
        total = total + parts[:, :, h]
    return total.contiguous()


class _Walk:
    """The launches and what they leave for one another."""

    def __init__(
        self, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, u: Tensor,
        ends: Tensor, query_start: Tensor, size: int, delta: bool, warps: int,
    ) -> None:  # fmt: skip
        self.kernels = programs(__package__, "gpu_gradient_kernels")
        self.d_o, self.q, self.k, self.v, self.g, self.beta = d_o, q, k, v, g, beta
        self.u, self.ends, self.query_start = u, ends, query_start
        self.size, self.delta = size, delta
        self.tokens, self.heads, self.value = v.shape
        self.key_heads, self.key = k.shape[1:]
        self.chunks = Chunks.of(query_start, self.tokens, size)
        self.shape = {"CHANNELS": g.dim() == 3, "DELTA": delta, "KP": padded(self.key)}
        self.options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}

    def _new(self, *sizes: int, used: bool = True) -> Tensor:
        sizes = sizes if used else (0,)
        return torch.empty(sizes, dtype=torch.float32, device=self.v.device)

    def weights(self) -> None:
        """a, b, w q and w k again, by the forward's program, over pages nobody reads."""
        programs_of_forward = programs(__package__, "gpu_kernels")
        batch = packed_rows(self.query_start, self.size)
        pages = len(self.chunks.first)
        wide = (self.tokens, self.heads, self.size), (self.tokens, self.heads, self.key)
        self.a, self.qs = self._new(*wide[0]), self._new(*wide[1])
        self.b, self.ks = (self._new(*each, used=self.delta) for each in wide)
        programs_of_forward.recurrence_weights_kernel[(self.tokens, self.heads)](
            self.q, self.k, self.g, self._new(pages, self.size, *self.k.shape[1:]),
            self._new(pages, self.size, *self.g.shape[1:]), batch.slot,
            owners(self.query_start, self.tokens), self.query_start, self.a, self.b, self.qs,
            self.ks, self.key_heads, self.heads, self.key, C=self.size,
            VEC=4 if self.shape["KP"] <= 128 else 8, **self.shape, **self.options,
        )  # fmt: skip

    def updates(self, columns: int) -> None:
        """u of a delta rule."""
        chunks, self.u = self.chunks, torch.empty_like(self.v)
        grid = (len(chunks.first), self.heads, -(-self.value // columns))
        self.kernels.recurrence_grad_updates_kernel[grid](
            self.v, self.beta, self.b, self.ks, self.ends, chunks.first, chunks.count,
            chunks.state, self.u, self.heads, self.key, self.value, self.size,
            KP=self.shape["KP"], CP=padded(self.size), BV=columns, **self.options,
        )  # fmt: skip

    def states(self, columns: int) -> None:
        """du, and what passes through the states at both ends of every chunk."""
        chunks, value_padded = self.chunks, padded(self.value)
        self.d_u, self.r = torch.empty_like(self.v), torch.zeros_like(self.v)
        d_ends = self._new(len(chunks.first), self.heads, self.key, self.value)
        table = chunks.first, chunks.count, chunks.state
        sizes = self.heads, self.key, self.value
        grid = (len(chunks.base) - 1, self.heads, -(-self.value // columns))
        self.kernels.recurrence_grad_walk_kernel[grid](
            self.d_o, self.k, self.g, self.beta, self.a, self.b, self.qs, self.ks, self.ends,
            chunks.base, *table, d_ends, self.d_u, self.r, self.key_heads, *sizes, self.size,
            CP=padded(self.size), BV=columns, **self.shape, **self.options,
        )  # fmt: skip
        by_key = self.tokens, self.heads, self.key
        self.x, self.z = self._new(*by_key), self._new(*by_key)
        self.y = self._new(*by_key, used=self.delta)
        self.inner = self._new(len(chunks.first), self.heads, self.key)
        grid = (len(chunks.first), self.heads, -(-self.key // _KEYS))
        self.kernels.recurrence_grad_through_kernel[grid](
            self.d_o, self.u, self.d_u, self.beta, self.ends, d_ends, *table, self.x, self.y,
            self.z, self.inner, *sizes, DELTA=self.delta, VP=value_padded,
            VEC=4 if value_padded <= 128 else 8, BK=_KEYS, **self.options,
        )  # fmt: skip

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dq, dk per value head, dg and dbeta."""
        chunks, channels = self.chunks, self.g.dim() == 3
        grid, by_pair = (self.tokens, self.heads), (self.tokens, self.heads, self.size)
        dq, dk = (self._new(self.tokens, self.heads, self.key) for _ in range(2))
        d_beta = self._new(self.tokens, self.heads, used=self.delta)
        d_a, d_b = self._new(*by_pair), self._new(*by_pair, used=self.delta)
        pairs, start = self._new(*by_pair, used=not channels), torch.empty_like(self.g)
        table = chunks.owner, chunks.first, chunks.count
        self.kernels.recurrence_grad_rows_kernel[grid](
            self.d_o, self.q, self.k, self.v, self.g, self.beta, self.u, self.d_u, self.r, self.a,
            self.b, self.x, self.y, self.z, self.inner, *table, dq, dk, d_beta, d_a, d_b, pairs,
            start, self.key_heads, self.heads, self.key, self.value, self.size,
            VP=padded(self.value), **self.shape, **self.options,
        )  # fmt: skip
        sizes = self.key_heads, self.heads, self.key, self.size
        self.kernels.recurrence_grad_columns_kernel[grid](
            self.q, self.k, self.g, d_a, d_b, self.z, *table, dk, *sizes, **self.shape,
            **self.options,
        )  # fmt: skip
        dg = torch.empty_like(self.g)
        if channels:
            self.kernels.recurrence_grad_channels_kernel[grid](
                self.q, self.k, self.g, d_a, d_b, self.z, start, *table, dg, *sizes,
                KP=self.shape["KP"], **self.options,
            )  # fmt: skip
        else:
            self.kernels.recurrence_grad_gates_kernel[grid](
                pairs, start, *table, dg, self.heads, self.size, CP=padded(self.size),
                **self.options,
            )  # fmt: skip
        return dq, dk, dg, d_beta if self.delta else None


reference = partial(gradient, columns=16, warps=1)
block_reference = partial(block_gradient, columns=16, warps=1)

_OF = {
    "recurrence": ("float32", gradient, "reference", ""),
    "recurrence_blocks": ("bfloat16", block_gradient, "block_reference", "u from states; "),
}
_ALL = {
    (op, kind): register_gpu(
        {"triton": run},
        name=f"{op}_grad.{kind}",
        storages=(storage,),
        op=f"{op}_grad",
        formula=f"{first}the gradient of recurrence.{kind} over whole requests, from boundary "
        "states",
        order="chunks descending; rows of dq descending, the state last; columns of dk and dg "
        "ascending; sums over K, V and a chunk's tile trees by index; key heads ascending",
        rounding="fp32 throughout",
        functions="fma, ex2.approx of the decay times log2(e)",
        reference=f"zeromismatch.kernels.recurrence.gpu_gradient:{name}",
    )[getattr(torch, storage)]
    for op, (storage, run, name, first) in _OF.items()
    for kind in ("ssd", "gated_delta", "kda")
}
GRADIENTS, BLOCKS = (
    {kind: contract for (op, kind), contract in _ALL.items() if op == of} for of in _OF
)
