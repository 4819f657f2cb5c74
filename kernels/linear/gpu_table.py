"""Launch shapes of class L's own kernels: data, measured on an H200.

Schedule only: every entry has the same bits. The choice goes by the row count, because that is what
fills the chip; no entry splits the reduced axis.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """One launch shape. tma: descriptors (persistent), else pointers; swap: weights as rows."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    tma: bool
    subtile: bool = False
    flatten: bool = True
    swap: bool = False

    @property
    def name(self) -> str:
        """For certificates and tables."""
        kind = "tma" if self.tma else "pointer"
        return f"triton-{kind}-{self.bm}x{self.bn}x{self.bk}{'-swap' if self.swap else ''}"


REFERENCE = Tile(64, 64, 32, 4, 3, tma=False)
FP32 = Tile(64, 64, 32, 8, 2, tma=False)
FP32_SMALL = Tile(16, 64, 32, 4, 3, tma=False)

# (largest M, tile for outputs that fill the chip, tile for narrow outputs)
ROWS = (
    (16, Tile(16, 64, 128, 4, 5, tma=False, swap=True), Tile(16, 32, 128, 4, 5, tma=False)),
    (32, Tile(32, 64, 128, 4, 4, tma=False, swap=True), Tile(32, 64, 128, 4, 4, tma=True)),
    (64, Tile(64, 64, 128, 4, 4, tma=True), Tile(64, 32, 128, 4, 5, tma=True)),
    (512, Tile(64, 128, 64, 4, 4, tma=True), Tile(64, 64, 128, 4, 4, tma=True)),
)
LARGE = Tile(128, 256, 64, 8, 3, tma=True, subtile=True)
NARROW = 4096


def tile_for(m: int, n: int) -> Tile:
    """The launch shape for M rows and N outputs of a 16-bit product."""
    for largest, wide, narrow in ROWS:
        if m <= largest:
            return narrow if n < NARROW else wide
    return LARGE
