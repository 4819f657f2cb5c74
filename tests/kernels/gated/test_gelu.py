"""gelu, gelu_mul and the softcap: bits of the definition, fused as unfused, gradients, edges."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu as stock_gelu

from zeromismatch.kernels import adversarial, bits
from zeromismatch.kernels.contract import implementations
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.gated import cpu, gelu, gelu_mul, softcap
from zeromismatch.kernels.reference import gated as definition

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((40, 576), (3, 7), (1, 1), (33, 37))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_gives_the_bits_of_the_definition(dtype: torch.dtype) -> None:
    for rows, width in SHAPES:
        dy, gate, up = (
            adversarial.rows(rows, width, seed=seed, dtype=dtype, scale=0.3) for seed in (1, 2, 3)
        )
        for contracts, wanted, arguments in (
            (cpu.ACTIVATION_GELU, definition.gelu, (gate,)),
            (cpu.GATED_GELU, definition.gelu_mul, (gate, up)),
            (cpu.ACTIVATION_GELU_GRADIENTS, definition.gelu_grad, (dy, gate)),
            (cpu.GATED_GELU_GRADIENTS, definition.gelu_mul_grad, (dy, gate, up)),
        ):
            for each in implementations(contracts[dtype].id):
                if each.missing() is None:
                    got, expected = each.run(*arguments), wanted(*arguments)
                    pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else (
                        (got, expected),
                    )  # fmt: skip
                    assert all(bits.equal(*pair) for pair in pairs), each.name


def test_every_variant_gives_the_softcap_of_the_definition() -> None:
    for rows, width in SHAPES:
        dy, x = (adversarial.rows(rows, width, seed=seed) for seed in (1, 2))
        for each in implementations(cpu.SOFTCAP[torch.float32].id):
            if each.missing() is None:
                assert bits.equal(each.run(x, 30.0), definition.softcap(x, 30.0)), each.name
        for each in implementations(cpu.SOFTCAP_GRADIENTS[torch.float32].id):
            if each.missing() is None:
                wanted = definition.softcap_grad(dy, x, 30.0)
                assert bits.equal(each.run(dy, x, 30.0), wanted), each.name


def elements_that_change(activation: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Elements whose bits depend on where they stand: each row alone against the whole."""
    alone = torch.stack([activation(row.clone()) for row in x])
    return int((bits.int_view(alone) != bits.int_view(activation(x))).sum())


def test_an_element_depends_on_nothing_but_itself(threads: int) -> None:
    x = torch.randn(200, 37) * 4
    assert elements_that_change(gelu, x) == 0
    assert elements_that_change(lambda rows: gelu_mul(rows, rows), x) == 0
    assert elements_that_change(lambda rows: softcap(rows, 3.0), x) == 0


def test_stock_gelu_is_red_at_an_odd_width() -> None:
    x = torch.randn(200, 37) * 4
    assert elements_that_change(lambda rows: stock_gelu(rows, approximate="tanh"), x) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_equals_unfused_forward_and_backward(dtype: torch.dtype) -> None:
    gate, up = (torch.randn(9, 37).to(dtype).requires_grad_() for _ in range(2))
    dy = torch.randn(9, 37).to(dtype)
    fused, unfused = gelu_mul(gate, up), gelu(gate) * up
    assert bits.equal(fused, unfused)
    got = torch.autograd.grad(fused, (gate, up), dy)
    wanted = torch.autograd.grad(unfused, (gate, up), dy)
    assert all(map(bits.equal, got, wanted))


def test_values_are_as_close_to_fp64_as_stock() -> None:
    x = torch.linspace(-12, 12, 50_001)
    exact = stock_gelu(x.double(), approximate="tanh")
    ours = (gelu(x).double() - exact).abs()
    stock = (stock_gelu(x, approximate="tanh").double() - exact).abs()
    assert float(ours.max()) <= 2 * float(stock.max())
    assert float(ours.mean()) <= 2 * float(stock.mean())


def test_gradients_agree_with_fp64() -> None:
    gate, up = ((torch.randn(500) * 4).requires_grad_() for _ in range(2))
    wide = [each.detach().double().requires_grad_() for each in (gate, up)]
    dy = torch.randn(500)
    got = torch.autograd.grad(gelu_mul(gate, up), (gate, up), dy)
    exact = stock_gelu(wide[0], approximate="tanh") * wide[1]
    wanted = torch.autograd.grad(exact, wide, dy.double())
    for one, other in zip(got, wanted, strict=True):
        assert float((one.double() - other).abs().max() / other.abs().max()) < 1e-5
    (capped,) = torch.autograd.grad(softcap(gate, 5.0), gate, dy)
    (other,) = torch.autograd.grad(5.0 * torch.tanh(wide[0] / 5.0), wide[0], dy.double())
    assert float((capped.double() - other).abs().max() / other.abs().max()) < 1e-5


def test_huge_inputs_saturate_and_nan_passes() -> None:
    x = torch.tensor([3e38, -3e38, torch.inf, -torch.inf, 0.0, -0.0], requires_grad=True)
    y = gelu(x)
    assert torch.equal(y[[0, 2]], x[[0, 2]])
    assert float(y[[1, 3, 4, 5]].detach().abs().max()) < 1e-30
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(slope[[0, 2, 4, 5]], torch.tensor([1.0, 1.0, 0.5, 0.5]))
    assert float(slope[[1, 3]].abs().max()) < 1e-30
    assert gelu(torch.full((19,), torch.nan)).isnan().all()


def test_shapes_layouts_and_bad_tensors() -> None:
    x = torch.randn(4, 6, 5)
    assert bits.equal(gelu(x.transpose(0, 2)), gelu(x).transpose(0, 2).contiguous())
    assert gelu_mul(x[:0], x[:0]).shape == (0, 6, 5)
    with pytest.raises(ContractError, match="same shape and dtype"):
        gelu_mul(x, x.bfloat16())
    with pytest.raises(ContractError, match="no contract covers"):
        gelu(x.double())
    with pytest.raises(ContractError, match="no contract covers"):
        softcap(x.bfloat16(), 30.0)
    with pytest.raises(ContractError, match="leave the cap out"):
        softcap(x, 0.0)
