"""A row of a linear layer depends on that row and the weights alone; its bits are defined."""

import pytest
import torch

from zeromismatch.kernels import adversarial, bits
from zeromismatch.kernels.contract import Implementation, implementations
from zeromismatch.kernels.cpu.load import DOTS, cpu_flags, missing
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.linear import contract_id, linear
from zeromismatch.kernels.reference import linear as reference

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 1, 1), (2, 5, 16), (4, 33, 7), (7, 16, 64), (15, 40, 70), (33, 17, 260)]
THREADS = [1, 2, 3]


def usable(op: str, dtype: torch.dtype) -> list[Implementation]:
    return [each for each in implementations(contract_id(op, dtype)) if each.missing() is None]


def operands(rows: int, outputs: int, inputs: int, dtype: torch.dtype = torch.float32):
    x = adversarial.rows(rows, inputs, seed=rows, dtype=dtype)
    weight = adversarial.rows(outputs, inputs, seed=outputs + 100, dtype=dtype, scale=0.5)
    bias = adversarial.rows(1, outputs, seed=inputs, dtype=dtype, kind="wide")[0]
    return x, weight, bias


@pytest.fixture
def thread_count():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_every_variant_has_the_bits_of_the_reference(size, dtype):
    x, weight, bias = operands(*size, dtype)
    for given in (None, bias):
        for out_dtype in (torch.float32, dtype):
            expected = reference.linear(x, weight, given, out_dtype)
            for each in usable("linear", dtype):
                found = each.run(x, weight, given, out_dtype)
                assert bits.equal(found, expected), (
                    each.name,
                    bits.first_difference(found, expected),
                )


def test_the_reference_itself_depends_on_its_order():
    x, weight, _ = operands(15, 40, 70)
    reversed_order = reference.linear(x.flip(1), weight.flip(1))
    differing = ~bits.equal_rows(reference.linear(x, weight), reversed_order)
    assert differing.float().mean() > 0.5  # else the data would show nothing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(40, 50, 600), (3, 18, 4500), (1, 18, 4500)])
def test_variants_agree_across_cache_blocks_and_pauses_of_the_chain(size, dtype):
    x, weight, bias = operands(*size, dtype)
    first, *others = usable("linear", dtype)
    expected = first.run(x, weight, bias)
    for each in others:
        assert bits.equal(each.run(x, weight, bias), expected), each.name


@pytest.mark.parametrize("inputs", [64, 129, 400])
@pytest.mark.parametrize("exponent", [0, -56, -63, -70, -120, 60])
def test_bf16_products_near_the_ends_of_fp32_have_the_bits_of_their_definition(inputs, exponent):
    """Subnormal sums, subnormal operands, overflow and NaN: what a dot instruction would flush."""
    x, weight, _ = operands(9, 20, inputs, torch.bfloat16)
    x, weight = x * 2.0**exponent, weight * 2.0**exponent
    x[3, 1], x[5, 2], weight[7, 0] = float("nan"), float("inf"), 2.0**-133
    expected = reference.linear(x, weight, None, torch.float32)
    if exponent == -70:
        assert (expected.abs()[expected != 0] < 2.0**-126).any()
    for each in usable("linear", torch.bfloat16):
        found = each.run(x, weight, None, torch.float32)
        assert bits.equal(found.isnan(), expected.isnan())
        assert bits.equal(found.nan_to_num(), expected.nan_to_num()), each.name


def test_dot_products_serve_only_where_the_processor_rounds_after_each_product():
    reason = missing(DOTS)
    names = [each.name for each in usable("linear", torch.bfloat16)]
    assert (f"core-{DOTS}" in names) == (reason is None)
    if "avx512_bf16" not in cpu_flags():
        assert reason == f"this processor cannot run {DOTS} code"
    assert f"core-{DOTS}" not in [each.name for each in usable("linear", torch.float32)]


@pytest.mark.parametrize("inputs", [576, 1536])
def test_no_farther_from_fp64_than_twice_stock(inputs):
    torch.manual_seed(0)
    x, weight = torch.randn(64, inputs), torch.randn(200, inputs)
    exact = x.double() @ weight.double().t()
    ours = (linear(x, weight) - exact).abs()
    stock = (torch.nn.functional.linear(x, weight) - exact).abs()
    assert ours.mean() <= 2 * stock.mean()
    assert ours.max() <= 2 * stock.max()


