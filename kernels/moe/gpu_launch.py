"""Launches of the kernels in :mod:`.gpu_kernels`, with the slot lists they walk.

Everything stays on the device and has sizes that depend on shapes alone, so it can be captured in
a CUDA graph. Launch shapes are schedule; backward sums over tokens in blocks of TOKEN_BLOCK, so
that micro-batches which end on that grid give the bits of the whole batch.

Legend: T tokens, E experts, K slots per token, S = T K slots, H width, I inputs, N outputs.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ..gpu.device import aligned, programs
from ..linear.gpu_gemm import SHORT

TOKEN_BLOCK = 8192
SINGLE = 8
"""So many experts a slot, and every slot is a tile of its own: nothing to sort."""
_ROWS = 8
_LANES, _VEC = 256, 8


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """One launch shape of a grouped product."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 1
    """Tiles of rows that go through the same columns together."""

    @property
    def name(self) -> str:
        """For certificates and tables."""
        return f"triton-grouped-{self.bm}x{self.bn}x{self.bk}"


# Mean rows per expert up to which a tile is used: benchmarks/moe.md.
TILES = (
    (4, GroupedTile(16, 64, 128, 4, 3)),
    (32, GroupedTile(64, 128, 64, 4, 3)),
)
LARGE = GroupedTile(128, 256, 64, 8, 4, 16)
FP32 = GroupedTile(32, 64, 32, 4, 2)
WEIGHT_FEW = GroupedTile(64, 128, 32, 4, 3)
WEIGHT = GroupedTile(128, 128, 64, 8, 3)
WEIGHT_FP32 = GroupedTile(32, 32, 16, 4, 3)
REFERENCE = GroupedTile(64, 64, 32, 4, 3)


def _kernels() -> ModuleType:
    """Imported at the first launch."""
    return programs(__package__, "gpu_kernels")


def tile_for(slots: int, experts: int, dtype: torch.dtype) -> GroupedTile:
    """The launch shape for a mean load."""
    if dtype == torch.float32:
        return FP32
    return next((tile for most, tile in TILES if slots <= most * experts), LARGE)


