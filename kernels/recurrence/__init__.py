"""Recurrent layers' state: Mamba-2 (ssd), the gated delta rule and KDA; decode repeats prefill.

A request is cut into chunks of C rows from its position 0. A row reads the state at its chunk's
start and the chunk's earlier rows, each in one written order, so decode computes only its own row
with exactly the arithmetic of prefill; when a chunk is full, its rows are folded into the next
state, once. Whole prefill, any cut of it, decode, hits on a chunk's boundary, preemption and the
trainer's packed forward give the same bits.

    o = paged_recurrence("gated_delta", q, k, v, g, beta, cache, batch)      # writes its rows
    o = packed_recurrence("gated_delta", q, k, v, g, beta, query_start, 16)  # differentiable
    o, state = stepwise_recurrence("gated_delta", q, k, v, g, beta, state, query_start)

A page per request and chunk holds the chunk's rows (k, u and g, what *replay* needs) and, once all
C are there, the state at its end; it never changes after that, so requests with a common prefix of
whole chunks share pages. State traffic per token and value head: K V numbers read and on average
C / 2 rows of k and u, one row written; K V numbers written per C tokens. The stepwise form, the
simple reference, reads and writes K V numbers for every token; it has other bits and no gradient.

All arithmetic is fp32; bf16 rows are widened exactly. ``kernels/reference/recurrence.py`` is the
definition, :mod:`.pages` says which rows lie where; ``pytest tests/kernels/recurrence`` exercises
them. CUDA tensors go to :mod:`.gpu`, whose contract has the same properties and other bits; there
pages are trusted and a paged step waits for nobody; :mod:`.gpu_gradient` has the gradient,
where rows are asked for in bf16, :mod:`.gpu_blocks` computes both forms on matrix units.
Convolutions, gates and norms are other operators.

Legend: T rows, B requests, P pages, C rows per chunk, HK and HV key and value heads, K, V sizes.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dispatch import choose
from ..errors import ContractError, NonFiniteError
from ..gpu.device import require_no_gradient
from . import cpu, gpu, gpu_blocks, gpu_gradient
from .pages import Filled, RowBatch, full_pages, packed_rows, packed_start

__all__ = [
    "Kind",
    "RecurrenceCache",
    "RowBatch",
    "new_recurrence_cache",
    "packed_recurrence",
    "paged_recurrence",
    "stepwise_recurrence",
]

Kind = Literal["ssd", "gated_delta", "kda"]
KINDS: tuple[Kind, ...] = ("ssd", "gated_delta", "kda")
MAX_CHUNK = 256


@dataclass(frozen=True, slots=True, eq=False)
class RecurrenceCache:
    """Pages of one layer: ``k [P, C, HK, K]``, ``u [P, C, HV, V]``, ``decay [P, C, HV]`` (or
    ``[P, C, HV, K]`` per channel), ``end [P, HV, K, V]``, fp32; k and u may be bf16 on a GPU.

    ``filled``: its ledger on a CPU.
    """

    chunk: int
    k: Tensor
    u: Tensor
    decay: Tensor
    end: Tensor
    filled: Filled

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]


def new_recurrence_cache(
    pages: int,
    chunk: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    per_channel: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> RecurrenceCache:
    """An uninitialised cache; per_channel: log decays per key channel (KDA).

    dtype: of k and u; bfloat16 takes the contract of :mod:`.gpu_blocks`, whose pages may be wider
    than rows (:func:`.gpu_blocks.width_of`).
    """
    _check_chunk(chunk)
    _check_rows(dtype, chunk, torch.device(device))
    if value_heads % key_heads:
        raise ContractError(
            f"{value_heads} value heads cannot share {key_heads} key heads evenly; correct the "
            "numbers of heads in the config"
        )
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    gates = (value_heads, key_dim) if per_channel else (value_heads,)
    return RecurrenceCache(
        chunk,
        torch.empty(pages, chunk, key_heads, key_dim, dtype=dtype, device=device),
        torch.empty(pages, chunk, value_heads, value_dim, dtype=dtype, device=device),
        torch.empty(pages, chunk, *gates, **fp32),
        torch.empty(pages, value_heads, key_dim, value_dim, **fp32),
        Filled(pages, chunk),
    )


def paged_recurrence(
    kind: Kind,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    cache: RecurrenceCache,
    batch: RowBatch,
) -> Tensor:
    """``o [T, HV, V]`` fp32 of new rows, which are written to their pages; no autograd.

    q, k ``[T, HK, K]``, v ``[T, HV, V]``, fp32 or bf16; g fp32 ``[T, HV]``, kda ``[T, HV, K]``, log
    decays <= 0; beta ``[T, HV]``, None for ssd. Raises ContractError for shapes that do not fit and
    for pages that cannot serve the step (:mod:`.pages`), NonFiniteError naming the first row that
    is no number; then nothing was written.
    """
    rows = _rows(kind, q, k, v, g, beta, cache.k.dtype)
    _fits(rows, cache)
    parts = (cache.k, cache.u, cache.decay, cache.end)
    if cache.k.is_cuda:
        gpu.check(*rows)
        require_no_gradient("paged recurrence", *rows)
        if cache.k.dtype == torch.bfloat16:
            return gpu_blocks.step(kind, rows, parts, batch)
        index = (batch.query_start, batch.length, batch.table, batch.slot)
        return gpu.step_op(kind, *rows, *parts, *index)
    cache.filled.admit(batch)
    run = choose(cpu.CONTRACTS[kind].id).run
    o, u, ends = run(*rows, *parts, batch.query_start, batch.length, batch.table)
    _finite(o, batch.query_start)
    for store, new in ((cache.k, rows[1]), (cache.u, u), (cache.decay, rows[3])):
        store.flatten(0, 1)[batch.slot] = new
    full = full_pages(batch, cache.chunk)
    if full:
        cache.end[torch.tensor(full)] = ends
    cache.filled.note(batch)
    return o


def packed_recurrence(
    kind: Kind,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    query_start: Tensor,
    chunk: int,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``o [T, HV, V]`` fp32 of whole requests back to back; differentiable in q, k, v, g and beta.

    Shapes and bits as for :func:`paged_recurrence` over a cache of ``dtype``; integer query_start
    ``[B + 1]``. Backward walks a request's chunks from the saved states at their boundaries;
    gradients pass rounding to bf16 as if it were not.
    """
    _check_chunk(chunk)
    _check_rows(dtype, chunk, q.device)
    rows = _rows(kind, q, k, v, g, beta, None if dtype == torch.bfloat16 else dtype)
    start = packed_start(query_start, len(rows[0]))
    if rows[0].is_cuda:
        gpu.check(*rows)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in rows):
        run = _PackedBlocks if dtype == torch.bfloat16 else _Packed
        o = cast(Tensor, run.apply(kind, *rows, start, chunk))
    elif dtype == torch.bfloat16:
        o = gpu_blocks.packed(kind, _narrow(rows), packed_rows(start, chunk), chunk)[0]
    else:
        o = _packed_forward(kind, rows, start, chunk)[0]
    if not o.is_cuda:
        _finite(o, start)
    return o


