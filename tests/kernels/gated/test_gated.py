"""silu and silu_mul: bits of the definition, no tail path, fused equals unfused, gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu as stock_silu

from zeromismatch.kernels import adversarial, bits
from zeromismatch.kernels.contract import implementations
from zeromismatch.kernels.cpu.load import available_variants, core
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.gated import cpu, silu, silu_mul
from zeromismatch.kernels.reference import gated as definition
from zeromismatch.kernels.reference.exp import exp32

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("variant", available_variants())
def test_the_reference_exponential_has_the_core_bits(variant: str) -> None:
    edges = torch.tensor([0.0, -0.0, 88.0, -87.33654, torch.inf, -torch.inf, 1e-40, -1e-40])
    x = torch.cat((torch.linspace(-120, 120, 15_001), torch.randn(15_000) * 10, edges))
    y = torch.empty_like(x)
    core(variant).call("exp", x, y, x.numel())
    assert bits.equal(y, exp32(x))
    inside = (x > -87.3) & (x < 88)
    assert float((y[inside].double() / x[inside].double().exp() - 1).abs().max()) < 2e-7


@pytest.mark.parametrize("variant", available_variants())
def test_the_exponential_passes_nan_through(variant: str) -> None:
    x = torch.full((19,), torch.nan)
    y = torch.zeros(19)
    core(variant).call("exp", x, y, 19)
    assert y.isnan().all()
    assert exp32(x).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_gives_the_bits_of_the_definition(dtype: torch.dtype) -> None:
    for rows, width in ((40, 1536), (3, 7), (1, 1), (33, 37)):
        gate = adversarial.rows(rows, width, seed=width, dtype=dtype, scale=0.3)
        up = adversarial.rows(rows, width, seed=width + 1, dtype=dtype)
        for each in implementations(cpu.GATED[dtype].id):
            if each.missing() is None:
                assert bits.equal(each.run(gate, up), definition.silu_mul(gate, up)), each.name
        for each in implementations(cpu.ACTIVATION[dtype].id):
            if each.missing() is None:
                assert bits.equal(each.run(gate), definition.silu(gate)), each.name


def elements_that_change(activation: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Elements whose bits depend on where they stand: each row alone against the whole."""
    alone = torch.stack([activation(row.clone()) for row in x])
    return int((bits.int_view(alone) != bits.int_view(activation(x))).sum())


def test_an_element_depends_on_nothing_but_itself(threads: int) -> None:
    x = torch.randn(200, 37) * 4
    assert elements_that_change(silu, x) == 0
    assert elements_that_change(lambda rows: silu_mul(rows, rows), x) == 0


def test_stock_silu_is_red_at_an_odd_width() -> None:
    assert elements_that_change(stock_silu, torch.randn(200, 37) * 4) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_equals_unfused_forward_and_backward(dtype: torch.dtype) -> None:
    gate, up = (torch.randn(9, 37).to(dtype).requires_grad_() for _ in range(2))
    dy = torch.randn(9, 37).to(dtype)
    fused, unfused = silu_mul(gate, up), silu(gate) * up
    assert bits.equal(fused, unfused)
    got = torch.autograd.grad(fused, (gate, up), dy)
    wanted = torch.autograd.grad(unfused, (gate, up), dy)
    assert all(map(bits.equal, got, wanted))


def test_gradients_agree_with_fp64() -> None:
    gate, up = ((torch.randn(500) * 4).requires_grad_() for _ in range(2))
    wide = [each.detach().double().requires_grad_() for each in (gate, up)]
    dy = torch.randn(500)
    got = torch.autograd.grad(silu_mul(gate, up), (gate, up), dy)
    wanted = torch.autograd.grad(wide[0] * wide[0].sigmoid() * wide[1], wide, dy.double())
    for one, other in zip(got, wanted, strict=True):
        assert float((one.double() - other).abs().max() / other.abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_gives_the_gradient_of_the_definition(dtype: torch.dtype) -> None:
    for rows, width in ((40, 67), (3, 7), (1, 1)):
        dy, gate, up = (
            adversarial.rows(rows, width, seed=seed, dtype=dtype, scale=0.3) for seed in (1, 2, 3)
        )
        alone, gated = definition.silu_grad(dy, gate), definition.silu_mul_grad(dy, gate, up)
        for each in implementations(cpu.ACTIVATION_GRADIENTS[dtype].id):
            if each.missing() is None:
                assert bits.equal(each.run(dy, gate), alone), each.name
        for each in implementations(cpu.GATED_GRADIENTS[dtype].id):
            if each.missing() is None:
                assert all(map(bits.equal, each.run(dy, gate, up), gated)), each.name


def test_a_gradient_element_depends_on_nothing_but_itself(threads: int) -> None:
    x = (torch.randn(200, 37) * 4).requires_grad_()

    def slope(rows: Tensor) -> Tensor:
        leaf = rows.detach().requires_grad_()
        return torch.autograd.grad(silu(leaf).sum(), leaf)[0]

    assert elements_that_change(slope, x) == 0


def test_shapes_layouts_and_bad_tensors() -> None:
    x = torch.randn(4, 6, 5)
    assert bits.equal(silu(x.transpose(0, 2)), silu(x).transpose(0, 2).contiguous())
    assert silu_mul(x[:0], x[:0]).shape == (0, 6, 5)
    with pytest.raises(ContractError, match="same shape and dtype"):
        silu_mul(x, x.bfloat16())
    with pytest.raises(ContractError, match="no contract covers"):
        silu(x.double())
