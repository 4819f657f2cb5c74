"""Sums whose order is written out, for Triton kernels.

``tl.sum`` leaves the order to the layout, which follows warps, block size and even pointer alignment.
These trees pair neighbours by index through reshape and split, so the order belongs to the source.

    row_tree(v[R, W])    s = (v0 + v1) + (v2 + v3) ...: neighbours first; W a power of two
"""

import triton
import triton.language as tl


@triton.jit
def _pairs(v, R: tl.constexpr, W: tl.constexpr):
    low, high = tl.split(tl.reshape(v, (R, W // 2, 2)))
    return low + high


@triton.jit
def row_tree(v, R: tl.constexpr, W: tl.constexpr):
    """[R, W] -> [R]; W a power of two from 2 to 256. Zero padding is exact.

    Wider rows are first summed into 256 lanes: the compiler gives each thread a whole row of the tree.
    """
    if W >= 256:
        v = _pairs(v, R, 256)
    if W >= 128:
        v = _pairs(v, R, 128)
    if W >= 64:
        v = _pairs(v, R, 64)
    if W >= 32:
        v = _pairs(v, R, 32)
    if W >= 16:
        v = _pairs(v, R, 16)
    if W >= 8:
        v = _pairs(v, R, 8)
    if W >= 4:
        v = _pairs(v, R, 4)
    low, high = tl.split(tl.reshape(v, (R, 2)))
    return low + high