def stepwise_recurrence(
    kind: Kind,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    state: Tensor,
    query_start: Tensor,
) -> tuple[Tensor, Tensor]:
    """``(o [T, HV, V], states after the last rows)`` from fp32 states ``[B, HV, K, V]``.

    The state after every token, the same for every cut of a request; other bits than the chunked
    form. No gradient.
    """
    update = None if beta is None else beta.detach()
    rows = _rows(kind, q.detach(), k.detach(), v.detach(), g.detach(), update)
    start = packed_start(query_start, len(rows[0]))
    wanted = (start.numel() - 1, rows[2].shape[1], rows[1].shape[2], rows[2].shape[2])
    if state.shape != wanted or state.dtype != torch.float32:
        raise ContractError(
            f"states are {state.dtype} {tuple(state.shape)}; pass float32 {wanted}, one per request"
        )
    o, end = choose(cpu.STEPWISE[kind].id).run(*rows, state.contiguous(), start)
    _finite(o, start)
    return o, end


Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def _check_chunk(chunk: int) -> None:
    if not 1 <= chunk <= MAX_CHUNK:
        raise ContractError(
            f"chunks of {chunk} rows have no contract; take 1 to {MAX_CHUNK}, the checkpoint's own "
            "where it names one"
        )


def _check_rows(dtype: torch.dtype, chunk: int, device: torch.device) -> None:
    narrow = dtype == torch.bfloat16
    if narrow and (chunk % gpu_blocks.BLOCK or device.type == "cpu"):
        raise ContractError(
            f"bfloat16 rows are served on a GPU alone, in chunks of a multiple of "
            f"{gpu_blocks.BLOCK}; leave dtype out"
        )


