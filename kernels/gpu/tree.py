"""Row sums with one defined order, for Triton kernels.

``tl.sum`` leaves the order to the layout, which follows warps, block size and even pointer
alignment. The order here is written down by index: first groups of VEC neighbours as a tree of
neighbouring pairs, then the W / VEC group sums as a tree of halves (i with i + n / 2, then i with i
+ n / 4, ...).

    row_sum(v[R, W], R, W, VEC) -> [R]
    row_sum_of_halves(low[R, W / 2], high, R, W, VEC) -> [R]     the same sum of two halves
    fold_rows(v[N, W], N, W) -> [1, W]             halves of the rows
    tile_sum(v[R * N, W], R, N, W, VEC) -> [R]     blocks b and b + N / 2 first, down to 4;
        row_sum; then halves

Every addition is a reshape and a split. VEC neighbours lie in one thread where W is one warp's
vector load (16 bytes a thread), so the first levels move nothing and 32 sums or fewer are left;
wider rows are first summed into W lanes. A tree over a whole row would make the compiler give each
thread a copy of it.
"""

import triton
import triton.language as tl


@triton.jit
def _neighbours(v, R: tl.constexpr, N: tl.constexpr, VEC: tl.constexpr):
    return tl.sum(tl.reshape(v, (R, N, VEC // 2, 2)), 3)


@triton.jit
def _halves(v, R: tl.constexpr, N: tl.constexpr):
    return tl.sum(tl.reshape(v, (R, 2, N // 2)), 1)


@triton.jit
def _groups(v, R: tl.constexpr, N: tl.constexpr, VEC: tl.constexpr):
    """[R, N VEC] -> [R, N]: VEC neighbours each."""
    if VEC >= 8:
        v = _neighbours(v, R, N, 8)
    if VEC >= 4:
        v = _neighbours(v, R, N, 4)
    return tl.reshape(_neighbours(v, R, N, 2), (R, N))


@triton.jit
def _folded(v, R: tl.constexpr, N: tl.constexpr):
    """[R, N] -> [R]: halves."""
    if N >= 32:
        v = _halves(v, R, 32)
    if N >= 16:
        v = _halves(v, R, 16)
    if N >= 8:
        v = _halves(v, R, 8)
    if N >= 4:
        v = _halves(v, R, 4)
    if N >= 2:
        v = _halves(v, R, 2)
    return tl.reshape(v, (R,))


@triton.jit
def row_sum(v, R: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr):
    """[R, W] -> [R]; W / VEC a power of two up to 32, VEC 2, 4 or 8. Zero padding is exact."""
    return _folded(_groups(v, R, W // VEC, VEC), R, W // VEC)


@triton.jit
def row_sum_of_halves(low, high, R: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr):
    """The bits of row_sum of [R, W], given as its left and its right [R, W / 2]; W / VEC >= 2."""
    N: tl.constexpr = W // VEC // 2
    return _folded(_groups(low, R, N, VEC) + _groups(high, R, N, VEC), R, N)


@triton.jit
def _fold(v, R: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    low, high = tl.split(tl.permute(tl.reshape(v, (R, 2, N // 2, W)), (0, 2, 3, 1)))
    return tl.reshape(low + high, (R * (N // 2), W))


@triton.jit
def fold_rows(v, N: tl.constexpr, W: tl.constexpr):
    """[N, W] -> [1, W]: row i with i + N / 2, and so on; N a power of two up to 64."""
    if N >= 64:
        v = _fold(v, 1, 64, W)
    if N >= 32:
        v = _fold(v, 1, 32, W)
    if N >= 16:
        v = _fold(v, 1, 16, W)
    if N >= 8:
        v = _fold(v, 1, 8, W)
    if N >= 4:
        v = _fold(v, 1, 4, W)
    if N >= 2:
        v = _fold(v, 1, 2, W)
    return v


@triton.jit
def tile_sum(v, R: tl.constexpr, N: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr):
    """R rows, each of N blocks of W columns: [R * N, W] -> [R]; N a power of two up to 64."""
    if N >= 64:
        v = _fold(v, R, 64, W)
    if N >= 32:
        v = _fold(v, R, 32, W)
    if N >= 16:
        v = _fold(v, R, 16, W)
    if N >= 8:
        v = _fold(v, R, 8, W)
    LEFT: tl.constexpr = 4 if N > 4 else N
    s = tl.reshape(row_sum(v, R * LEFT, W, VEC), (R, LEFT))
    if LEFT >= 4:
        s = _halves(s, R, 4)
    if LEFT >= 2:
        s = _halves(s, R, 2)
    return tl.reshape(s, (R,))
