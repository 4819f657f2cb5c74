"""The definition of ``digest.v1``: 128 bits per row, from integer arithmetic modulo 2**64 alone.

The same value comes out of torch on any device, the C++ core and a Triton kernel, because wrapped
integer sums have no order and no rounding. All arithmetic below is on unsigned 64-bit integers:

    golden = 0x9E3779B97F4A7C15
    mix(z)        z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
                  z = (z ^ z>>27) * 0x94D049BB133111EB
                  z ^ z>>31
    odd(seed, i)  mix(golden * (i + 1) + seed) | 1

    words   an element of 1 or 2 bytes is one word (its bits, zero-extended to 32); an element of
            4, 8 or 16 bytes is 1, 2 or 4 words, low half first. A row is its words w[0], w[1], ...
    block   b covers words b*1024 ... b*1024+1023; i counts inside the block
            a[b] = sum_i w[b*1024 + i] * odd(0, i)
            b[b] = sum_i w[b*1024 + i] * odd(SEED_B, i)
    row     A = sum_b mix(a[b]) * odd(SEED_C, b)        B = sum_b mix(b[b]) * odd(SEED_C, b)
    head    h = mix((elements << 8 | dtype code) * golden)
    digest  (mix(A + h), mix(B ^ h))
    tensor  its elements as one row; then, for every dimension d in turn, each lane becomes
            mix(lane + golden * (d + 1)): the shape counts

``mix`` is a bijection with mix(0) = 0, so zero padding up to a block is free. One changed word
always changes both lanes: its product with an odd constant is not 0 modulo 2**64, and every later
step is a bijection of that block's sum. Several changed words collide in one lane with odds of
about 2**-32 (only the top bits change) to 2**-63, and the two lanes are independent. Row length and
dtype go in through ``h``: trailing zeros and a reinterpreted dtype both show. It is a fingerprint
against faults, not against an adversary.

For a Triton kernel: the constants of a block depend on i only, so a program computes (or loads)
them once and reuses them for every block of every row; a 32 x 64-bit product needs two 32-bit wide
multiplies (``w * low + (w * high << 32)``); ``tl.sum`` over int64 may use any order.

Frozen: a change of any constant here is a new digest version.
"""

import functools

import torch
from torch import Tensor

from ..errors import ContractError

BLOCK = 1024
GOLDEN = 0x9E3779B97F4A7C15
SEED_B = 0xD1B54A32D192ED03
SEED_C = 0x8CB92BA72F3D8DD7
_MASK = (1 << 64) - 1
_CHUNK_WORDS = 1 << 22  # words widened to int64 at a time: 32 MB

DTYPE_CODES: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.float64: 4,
    torch.int64: 5,
    torch.int32: 6,
    torch.int16: 7,
    torch.int8: 8,
    torch.uint8: 9,
    torch.bool: 10,
    torch.complex64: 11,
    torch.complex128: 12,
    torch.float8_e4m3fn: 13,
    torch.float8_e5m2: 14,
    torch.float8_e4m3fnuz: 15,
    torch.float8_e5m2fnuz: 16,
    torch.float8_e8m0fnu: 17,
    torch.uint16: 18,
    torch.uint32: 19,
    torch.uint64: 20,
}


def dtype_code(dtype: torch.dtype) -> int:
    """The frozen number of a dtype in the digest."""
    code = DTYPE_CODES.get(dtype)
    if code is None:
        raise ContractError(
            f"no digest is defined for {dtype}; view the tensor as integers of its width first"
        )
    return code


def signed(value: int) -> int:
    """An unsigned 64-bit number as the int64 with the same bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of an int64 tensor."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 tensors (wrapping)."""
    z = (z ^ shift_right(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ shift_right(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ shift_right(z, 31)


def mix_int(z: int) -> int:
    """``mix`` on one unsigned Python integer."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def odd(seed: int, index: Tensor) -> Tensor:
    """``odd(seed, i)`` for an int64 tensor of indices."""
    return mix((index + 1) * signed(GOLDEN) + signed(seed)) | 1


@functools.lru_cache(maxsize=16)
def _block_constants(device: torch.device) -> Tensor:
    index = torch.arange(BLOCK, device=device)
    return torch.stack((odd(0, index), odd(SEED_B, index)))


def words(x: Tensor) -> Tensor:
    """A contiguous [rows, elements] tensor as its words: an integer tensor [rows, words]."""
    width = x.element_size()
    if width == 1:
        return x.view(torch.uint8)
    return x.view(torch.int16 if width == 2 else torch.int32)


def _widen(part: Tensor) -> Tensor:
    bits = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}[part.element_size()]
    return part.to(torch.int64) & bits


def _block_sums(part: Tensor, first_block: int) -> Tensor:
    """[rows, n] words that start at a block border -> [rows, 2] summed over their blocks."""
    rows, count = part.shape
    constants = _block_constants(part.device)
    wide = torch.nn.functional.pad(_widen(part), (0, -count % BLOCK)).view(rows, -1, BLOCK)
    sums = torch.stack([(wide * constants[lane]).sum(-1) for lane in (0, 1)], dim=-1)
    index = torch.arange(first_block, first_block + wide.shape[1], device=part.device)
    return (mix(sums) * odd(SEED_C, index)[None, :, None]).sum(1)


def digest_rows(x: Tensor) -> Tensor:
    """Digest of every row: [rows, ...] of any supported dtype -> int64 [rows, 2]."""
    rows, elements = x.shape[0], x[0].numel() if x.shape[0] else 0
    code = dtype_code(x.dtype)
    total = torch.zeros(rows, 2, dtype=torch.int64, device=x.device)
    if rows and elements:
        row_words = words(x.contiguous().view(rows, elements))
        span = row_words.shape[1]
        row_step = max(1, _CHUNK_WORDS // span)
        word_step = min(-(-span // BLOCK) * BLOCK, _CHUNK_WORDS)
        for row in range(0, rows, row_step):
            for start in range(0, span, word_step):
                part = row_words[row : row + row_step, start : start + word_step]
                total[row : row + row_step] += _block_sums(part, start // BLOCK)
    head = signed(mix_int(((elements << 8 | code) * GOLDEN) & _MASK))
    return mix(torch.stack((total[:, 0] + head, total[:, 1] ^ head), dim=-1))


def fold_shape(lanes: tuple[int, int], shape: tuple[int, ...]) -> tuple[int, int]:
    """The definition's last line: a whole tensor's row digest with its shape mixed in."""
    first, second = lanes
    for dim in shape:
        step = GOLDEN * (dim + 1)
        first, second = mix_int((first + step) & _MASK), mix_int((second + step) & _MASK)
    return first, second
