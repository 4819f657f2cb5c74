"""Recurrences on matrix units: bf16 rows, chunks side by side, decode with prefill's instructions.

Contracts ``recurrence_blocks.<kind>.bfloat16.sm90.v2`` for all three kinds, chunks of a multiple of
16 rows. Orders and rounding points are in :mod:`.gpu_block_kernels`: products of bf16 operands with
fp32 sums, as in the chunk kernels of vLLM.
Until a chunk is full its page holds k and R (ssd: v) in bf16 in the places of k and u, the running
sums of its log decays and, where its end state will be, the rows of T so far (delta rules); states
are fp32. Tiles and warps are schedule. Written for graphs: nothing waits for the host, the number
of programs follows from shapes alone.

    o = launch(q, k, v, g, beta, k_pages, u_pages, g_pages, end_pages, start, length, table)

:mod:`.gpu_gradient` has the gradient. The reference is the same programs at another launch shape.
Legend: as in :mod:`.gpu_kernels`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import first_admitted
from ..errors import ContractError
from ..gpu.device import aligned, programs
from ..gpu.register import register_gpu
from .gpu import padded
from .pages import RowBatch, slots_of

BLOCK = 16
_PROGRAMS = 256  # of the walk over states that fill the chip
_FOLDS = 16  # requests at once whose chunks become full


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a step is cut into programs; the bits are the same for all.

    rows: of a tile of outputs, divides the chunk. scan: columns, warps, stages of its programs.
    out: columns, warps, registers of a thread at most (0: no bound). solve: warps, registers.
    again: a row makes decayed keys again that earlier rows of its block left on the page.
    """

    rows: int
    scan: tuple[int, int, int]
    out: tuple[int, int, int]
    solve: tuple[int, int]
    again: bool = False


def shape_of(tokens: int, requests: int, v: Tensor, g: Tensor, delta: bool, chunk: int) -> Shape:
    """What was fast on an H200, by numbers that shapes alone give."""
    channels = g.dim() == 3
    if tokens <= 4 * requests:
        out = (64, 4, 168 if delta else 128)
        return Shape(rows=BLOCK, scan=(32, 4, 2), out=out, solve=(2, 0))
    parallel, scan = requests * v.shape[1] * v.shape[2], (16, 4, 2)
    if parallel >= 64 * _PROGRAMS:
        scan = (64, 4, 2)
    elif parallel >= 32 * _PROGRAMS:
        scan = (32, 4, 3)
    rows = next(size for size in (128, 64, 32, BLOCK) if chunk % size == 0)
    return Shape(
        rows=rows, scan=scan, out=(64, 4, 168 if delta else 0), solve=(4 if channels else 1, 0)
    )


Tiles = tuple[Tensor, Tensor]