def _rows(
    kind: Kind, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None,
    dtype: torch.dtype | None = torch.float32,
) -> Rows:  # fmt: skip
    """The five inputs, contiguous; ContractError where they do not belong together.

    dtype: of q, k and v; None: their own.
    """
    if kind not in KINDS:
        raise ContractError(f"no recurrence is called {kind!r}; take one of {', '.join(KINDS)}")
    shapes = [None if x is None else (x.dtype, tuple(x.shape)) for x in (q, k, v, g, beta)]
    fits = q.dim() == 3 and q.shape == k.shape and v.dim() == 3 and len(v) == len(q)
    if fits:
        gates = (*v.shape[:2], k.shape[2]) if kind == "kda" else v.shape[:2]
        fits = g.shape == gates and k.shape[1] > 0 and v.shape[1] % k.shape[1] == 0
    update = v.shape[:2] if kind != "ssd" else None
    if not fits or (None if beta is None else beta.shape) != update or g.dtype != torch.float32:
        raise ContractError(
            f"{kind} takes q, k [T, HK, K], v [T, HV, V], float32 g "
            f"{'[T, HV, K]' if kind == 'kda' else '[T, HV]'} and beta "
            f"{'None' if kind == 'ssd' else '[T, HV]'}, not {shapes}; check which layer these "
            "belong to"
        )
    if not g.is_cuda and bool((g > 0).any()):
        raise ContractError(
            f"a log decay is {float(g.max())}, so the state would grow; pass -exp(A_log) softplus()"
        )
    q, k, v = (x.to(dtype or x.dtype).contiguous() for x in (q, k, v))
    return q, k, v, g.contiguous(), None if beta is None else beta.float().contiguous()


def _narrow(rows: Rows) -> Rows:
    """Rows for the contract in blocks: q, k, v rounded to bf16."""
    q, k, v, g, beta = (None if x is None else x.detach() for x in rows)
    q, k, v = (cast(Tensor, x).to(torch.bfloat16) for x in (q, k, v))
    return q, k, v, cast(Tensor, g), beta


def _fits(rows: Rows, cache: RecurrenceCache) -> None:
    _, k, v, g, beta = rows
    if cache.k.dtype == torch.bfloat16:
        width = gpu_blocks.width_of(cache.chunk, k.shape[2], v.shape[2], beta is not None)
        v = v[..., :1].expand(*v.shape[:2], width)
    parts = ((cache.k, k), (cache.u, v), (cache.decay, g))
    if any(store.shape[2:] != new.shape[1:] for store, new in parts):
        raise ContractError(
            f"rows k {tuple(k.shape[1:])}, v {tuple(v.shape[1:])}, g {tuple(g.shape[1:])} do not "
            f"fit a cache of {', '.join(str(tuple(store.shape[2:])) for store, _ in parts)}; make "
            "the cache for this layer"
        )


def _finite(o: Tensor, query_start: Tensor) -> None:
    if bool(torch.isfinite(o).all()):
        return
    row, head, _ = (~torch.isfinite(o)).nonzero()[0].tolist()
    request = int((query_start <= row).sum()) - 1
    raise NonFiniteError(
        f"the recurrence gives no number in row {row - int(query_start[request])} of request "
        f"{request}, head {head}; look at what enters it: `zm localize` names where it begins"
    )


def _packed_forward(
    kind: Kind, rows: Rows, start: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """No pages: every request begins at 0."""
    q, k, v, g = (x.detach() for x in rows[:4])
    beta = None if rows[4] is None else rows[4].detach()
    if q.is_cuda:
        return gpu.packed(kind, q, k, v, g, beta, packed_rows(start, chunk), chunk)
    pages = [x.new_empty(0, chunk, *x.shape[1:]) for x in (k, v, g)]
    ends = v.new_empty(0, v.shape[1], k.shape[2], v.shape[2])
    length = start.diff()
    table = torch.zeros(length.numel(), 0, dtype=torch.int32)
    run = choose(cpu.CONTRACTS[kind].id).run
    return run(q, k, v, g, beta, *pages, ends, start, length, table)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: Kind, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None,
        start: Tensor, chunk: int,
    ) -> Tensor:  # fmt: skip
        o, u, ends = _packed_forward(kind, (q, k, v, g, beta), start, chunk)
        ctx.save_for_backward(q, k, v, g, beta, u, ends, start)
        ctx.kind, ctx.chunk = kind, chunk
        return o

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        *saved, start = ctx.saved_tensors
        contracts = gpu_gradient.GRADIENTS if start.is_cuda else cpu.GRADIENTS
        run = choose(contracts[ctx.kind].id).run
        found = run(grads[0].contiguous(), *saved, start, ctx.chunk)
        return None, *found, None, None


class _PackedBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: Kind, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None,
        start: Tensor, chunk: int,
    ) -> Tensor:  # fmt: skip
        rows = _narrow((q, k, v, g, beta))
        o, ends = gpu_blocks.packed(kind, rows, packed_rows(start, chunk), chunk)
        ctx.save_for_backward(*rows, ends, start)
        ctx.kind, ctx.chunk, ctx.dtypes = kind, chunk, (q.dtype, k.dtype, v.dtype)
        return o

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        run = choose(gpu_gradient.BLOCKS[ctx.kind].id).run
        dq, dk, dv, dg, dbeta = run(grads[0].contiguous(), *ctx.saved_tensors, ctx.chunk)
        narrow = (x.to(dtype) for x, dtype in zip((dq, dk, dv), ctx.dtypes, strict=True))
        return None, *narrow, dg, dbeta, None, None
