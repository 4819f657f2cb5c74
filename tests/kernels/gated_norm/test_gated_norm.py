"""Gated RMSNorms and the L2 norm beside transformers' modules: exactness, gradients, refusals."""

import pytest
import torch
from torch.nn import functional

from zeromismatch.kernels import bits
from zeromismatch.kernels.accumulation import Accumulators
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.gated_norm import gated_rmsnorm, l2norm

ROWS, WIDTH, EPS = 19, 48, 1e-6
ORDERS = ("silu_after", "sigmoid_after", "silu_before")
DTYPES = (torch.float32, torch.bfloat16)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stock(order, x, gate, weight, group):
    """Transformers' module of that order."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    if order == "silu_before":
        module = nemotron.Zamba2RMSNormGated(WIDTH, group_size=group, eps=EPS)
    else:
        kind = qwen.Qwen3NextRMSNormGated if order == "silu_after" else kimi.KimiLinearRMSNormGated
        module = kind(WIDTH, eps=EPS)
    module.weight = torch.nn.Parameter(weight.detach())
    return module(x, gate).detach()


def exact(order, x, gate, weight, group):
    """The formula in fp64, without a rounding."""
    act = torch.sigmoid(gate) if order == "sigmoid_after" else functional.silu(gate)
    h = x * act if order == "silu_before" else x
    parts = h.unflatten(-1, (-1, group))
    y = weight * (parts * (parts.square().mean(-1, keepdim=True) + EPS).rsqrt()).flatten(-2)
    return y if order == "silu_before" else y * act


def case(order, x_dtype, other_dtype):
    tensors = drawn(ROWS, WIDTH), drawn(ROWS, WIDTH, seed=1), 1.0 + 0.1 * drawn(WIDTH, seed=2)
    dtypes = x_dtype, other_dtype, other_dtype
    group = 16 if order == "silu_before" else WIDTH
    return [each.to(dtype) for each, dtype in zip(tensors, dtypes, strict=True)], group


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("other_dtype", DTYPES)
def test_as_exact_as_the_module_it_replaces_in_every_mix_of_dtypes(order, x_dtype, other_dtype):
    tensors, group = case(order, x_dtype, other_dtype)
    got = gated_rmsnorm(*tensors, EPS, order=order, group=group)
    theirs = stock(order, *tensors, group)
    wanted = exact(order, *(each.double() for each in tensors), group)
    assert got.dtype == theirs.dtype
    own, bar = ((each.double() - wanted).abs().max() for each in (got, theirs))
    assert float(own) <= 2 * float(bar)


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_against_fp64_and_in_micro_batches(order):
    tensors, group = case(order, torch.float32, torch.float32)
    x, gate, weight = (each.requires_grad_() for each in tensors)
    up = drawn(ROWS, WIDTH, seed=3)
    out = gated_rmsnorm(x, gate, weight, EPS, order=order, group=group)
    got = torch.autograd.grad(out, tensors, up)
    leaves = [each.detach().double().requires_grad_() for each in tensors]
    wanted = torch.autograd.grad(exact(order, *leaves, group), leaves, up.double())
    for a, b in zip(got, wanted, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < 2e-6
    sums = Accumulators({"w": weight})
    for part in (slice(0, 5), slice(5, ROWS)):
        with sums.micro_batch():
            gated_rmsnorm(
                x[part], gate[part], weight, EPS, order=order, group=group
            ).backward(up[part])
    assert bits.equal(sums.gradient("w"), got[2])


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm_is_as_exact_as_stock(divide, dtype):
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    x = drawn(ROWS, 3, WIDTH).to(dtype).requires_grad_()
    module = kimi if divide else qwen
    got = l2norm(x, EPS, divide=divide, scale=0.25)
    wide = x.detach().double().requires_grad_()
    wanted = module.l2norm(wide, eps=EPS) * 0.25
    theirs = module.l2norm(x.float(), eps=EPS) * 0.25
    own, bar = ((each - wanted).detach().abs().max() for each in (got.double(), theirs.double()))
    assert got.dtype == torch.float32
    assert float(own) <= 2 * float(bar)
    up = drawn(*x.shape, seed=4)
    (mine,), (other,) = torch.autograd.grad(got, x, up), torch.autograd.grad(wanted, wide, up)
    limit = 1e-6 if dtype == torch.float32 else 1e-2
    assert float((mine.double() - other).abs().max() / other.abs().max()) < limit


def test_what_does_not_fit_is_refused():
    x, weight = drawn(3, WIDTH), drawn(WIDTH)
    with pytest.raises(ContractError, match="whole groups"):
        gated_rmsnorm(x, x, weight, EPS, order="silu_before", group=20)
    with pytest.raises(ContractError, match="has no groups"):
        gated_rmsnorm(x, x, weight, EPS, order="silu_after", group=16)
    with pytest.raises(ContractError, match="check which layer"):
        gated_rmsnorm(x, x[:2], weight, EPS, order="silu_after")
    with pytest.raises(ContractError, match="l2norm takes rows"):
        l2norm(x.double(), EPS, divide=True)
