"""``digest.v1`` (:mod:`..reference.digest`) as a Triton kernel that writes into a given buffer.

Integer arithmetic only, so a traced operator can call it inside torch.compile or a captured graph
and leave 128 bits per row in preallocated memory: traces survive replay. One program takes one row.
"""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(-7046029254386353131)  # 0x9E3779B97F4A7C15 as int64
SEED_B = tl.constexpr(-3335678366873096957)  # 0xD1B54A32D192ED03
SEED_C = tl.constexpr(-8306560040656073257)  # 0x8CB92BA72F3D8DD7
MUL_1 = tl.constexpr(-4658895280553007687)  # 0xBF58476D1CE4E5B9
MUL_2 = tl.constexpr(-7723592293110705685)  # 0x94D049BB133111EB
BLOCK = tl.constexpr(1024)


@triton.jit
def _mix(z):
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * MUL_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * MUL_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def digest_rows_kernel(
    x_ptr,
    out_ptr,
    words,
    stride,
    head,
    BITS: tl.constexpr,
):
    """x_ptr: the row's words as int16 or int32 (uint8 for one byte); head: the mixed (elements,
    dtype).
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    odd_a = _mix((lanes + 1) * GOLDEN) | 1
    odd_b = _mix((lanes + 1) * GOLDEN + SEED_B) | 1
    zero = row * 0  # keeps every sum int64, whatever width the head was passed in
    head = head + zero
    total_a = zero
    total_b = zero
    for block in range(tl.cdiv(words, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(x_ptr + row * stride + at, mask=at < words, other=0).to(tl.int64)
        if BITS == 16:
            word = word & 0xFFFF
        if BITS == 32:
            word = word & 0xFFFFFFFF
        odd_c = _mix((zero + block + 1) * GOLDEN + SEED_C) | 1
        total_a += _mix(tl.sum(word * odd_a, 0)) * odd_c
        total_b += _mix(tl.sum(word * odd_b, 0)) * odd_c
    tl.store(out_ptr + row * 2, _mix(total_a + head))
    tl.store(out_ptr + row * 2 + 1, _mix(total_b ^ head))


@triton.jit
def digest_spans_kernel(
    places_ptr,
    words_ptr,
    masks_ptr,
    tensor_ptr,
    first_ptr,
    out_ptr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program takes SPAN blocks of one tensor: (sum A, sum B, words that are no number).

    places: address, words: count, masks: exponent bits (0: none) of each tensor; tensor, first:
    which one, and its block, of each program. Sums over a tensor's spans are its row's A and B.
    """
    span = tl.program_id(0).to(tl.int64)
    tensor = tl.load(tensor_ptr + span)
    first = tl.load(first_ptr + span)
    words = tl.load(words_ptr + tensor)
    mask = tl.load(masks_ptr + tensor)
    place = tl.load(places_ptr + tensor)
    if BITS == 8:
        x_ptr = place.to(tl.pointer_type(tl.uint8))
    elif BITS == 16:
        x_ptr = place.to(tl.pointer_type(tl.int16))
    else:
        x_ptr = place.to(tl.pointer_type(tl.int32))
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    odd_a = _mix((lanes + 1) * GOLDEN) | 1
    odd_b = _mix((lanes + 1) * GOLDEN + SEED_B) | 1
    zero = span * 0
    total_a = zero
    total_b = zero
    odd_ones = tl.zeros([BLOCK], dtype=tl.int32)
    whole = tl.minimum(words // BLOCK, first + SPAN)
    for block in range(first, whole):  # without a mask, so that loads are wide
        word = tl.load(x_ptr + (zero + block) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        word = word & ((1 << BITS) - 1)
        odd_c = _mix((zero + block + 1) * GOLDEN + SEED_C) | 1
        total_a += _mix(tl.sum(word * odd_a, 0)) * odd_c
        total_b += _mix(tl.sum(word * odd_b, 0)) * odd_c
        odd_ones += ((word & mask) == mask).to(tl.int32)
    tail = words // BLOCK
    if (tail >= first) & (tail < first + SPAN) & (words > tail * BLOCK):
        at = tail * BLOCK + lanes
        word = tl.load(x_ptr + at, mask=at < words, other=0).to(tl.int64)
        word = word & ((1 << BITS) - 1)
        odd_c = _mix((tail + 1) * GOLDEN + SEED_C) | 1
        total_a += _mix(tl.sum(word * odd_a, 0)) * odd_c
        total_b += _mix(tl.sum(word * odd_b, 0)) * odd_c
        odd_ones += ((word & mask) == mask).to(tl.int32)
    spoiled = tl.sum(odd_ones.to(tl.int64), 0)
    spoiled = tl.where(mask == 0, zero, spoiled)
    tl.store(out_ptr + span * 3, total_a)
    tl.store(out_ptr + span * 3 + 1, total_b)
    tl.store(out_ptr + span * 3 + 2, spoiled)
