"""Attention's fixed numbers (part of the contract) and its launch shapes (schedule).

Contract: keys per block by head size, and the split size P. Everything else only changes speed.
"""

from dataclasses import dataclass

SPLIT = 1024
HEAD_SIZES = (64, 80, 96, 128, 256)


def block_keys(head_dim: int) -> int:
    """BN: keys per softmax step. Part of the contract."""
    return 64 if head_dim > 128 else 128


def padded(head_dim: int) -> int:
    """The power of two that holds a head; zero columns change no bit."""
    return max(16, 1 << (head_dim - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows per program, warps, pipeline stages; per_sm: programs per multiprocessor where
    persistent.
    """

    bm: int
    warps: int
    stages: int
    per_sm: int = 1


HOPPER_QUERIES = 128  # two warpgroups of 64; equals the walk's tile, whose work list it reads
WALK = {64: Shape(128, 8, 3), 128: Shape(128, 8, 2), 256: Shape(64, 8, 2)}
SPLIT_KEYS = {64: Shape(16, 4, 2, 4), 128: Shape(16, 4, 2, 3), 256: Shape(16, 4, 2, 2)}
DKV = {64: Shape(64, 4, 3), 128: Shape(64, 4, 2), 256: Shape(32, 8, 1)}
DQ = {64: Shape(64, 4, 3), 128: Shape(64, 4, 2), 256: Shape(64, 8, 1)}
DKV_KEYS = {64: 64, 128: 64, 256: 64}
DQ_KEYS = {64: 64, 128: 64, 256: 32}
