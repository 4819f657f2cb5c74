"""Attention's fixed numbers (part of the contract) and its launch shapes (schedule).

Contract: keys per block by head size and dtype, and the split size P. Everything else only changes
speed. fp32 has no matrix instructions here: its products are chains of FMAs, in small tiles.
"""

from dataclasses import dataclass

import torch

SPLIT = 1024
MAX_HEAD_DIM = 256


def block_keys(head_dim: int, dtype: torch.dtype) -> int:
    """BN: keys per softmax step. Part of the contract."""
    if dtype == torch.float32:
        return 32
    return 64 if head_dim > 128 else 128


def padded(head_dim: int) -> int:
    """The power of two that holds a head; zero columns change no bit."""
    return max(64, 1 << (head_dim - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows per program, warps, pipeline stages; per_sm: programs per multiprocessor where
    persistent; keys per step of the backward.
    """

    bm: int
    warps: int
    stages: int
    per_sm: int = 1
    keys: int = 64


HOPPER_QUERIES = 128  # two warpgroups of 64; equals the walk's tile, whose work list it reads
_WALK = {64: Shape(128, 8, 3), 128: Shape(128, 8, 2), 256: Shape(64, 8, 2)}
_SPLIT = {64: Shape(16, 4, 2, 4), 128: Shape(16, 4, 2, 3), 256: Shape(16, 4, 2, 2)}
_DKV = {64: Shape(64, 4, 3), 128: Shape(64, 4, 2), 256: Shape(32, 8, 1)}
_DQ = {64: Shape(64, 4, 3), 128: Shape(64, 4, 2), 256: Shape(64, 8, 1, keys=32)}
_FP32 = {
    64: Shape(32, 4, 1, keys=32),
    128: Shape(32, 8, 1, keys=32),
    256: Shape(16, 8, 1, keys=16),
}


def shape_of(kernel: str, head_dim: int, dtype: torch.dtype) -> Shape:
    """The launch shape of ``walk``, ``split``, ``dkv`` or ``dq``."""
    if dtype == torch.float32:
        shape = _FP32[padded(head_dim)]
        return Shape(16, 4, 1, 2) if kernel == "split" else shape
    table = {"walk": _WALK, "split": _SPLIT, "dkv": _DKV, "dq": _DQ}[kernel]
    return table[padded(head_dim)]
