"""Gates of recurrent layers: as exact as stock, gradients against fp64, micro-batches, refusals."""

import pytest
import torch
from torch.nn import functional

from zeromismatch.kernels import bits, gates
from zeromismatch.kernels.accumulation import Accumulators
from zeromismatch.kernels.errors import ContractError

DTYPES = (torch.float32, torch.bfloat16)
ROWS, HEADS, COLUMNS = 37, 5, 12


def drawn(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def wide(x):
    """fp32 as transformers' code asks for it, fp64 where the exact value is wanted."""
    return x if x.dtype == torch.float64 else x.float()


def stock_kimi(a, a_log, dt_bias):
    g = wide(a) + wide(dt_bias).view(HEADS, COLUMNS)
    softplus = torch.where(g > 20.0, g, torch.log(1.0 + torch.exp(g)))
    return -torch.exp(wide(a_log))[:, None] * softplus


def stock_time_step(dt, dt_bias):
    return functional.softplus(dt + dt_bias.to(dt.dtype)).clamp(0.001, 3.3)


def stock_discretised(x, dt, a_log):
    return wide(x) * wide(dt)[..., None], -torch.exp(wide(a_log)) * wide(dt)


OPERATORS = {  # name: (ours, transformers', tensors, how many of them are parameters)
    "sigmoid": (gates.sigmoid, torch.sigmoid, [drawn(ROWS, 33, scale=4.0)], 0),
    "sigmoid_mul": (
        gates.sigmoid_mul, lambda x, gate: x * torch.sigmoid(gate),
        [drawn(ROWS, 33), drawn(ROWS, 33, seed=1, scale=3.0)], 0,
    ),
    "relu_squared": (
        gates.relu_squared, lambda x: functional.relu(x).square(), [drawn(ROWS, 33)], 0,
    ),
    "decay": (
        gates.decay_gate,
        lambda a, a_log, b: -wide(a_log).exp() * functional.softplus(wide(a) + wide(b)),
        [drawn(ROWS, HEADS, scale=9.0), drawn(HEADS, seed=1), drawn(HEADS, seed=2)], 2,
    ),
    "decay per channel": (
        gates.decay_gate, stock_kimi,
        [drawn(ROWS, HEADS, COLUMNS, scale=9.0), drawn(HEADS, seed=1),
         drawn(HEADS * COLUMNS, seed=2)], 2,
    ),
    "time_step": (
        lambda dt, b: gates.time_step(dt, b, low=0.001, high=3.3), stock_time_step,
        [drawn(ROWS, HEADS, scale=6.0), drawn(HEADS, seed=1)], 1,
    ),
    "discretised": (
        gates.discretised, stock_discretised,
        [drawn(ROWS, HEADS, COLUMNS), drawn(ROWS, HEADS, seed=1).abs(), drawn(HEADS, seed=2)], 1,
    ),
    "skip": (
        lambda o, x, d: gates.skip(o.float(), x, d), lambda o, x, d: wide(o) + wide(d)[:, None] *
        wide(x),
        [drawn(ROWS, HEADS, COLUMNS), drawn(ROWS, HEADS, COLUMNS, seed=1), drawn(HEADS, seed=2)], 1,
    ),
}  # fmt: skip


def several(result):
    return result if isinstance(result, tuple) else (result,)


def run(function, tensors, dtype):
    """Outputs, and gradients of a fixed sum of them."""
    leaves = [each.to(dtype, copy=True).requires_grad_() for each in tensors]
    out = several(function(*leaves))
    up = [drawn(*each.shape, seed=9 + at).to(each.dtype) for at, each in enumerate(out)]
    return [each.detach() for each in out], torch.autograd.grad(out, leaves, up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_as_exact_as_stock_with_its_dtypes_forward_and_backward(name, dtype):
    ours, stock, tensors, _ = OPERATORS[name]
    tensors = [each.to(dtype).float() for each in tensors]  # one set of values for all three
    mine, exact = run(ours, tensors, dtype), run(stock, tensors, torch.float64)
    theirs = run(stock, tensors, dtype)
    assert [each.dtype for each in mine[0]] == [each.dtype for each in theirs[0]]
    for got, wanted, other in zip(*(part[0] for part in (mine, exact, theirs)), strict=True):
        own, bar = ((x.double() - wanted).abs().max() for x in (got, other))
        assert float(own) <= 2 * float(bar) + 1e-45
    limit = 1e-6 if dtype == torch.float32 else 2e-2
    for got, wanted in zip(mine[1], exact[1], strict=True):
        assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < limit


@pytest.mark.parametrize("name", [name for name, row in OPERATORS.items() if row[3]])
def test_gradients_of_parameters_do_not_depend_on_micro_batches(name):
    ours, _, tensors, count = OPERATORS[name]
    rows = tensors[:-count]
    parameters = [each.clone().requires_grad_() for each in tensors[-count:]]
    out = several(ours(*rows, *parameters))
    up = [drawn(*each.shape, seed=20) for each in out]
    whole = torch.autograd.grad(out, parameters, up)
    sums = Accumulators({str(at): each for at, each in enumerate(parameters)})
    for part in (slice(0, 11), slice(11, ROWS)):
        with sums.micro_batch():
            cut = several(ours(*(each[part] for each in rows), *parameters))
            torch.autograd.backward(cut, [each[part].contiguous() for each in up])
    for at, each in enumerate(whole):
        assert bits.equal(sums.gradient(str(at)), each)


def test_softplus_far_below_zero_keeps_its_digits():
    """log(1 + exp(x)) in fp32 is 0 from -17 on; log1p is not."""
    a = torch.tensor([[-30.0], [-16.5]])
    got = gates.decay_gate(a, torch.zeros(1), torch.zeros(1))
    wanted = -functional.softplus(a.double())
    assert float(((got - wanted) / wanted).abs().max()) < 1e-6


def test_what_does_not_belong_together_is_refused():
    x = drawn(3, 4)
    for call in (
        lambda: gates.sigmoid_mul(x, drawn(3, 5)),
        lambda: gates.decay_gate(x, drawn(3), drawn(4)),
        lambda: gates.time_step(x, drawn(3)),
        lambda: gates.time_step(x, drawn(4), low=1.0, high=0.5),
        lambda: gates.discretised(drawn(3, 4, 2), drawn(3, 5), drawn(4)),
        lambda: gates.skip(drawn(3, 4, 2).bfloat16(), drawn(3, 4, 2), drawn(4)),
        lambda: gates.sigmoid(x.double()),
    ):
        with pytest.raises(ContractError):
            call()