def tiles_of(query_start: Tensor, length: Tensor, rows: int, size: int) -> Tiles:
    """int32 ``(owner, ends [B])``: whose each tile of ``size`` positions is; B where nobody's."""
    begin = length - query_start.diff()
    count = (length + size - 1) // size - begin // size
    ends = torch.where(length > begin, count, 0).cumsum(0).to(torch.int32)
    most = min(rows, rows // size + 2 * length.numel())
    tile = torch.arange(most, device=length.device, dtype=torch.int32)
    return torch.searchsorted(ends, tile, right=True, out_int32=True), ends


def blocks_of(
    query_start: Tensor, length: Tensor, rows: int, chunk: int, shape: Shape
) -> tuple[Tiles, Tiles, Tiles]:
    """Chunks and tiles of a step, requests that fill a chunk first and how many they are."""
    chunks = tiles_of(query_start, length, rows, chunk)
    tiles = chunks
    if shape.rows != chunk:
        tiles = tiles_of(query_start, length, rows, shape.rows)
    fills = length // chunk > (length - query_start.diff()) // chunk
    order = torch.argsort(fills.int(), descending=True, stable=True).to(torch.int32)
    return chunks, tiles, (order, fills.sum(0, keepdim=True, dtype=torch.int32))


def width_of(chunk: int, key: int, value: int, delta: bool) -> int:
    """Value columns of a page: those of a row, and zeros behind them where the end state would
    have no room for T, ``chunk`` by ``chunk`` numbers of 16 bits."""
    if not delta or chunk * chunk <= 2 * key * value:
        return value
    return -(-chunk * chunk // (16 * key)) * 8


def _has_room(chunk: int, key: int, value: int) -> bool:
    """Whether decayed keys of a chunk fit behind T."""
    return chunk * chunk + chunk * key <= 2 * key * value


def widened(x: Tensor, width: int) -> Tensor:
    """Rows [T, HV, V] with zeros up to ``width`` columns."""
    missing = width - x.shape[2]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _bounds(q: Tensor, warps: int, registers: int) -> dict[str, Any]:
    bound = registers and q.is_cuda and torch.version.hip is None
    return {"num_warps": warps, "num_stages": 1, **({"maxnreg": registers} if bound else {})}


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    k_pages: Tensor,
    u_pages: Tensor,
    g_pages: Tensor,
    end_pages: Tensor,
    query_start: Tensor,
    length: Tensor,
    table: Tensor,
    blocks: tuple[Tiles, Tiles, Tiles] | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """``o [T, HV, V]`` fp32; the pages take the rows and the states. blocks: of the same shape."""
    kernels = programs(__package__, "gpu_block_kernels")

    q, k, v, g = (aligned(each) for each in (q, k, v, g))
    beta = None if beta is None else aligned(beta)
    (tokens, key_heads, key), (heads, value), chunk = q.shape, v.shape[1:], k_pages.shape[1]
    delta, channels = beta is not None, g.dim() == 3
    if chunk % BLOCK or width_of(chunk, key, value, delta) > value:
        raise ContractError(
            f"chunks of {chunk} rows are no multiple of {BLOCK}, or longer than their end state of "
            f"{key} by {value} has room for; take the fp32 contract, or wider pages"
        )
    o = torch.empty(v.shape, dtype=torch.float32, device=q.device)
    if not tokens:
        return o
    requests = length.numel()
    shape = shape or shape_of(tokens, requests, v, g, delta, chunk)
    (owner, ends), tiles, folds = blocks or blocks_of(query_start, length, tokens, chunk, shape)
    chunks = owner.numel()
    few = shape.rows == BLOCK < chunk
    a = torch.empty(tokens if channels or few else 0, heads, chunk, dtype=v.dtype, device=q.device)
    full = torch.empty(chunks if delta else 0, heads, chunk, chunk, dtype=v.dtype, device=q.device)
    places = (tokens if few else BLOCK * chunks) if delta else 0
    near = torch.empty(places, heads, BLOCK, dtype=torch.float32, device=q.device)
    still_open = end_pages.view(v.dtype)
    index = (query_start, length, table)
    whose = (owner, ends, *index, table.shape[1], requests)
    where = (*whose, key_heads, heads)
    options: dict[str, Any] = {"enable_fp_fusion": False}
    sizes: dict[str, Any] = {"K": key, "V": value, "C": chunk, "CP": padded(chunk)}
    sizes |= {"KP": padded(key)}
    more: dict[str, Any] = {"CHANNELS": channels, "VEC": 4 if sizes["KP"] <= 128 else 8}
    columns, *most = shape.out
    out = options | {"BV": columns, **_bounds(q, *most)}
    solve = options | _bounds(q, *shape.solve)
    decayed = torch.empty(
        tokens if channels and few else 0, heads, 2, key, dtype=v.dtype, device=q.device
    )
    room = channels and not shape.again and _has_room(chunk, key, value)
    # q, k since the chunk's start, k until its end; or the keys that a page has no room for
    ready = chunks if channels and not (few and room) else 0
    moved = torch.empty(3, ready, heads, chunk, key, dtype=v.dtype, device=q.device)
    steps = programs(__package__, "gpu_replay_kernels")
    if few and delta:
        steps.recurrence_step_kernel[(heads, chunks)](
            q, k, v, g, beta, a, decayed, moved, near, k_pages, u_pages, g_pages, end_pages,
            still_open, full, owner, ends, *index, o, *where[5:], **sizes, **more, ROOM=room,
            **out,
        )  # fmt: skip
    else:
        widest = max(key_heads * key, heads * value, g_pages[0, 0].numel())
        kernels.recurrence_pages_kernel[(chunks, -(-widest // 256))](
            k, v, g, k_pages, u_pages, g_pages, *whose, g_pages[0, 0].numel(), key_heads * key,
            heads * value, C=chunk, DELTA=delta, ALL=few, COLS=256, num_warps=4, **options,
        )  # fmt: skip
    if few and not delta:
        steps.recurrence_scores_kernel[(key_heads, chunks)](
            q, k, a, k_pages, g_pages, *where, K=key, C=chunk, CP=padded(chunk), KP=padded(key),
            **solve,
        )  # fmt: skip
    elif channels and not few:
        channel_kernels = programs(__package__, "gpu_channel_kernels")
        channel_kernels.recurrence_solve_channels_kernel[(heads, chunks)](
            q, k, beta, near, a, *moved, k_pages, g_pages, still_open, full, *where, **sizes,
            VEC=more["VEC"], ROOM=room, **solve,
        )  # fmt: skip
    elif delta and not few:
        solve_kernels = programs(__package__, "gpu_solve_kernels")
        solve_kernels.recurrence_solve_kernel[(heads, chunks)](
            k, beta, near, k_pages, g_pages, still_open, full, *where, **sizes, **solve
        )
    columns, warps, stages = shape.scan
    kernels.recurrence_scan_kernel[(-(-value // columns), heads, min(requests, _FOLDS))](
        k, v, *moved[1:], k_pages, u_pages, g_pages, end_pages, full, ends, *folds, *index,
        table.shape[1], key_heads, heads, **sizes, DELTA=delta, CHANNELS=channels,
        READY=channels and not few, BV=columns, num_warps=warps, num_stages=stages, **options,
    )  # fmt: skip
    across = -(-value // shape.out[0])
    if few and delta:
        pair = (decayed, decayed) if channels else (q, k)
        steps.recurrence_rest_kernel[(across, heads, min(requests, _FOLDS))](
            *pair, v, a, u_pages, g_pages, end_pages, still_open, full, ends, *folds, *index, o,
            table.shape[1], key_heads, heads, **sizes, CHANNELS=channels, **out,
        )  # fmt: skip
    elif few:
        steps.recurrence_replay_kernel[(across, heads, chunks)](
            q, a, u_pages, g_pages, end_pages, owner, ends, *index, o, *where[5:], **sizes, **out
        )
    else:
        kernels.recurrence_out_kernel[(across, heads, tiles[0].numel())](
            q, k, v, a, *moved[:2], k_pages, u_pages, g_pages, end_pages, still_open, full, *tiles,
            ends, *index, o, *where[5:], **sizes, CHANNELS=channels, DELTA=delta, M=shape.rows,
            **out,
        )  # fmt: skip
    return o


def functional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    k_pages: Tensor,
    u_pages: Tensor,
    g_pages: Tensor,
    end_pages: Tensor,
    query_start: Tensor,
    length: Tensor,
    table: Tensor,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor]:
    """``(o, ends)`` of the call's rows, from copies of the pages: to be proved."""
    stores = k_pages.clone(), u_pages.clone(), g_pages.clone(), end_pages.clone()
    (chunk, key_heads, key), (heads, value) = k_pages.shape[1:], v.shape[1:]
    if g.dim() == 3 and len(q) and _has_room(chunk, key, value):
        # Pages given need not hold what only this implementation leaves behind T.
        steps = programs(__package__, "gpu_replay_kernels")
        steps.recurrence_keys_kernel[(heads, length.numel())](
            stores[0], stores[2], stores[3].view(k.dtype), query_start, length, table,
            table.shape[1], key_heads, heads, K=key, V=value, C=chunk, KP=padded(key),
            enable_fp_fusion=False,
        )  # fmt: skip
    slot = slots_of(query_start, length, table, chunk)
    pages = slot[slot % chunk == chunk - 1] // chunk
    o = launch(q, k, v, g, beta, *stores, query_start, length, table, shape=shape)
    return o, stores[3][pages]


reference = partial(
    functional,
    shape=Shape(rows=BLOCK, scan=(16, 2, 1), out=(16, 2, 0), solve=(2, 0), again=True),
)

CONTRACTS = {
    kind: register_gpu(
        {"triton": functional},
        name=f"recurrence_blocks.{kind}",
        storages=("bfloat16",),
        version="v2",
        op="recurrence_blocks",
        formula=f"as recurrence.{kind}.float32.cpu.v1, decays as differences of running sums, "
        "u = T (v - w k S)",
        order="products by matrix instructions, ascending; T by substitution, blocks of 16 rows, "
        "the block's own rows ascending; o = w q S, then A U; fold on the decayed state",
        rounding="bf16 operands (S, T, R, U, a, e U; b off the block), fp32 sums",
        functions="ex2.approx of the decay times log2(e)",
        reference="zeromismatch.kernels.recurrence.gpu_blocks:reference",
    )[torch.bfloat16]
    for kind in ("ssd", "gated_delta", "kda")
}


@torch.library.custom_op(
    "zeromismatch::recurrence_blocks_step",
    mutates_args=("k_pages", "u_pages", "g_pages", "end_pages"),
)
def step_op(
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    k_pages: Tensor,
    u_pages: Tensor,
    g_pages: Tensor,
    end_pages: Tensor,
    query_start: Tensor,
    length: Tensor,
    table: Tensor,
    index: list[Tensor],
) -> Tensor:
    """``o [T, HV, V]`` fp32 of bf16 q, k, v. index: :func:`blocks_of`, flat."""
    first_admitted(CONTRACTS[kind].id, "triton")
    stores, where = (k_pages, u_pages, g_pages, end_pages), (query_start, length, table)
    chunks, tiles, folds = zip(index[::2], index[1::2], strict=True)
    return launch(q, k, v, g, beta, *stores, *where, (chunks, tiles, folds))


@step_op.register_fake
def _(kind: str, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape, dtype=torch.float32)


Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
Stores = tuple[Tensor, Tensor, Tensor, Tensor]


def step(kind: str, rows: Rows, stores: Stores, batch: RowBatch) -> Tensor:
    """:func:`launch` by its proved contract, of rows q, k, v in bf16, g and beta in fp32.

    What tells programs their chunks is made once per batch, inside a graph if that is captured.
    """
    q, k, v, g, beta = rows
    (chunk, delta), value = (stores[0].shape[1], beta is not None), v.shape[2]
    v = widened(v, stores[1].shape[3])
    shape = shape_of(len(q), batch.length.numel(), v, g, delta, chunk)
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    key = "blocks", chunk, len(q), shape.rows, captured
    if key not in batch.derived:
        found = blocks_of(batch.query_start, batch.length, len(q), chunk, shape)
        batch.derived[key] = [each for pair in found for each in pair]
    index = batch.query_start, batch.length, batch.table, batch.derived[key]
    o = step_op(kind, q, k, v, g, beta, *stores, *index)
    return o if v.shape[2] == value else o[..., :value].contiguous()


def packed(kind: str, rows: Rows, batch: RowBatch, chunk: int) -> tuple[Tensor, Tensor]:
    """``(o, ends)`` of whole requests: fp32 states at the ends of full chunks, in their order."""
    _, k, v, g, beta = rows
    width = width_of(chunk, k.shape[2], v.shape[2], beta is not None)
    pages = int(batch.table.max()) + 1 if batch.table.numel() else 0
    k_pages, g_pages = (x.new_empty(pages, chunk, *x.shape[1:]) for x in (k, g))
    u_pages = v.new_empty(pages, chunk, v.shape[1], width)
    ends = g.new_empty(pages, v.shape[1], k.shape[2], width)
    o = step(kind, rows, (k_pages, u_pages, g_pages, ends), batch)
    full = batch.slot[batch.slot % chunk == chunk - 1] // chunk
    return o, ends[full, :, :, : v.shape[2]]
