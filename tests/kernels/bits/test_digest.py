"""The digest: one definition, several speeds, and every fault that it must see."""

import statistics
import time

import pytest
import torch

from zeromismatch.kernels import bits
from zeromismatch.kernels.cpu.load import available_variants, core
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.reference import digest as definition

GOLDEN_ROWS = ["623a5da8c752cd28cb038087b8cac176", "cccf23f9456858095b105fbe979ff360"]
GOLDEN_TENSOR = "21bce2071d827f0034042661207decef"
WIDTHS = (1, 7, 16, 1023, 1024, 1025, 3000)


def random_bits(rows: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(rows, elements) > 0.5
    width = torch.zeros((), dtype=dtype).element_size()
    return torch.randint(0, 256, (rows, elements * width), dtype=torch.uint8).view(dtype)


def plain_digest(words: list[int], elements: int, code: int) -> tuple[int, int]:
    """The written definition once more, in Python integers."""
    mask, golden = (1 << 64) - 1, definition.GOLDEN

    def odd(seed: int, index: int) -> int:
        return definition.mix_int((golden * (index + 1) + seed) & mask) | 1

    lanes = []
    for seed in (0, definition.SEED_B):
        total = 0
        for block in range(0, len(words), 1024):
            part = sum(w * odd(seed, i) for i, w in enumerate(words[block : block + 1024])) & mask
            total += definition.mix_int(part) * odd(definition.SEED_C, block // 1024)
        lanes.append(total)
    head = definition.mix_int(((elements << 8 | code) * golden) & mask)
    return definition.mix_int((lanes[0] + head) & mask), definition.mix_int(
        (lanes[1] & mask) ^ head
    )


def test_reference_follows_its_written_definition() -> None:
    x = random_bits(1, 1500, torch.float32)
    words = [word & 0xFFFFFFFF for word in x.view(torch.int32)[0].tolist()]
    first, second = definition.digest_rows(x)[0].tolist()
    assert (first % 2**64, second % 2**64) == plain_digest(words, 1500, 1)


def test_digest_of_known_data_never_changes() -> None:
    x = torch.arange(2048, dtype=torch.float32).view(2, 1024)
    assert [bits.digest_hex(row) for row in bits.digest_rows(x)] == GOLDEN_ROWS
    assert bits.digest_tensor(x) == GOLDEN_TENSOR


@pytest.mark.parametrize("variant", ["avx512", "avx2", "portable"])
@pytest.mark.parametrize("dtype", list(definition.DTYPE_CODES), ids=str)
def test_every_variant_equals_the_reference(variant: str, dtype: torch.dtype) -> None:
    if variant not in available_variants():
        pytest.skip(f"this processor cannot run {variant}")
    code = definition.dtype_code(dtype)
    for width in WIDTHS:
        x = random_bits(3, width, dtype)
        out = torch.empty(3, 2, dtype=torch.int64)
        core(variant).call("digest_rows", x, 3, width, x.element_size(), code, out)
        assert torch.equal(out, definition.digest_rows(x)), width


@pytest.mark.parametrize("shape", [(1, 300_001), (3, 131_072), (5000, 64), (4, 50_000)])
def test_threads_and_shape_of_the_work_change_nothing(shape: tuple[int, int]) -> None:
    x = random_bits(*shape, torch.float32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(bits.digest_rows(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, definition.digest_rows(x)) for each in results)


def test_long_rows_are_cut_into_pieces_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_bits(3, 5000, torch.bfloat16)
    whole = definition.digest_rows(x)
    monkeypatch.setattr(definition, "_CHUNK_WORDS", 2048)
    assert torch.equal(definition.digest_rows(x), whole)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str
)
def test_every_single_bit_of_a_row_changes_both_lanes(dtype: torch.dtype) -> None:
    row = random_bits(1, 1030, dtype)
    view = bits.int_view(row)
    width = 8 * view.element_size()
    flipped = view.repeat(1030 * width, 1)
    index = torch.arange(1030 * width)
    one = torch.ones((), dtype=view.dtype)
    flipped[index, index // width] ^= torch.bitwise_left_shift(one, (index % width).to(view.dtype))
    digests = bits.digest_rows(flipped.view(dtype))
    assert (digests != bits.digest_rows(row)).all()
    assert len({tuple(each) for each in digests.tolist()}) == 1030 * width


def test_order_sign_of_zero_and_nan_payload_count() -> None:
    pairs = [
        (torch.tensor([1.0, 2.0, 5.0, 5.0]), torch.tensor([1.0, 2.0, 9.0, 9.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (
            torch.tensor([0x7FC00000]).int().view(torch.float32),
            torch.tensor([0x7FC00001]).int().view(torch.float32),
        ),
        (torch.tensor([1.0]), torch.tensor([1.0, 0.0])),
        (torch.zeros(1024), torch.zeros(1025)),
        (torch.zeros(0), torch.zeros(1)),
    ]
    for left, right in pairs:
        one, other = bits.digest_rows(left[None]), bits.digest_rows(right[None])
        assert (one != other).all()


def test_swapping_any_two_elements_or_blocks_shows() -> None:
    row = torch.randn(3 * 1024)
    original = bits.digest_rows(row[None])
    for _ in range(300):
        i, j = torch.randperm(row.numel())[:2].tolist()
        swapped = row.clone()
        swapped[i], swapped[j] = row[j], row[i]
        assert (bits.digest_rows(swapped[None]) != original).all()
    blocks = torch.cat((row[1024:2048], row[:1024], row[2048:]))
    assert (bits.digest_rows(blocks[None]) != original).all()


def test_two_flipped_signs_never_cancel() -> None:
    row = torch.randn(576)
    first, second = torch.triu_indices(576, 576, offset=1)
    original = bits.digest_rows(row[None])[0]
    for part in torch.arange(first.numel()).split(1 << 14):
        changed = row.repeat(part.numel(), 1)
        index = torch.arange(part.numel())
        changed[index, first[part]] *= -1
        changed[index, second[part]] *= -1
        assert (bits.digest_rows(changed) != original).all()


def test_same_bits_under_another_dtype_differ() -> None:
    zeros = [torch.zeros(1, 8, dtype=dtype) for dtype in definition.DTYPE_CODES]
    digests = {tuple(bits.digest_rows(each)[0].tolist()) for each in zeros}
    assert len(digests) == len(zeros)


def test_digest_ignores_strides_and_neighbours() -> None:
    x = torch.randn(6, 40)
    digests = bits.digest_rows(x)
    assert torch.equal(bits.digest_rows(x.t().contiguous().t()), digests)
    assert torch.equal(bits.digest_rows(x[2:3]), digests[2:3])
    assert torch.equal(bits.digest_rows(x.view(6, 5, 8)), digests)
    assert bits.digest_rows(x[:0]).shape == (0, 2)


def test_tensor_digest_sees_the_shape() -> None:
    x = torch.randn(4, 6)
    shapes = [(4, 6), (6, 4), (24,), (1, 24), (4, 6, 1), (2, 2, 6)]
    assert len({bits.digest_tensor(x.reshape(shape)) for shape in shapes}) == len(shapes)
    assert len(bits.digest_tensor(torch.tensor(3.0))) == len(bits.digest_tensor(x[:0])) == 32


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_unknown_dtype_and_scalars_are_refused() -> None:
    with pytest.raises(ContractError, match="no digest is defined"):
        bits.digest_rows(torch.zeros(2, 2, dtype=torch.complex32))
    with pytest.raises(ContractError, match="at least one dimension"):
        bits.digest_rows(torch.tensor(1.0))


def test_definition_serves_without_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 70)
    fast = bits.digest_rows(x)
    monkeypatch.setattr(bits, "_core_digest", lambda: None)
    assert torch.equal(bits.digest_rows(x), fast)


def test_a_call_on_a_small_row_costs_microseconds() -> None:
    x = torch.randn(1, 64)
    times = []
    for _ in range(300):
        started = time.perf_counter_ns()
        bits.digest_rows(x)
        times.append(time.perf_counter_ns() - started)
    assert statistics.median(times) < 60_000  # 5 in practice; the margin is for a loaded machine