def weight_tile_for(slots: int, experts: int, dtype: torch.dtype) -> GroupedTile:
    """The launch shape of a weight's gradient, for a mean load."""
    if dtype == torch.float32:
        return WEIGHT_FP32
    return WEIGHT_FEW if slots <= 32 * experts else WEIGHT


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Slots by expert, tokens ascending, each expert's padded to whole tiles; int32.

    order [tiles * bm]: slots, S where padded. expert [tiles]: -1 past the last. start, count [E].
    """

    order: Tensor
    expert: Tensor
    start: Tensor
    count: Tensor


def sort_slots(chosen: Tensor, experts: int, bm: int) -> Slots:
    """The slots of ``chosen [T, K]`` by expert: a counting sort, its order that of the slots."""
    slots, device = chosen.numel(), chosen.device
    tiles = min(-(-slots // bm) + experts, slots)
    order, owners, start, count = (
        torch.empty(size, dtype=torch.int32, device=device)
        for size in (tiles * bm, tiles, experts + 1, experts)
    )
    block = min(1024, max(16, 1 << max(slots - 1, 0).bit_length()))
    owner = chosen.contiguous()
    _kernels().count_kernel[(experts,)](owner, count, slots, BS=block)
    _kernels().sort_kernel[(experts + 1,)](
        owner, count, order, owners, start, slots, experts, tiles,
        BM=bm, BE=max(16, 1 << experts.bit_length()), BS=block,
    )  # fmt: skip
    return Slots(order, owners, start, count)


def _width(experts: int) -> tuple[int, int]:
    """Lanes of a row of experts, and neighbours that one thread holds."""
    width = max(16, 1 << (experts - 1).bit_length())
    return width, 4 if width <= 128 else 8


def topk(
    logits: Tensor, bias: Tensor | None, top_k: int, groups: int, groups_kept: int, sigmoid: bool,
    *, rows: int = _ROWS, warps: int = 4,
) -> Tensor:  # fmt: skip
    """int64 [T, K], best first."""
    tokens, experts = logits.shape
    width, vec = _width(experts)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        _kernels().topk_kernel[(-(-tokens // rows),)](
            logits, logits if bias is None else bias, chosen, tokens, experts,
            K=top_k, G=groups, KEPT=groups_kept, SIGMOID=sigmoid, HAS_BIAS=bias is not None,
            BT=rows, W=width, VEC=vec, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return chosen


def topk_weights(
    logits: Tensor, chosen: Tensor, sigmoid: bool, normed: bool, eps: float, scale: float,
    *, rows: int = _ROWS, warps: int = 4,
) -> Tensor:  # fmt: skip
    """fp32 [T, K]."""
    out = torch.empty(chosen.shape, dtype=torch.float32, device=logits.device)
    return _weights(logits, chosen, out, None, (sigmoid, normed, eps, scale), rows, warps)


def topk_weights_grad(
    d_weights: Tensor, logits: Tensor, chosen: Tensor, sigmoid: bool, normed: bool, eps: float,
    scale: float, *, rows: int = _ROWS, warps: int = 4,
) -> Tensor:  # fmt: skip
    """d_logits fp32 [T, E]."""
    out = torch.empty_like(logits)
    return _weights(logits, chosen, out, d_weights, (sigmoid, normed, eps, scale), rows, warps)


def _weights(
    logits: Tensor, chosen: Tensor, out: Tensor, grad: Tensor | None,
    options: tuple[bool, bool, float, float], rows: int, warps: int,
) -> Tensor:  # fmt: skip
    sigmoid, normed, eps, scale = options
    (tokens, experts), (width, vec) = logits.shape, _width(logits.shape[1])
    if tokens:
        _kernels().topk_weights_kernel[(-(-tokens // rows),)](
            logits, chosen, out, out if grad is None else grad, tokens, experts, eps, scale,
            K=chosen.shape[1], SIGMOID=sigmoid, NORMED=normed, BACKWARD=grad is not None,
            BT=rows, W=width, VEC=vec, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _short(x: Tensor) -> int:
    """Values of the reduced axis in one chain; 0: all."""
    return SHORT if x.dtype == torch.float32 else 0


def grouped(
    x: Tensor, chosen: Tensor, weight: Tensor, *, transposed: bool = False,
    out_dtype: torch.dtype | None = None, tile: GroupedTile | None = None,
) -> Tensor:  # fmt: skip
    """[S, N]; x has one row per slot, or one per token. transposed: weight [E, I, N]."""
    x, weight = aligned(x), aligned(weight)
    count, experts = chosen.numel(), len(weight)
    inputs, outputs = weight.shape[1:] if transposed else weight.shape[:0:-1]
    out = torch.empty(count, outputs, dtype=out_dtype or x.dtype, device=x.device)
    if not count:
        return out
    tile = tile or tile_for(count, experts, x.dtype)
    single = count * SINGLE <= experts
    if single:
        order = expert = chosen.contiguous()
        tiles = count
    else:
        slots = sort_slots(chosen, experts, tile.bm)
        order, expert, tiles = slots.order, slots.expert, len(slots.expert)
    strides = weight.stride()
    by_output = (strides[2], strides[1]) if transposed else (strides[1], strides[2])
    _kernels().grouped_kernel[(tiles * -(-outputs // tile.bn),)](
        x, weight, out, order, expert, count, outputs, inputs, strides[0], *by_output,
        PER_ROW=1 if len(x) == count else chosen.shape[1], BM=tile.bm, BN=tile.bn, BK=tile.bk,
        GROUP=tile.group, SINGLE=single, EVEN_I=inputs % tile.bk == 0, SHORT=_short(x),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def grouped_weight(
    grad: Tensor, x: Tensor, chosen: Tensor, experts: int, out: Tensor, *, accumulate: bool,
    tile: GroupedTile | None = None,
) -> Tensor:  # fmt: skip
    """dW into ``out [E, N, I]``: blocks of TOKEN_BLOCK tokens, added ascending.

    A tile's rows are outputs, its columns inputs. More than one block needs an fp32 ``out``.
    """
    grad, x = aligned(grad), aligned(x)
    tokens, top_k = chosen.shape
    (count, outputs), inputs = grad.shape, x.shape[1]
    per_row = 1 if len(x) == count else top_k
    tile = tile or weight_tile_for(min(tokens, TOKEN_BLOCK) * top_k, experts, x.dtype)
    bn, bi, bs = tile.bm, tile.bn, tile.bk
    if not tokens:
        return out if accumulate else out.zero_()
    for first in range(0, tokens, TOKEN_BLOCK):
        slots = sort_slots(chosen[first : first + TOKEN_BLOCK], experts, bs)
        _kernels().grouped_weight_kernel[(-(-outputs // bn) * -(-inputs // bi), experts)](
            grad[first * top_k :], x[first * top_k // per_row :], out, slots.order, slots.start,
            slots.count, outputs, inputs, PER_ROW=per_row,
            ACCUMULATE=accumulate or first > 0, BN=bn, BI=bi, BS=bs, SHORT=_short(x),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def combine(
    y: Tensor, weights: Tensor | None, out_dtype: torch.dtype, *, block: int = 512
) -> Tensor:
    """[T, H] of y [T, K, H]."""
    tokens, top_k, width = y.shape
    out = torch.empty(tokens, width, dtype=out_dtype, device=y.device)
    for first in range(0, tokens if width else 0, 65535):
        part = slice(first, first + 65535)
        given = y if weights is None else weights
        _kernels().combine_kernel[(-(-width // block), len(out[part]))](
            y[part], given[part], out[part], width, K=top_k, HAS_W=weights is not None, BH=block,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def combine_grad(
    grad: Tensor, y: Tensor, weights: Tensor, *, warps: int = 4
) -> tuple[Tensor, Tensor]:
    """(dY like y, d_weights fp32 [T, K])."""
    tokens, top_k, width = y.shape
    d_y, d_weights = torch.empty_like(y), torch.empty_like(weights)
    if tokens:
        _kernels().combine_bwd_kernel[(tokens * top_k,)](
            grad, y, weights, d_y, d_weights, width, K=top_k, N=4, W=_LANES, VEC=_VEC,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return d_y, d_weights