def test_a_long_chain_that_pauses_has_the_bits_of_the_reference():
    x, weight, _ = operands(2, 3, 4097)
    assert bits.equal(linear(x, weight), reference.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_row_count(dtype):
    x, weight, bias = operands(260, 50, 96, dtype)
    whole = linear(x, weight, bias)
    for rows in range(1, 260):
        assert bits.equal(linear(x[-rows:], weight, bias), whole[-rows:]), rows


def test_stock_linear_fails_the_same_row_count_test():
    x, weight, _ = operands(260, 50, 96)
    whole = torch.nn.functional.linear(x, weight)
    alone = torch.cat([torch.nn.functional.linear(row[None], weight) for row in x])
    assert not bits.equal(alone, whole)


@pytest.mark.parametrize("rows", [5, 64, 131])
def test_rows_do_not_depend_on_their_order_or_their_neighbours(rows):
    x, weight, _ = operands(rows, 70, 130)
    whole = linear(x, weight)
    order = torch.randperm(rows)
    assert bits.equal(linear(x[order], weight), whole[order])
    spoiled = x.clone()
    spoiled[1::2] = float("nan")
    found = linear(spoiled, weight)
    assert bits.equal(found[::2], whole[::2])
    assert found[1::2].isnan().all()


@pytest.mark.parametrize("rows", [1, 13, 100])
def test_bits_do_not_depend_on_the_thread_count(rows, thread_count):
    x, weight, bias = operands(rows, 200, 300)
    results = []
    for count in THREADS:
        thread_count(count)
        results.append(linear(x, weight, bias))
    assert all(bits.equal(each, results[0]) for each in results[1:])


def test_neither_strides_nor_leading_axes_matter():
    x, weight, bias = operands(24, 33, 40)
    expected = linear(x, weight, bias)
    strided = torch.stack((x, x), dim=2)[:, :, 1]
    transposed = weight.t().contiguous().t()
    assert not strided.is_contiguous()
    assert not transposed.is_contiguous()
    assert bits.equal(linear(strided, transposed, bias), expected)
    assert bits.equal(linear(x.view(2, 3, 4, 40), weight, bias).view(24, 33), expected)
    assert bits.equal(linear(x[0], weight, bias), expected[0])
    shifted = adversarial.misaligned(x)
    assert bits.equal(linear(shifted, adversarial.misaligned(weight), bias), expected)


def test_empty_sizes():
    assert linear(torch.empty(0, 8), torch.randn(5, 8)).shape == (0, 5)
    assert linear(torch.empty(2, 0, 8), torch.randn(5, 8)).shape == (2, 0, 5)
    bias = torch.randn(5)
    assert bits.equal(
        linear(torch.empty(3, 0), torch.empty(5, 0), bias), bias.expand(3, 5).contiguous()
    )


def test_bf16_rounds_the_fp32_result_once():
    x, weight, bias = operands(9, 31, 80, torch.bfloat16)
    wide = linear(x, weight, bias, out_dtype=torch.float32)
    assert bits.equal(linear(x, weight, bias), wide.to(torch.bfloat16))
    assert bits.equal(wide, linear(x.float(), weight.float(), bias.float()))


def test_bf16_rounding_keeps_nan_and_infinity():
    x = torch.tensor([[1.0], [float("inf")], [float("nan")], [3.4e38]], dtype=torch.bfloat16)
    found = linear(x, torch.ones(18, 1, dtype=torch.bfloat16))
    assert found[0].eq(1.0).all()
    assert found[1].eq(float("inf")).all()
    assert found[2].isnan().all()


def test_unusable_tensors_are_refused_with_the_next_step():
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    for arguments, words in [
        ((x.half(), weight.half()), "convert"),
        ((x.bfloat16(), weight), "convert"),
        ((x, weight[:, :7]), "which weight"),
        ((x, weight, torch.randn(5)), "which weight"),
        ((x.to("meta"), weight.to("meta")), "move both"),
    ]:
        with pytest.raises(ContractError, match=words):
            linear(*arguments)
    with pytest.raises(ContractError, match="cast the result"):
        linear(x, weight, out_dtype=torch.bfloat16)
