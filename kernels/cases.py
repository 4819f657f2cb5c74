"""The certification cases of every operator: shapes and data on which a wrong kernel shows.

Quick sweeps (first use) take a few cases with odd sizes on both sides of the vector width and the
cache blocks; full sweeps (``zm kernels certify``) walk the row counts at which kernels change their
tiles. The references are slow loops over the reduced axis, so the other axes stay small; quick
cases also stay below the size at which torch starts threads, which a busy machine would make slow.
Data comes from :mod:`.adversarial`; arguments are positional, in the order of the contract's
reference.

    next(linear(get_contract("linear.chain.float32.cpu.v1"), True, 0, ())).label

Operators over a cache are in :mod:`.cases_attention`, gradients of row operators and attention in
:mod:`.cases_gradient`.

Legend: T rows, K inputs, N outputs, H width, V vocabulary, D head size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from . import adversarial, cases_attention, cases_gpu, cases_gradient
from . import cases_moe as cases_moe  # registers its own
from . import cases_recurrent as cases_recurrent  # registers its own
from .certify import register_cases, register_stock
from .contract import Contract
from .linear.gpu import contract_id
from .reference.logprob import logprob as reference_logprob
from .trial import Case

QUICK_ROWS = (1, 7, 40, 130)
FULL_ROWS = (
    1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512,
    513,
)  # fmt: skip
REDUCED = (576, 37, 257, 200, 256, 1, 600, 16, 255, 130, 1536)
OUTPUTS = (64, 1, 33, 17, 16, 130, 15)
WIDTHS = (576, 64, 257, 33, 7, 16, 1, 320)
VOCABULARIES = (1000, 17, 333, 160, 3, 16, 1)

Key = tuple[int, ...]


class _Data:
    """A contract's dtype and device, and a fresh seed for every tensor."""

    def __init__(self, contract: Contract, seed: int) -> None:
        self.dtype = getattr(torch, contract.dtype)
        self.device = "cpu" if contract.device == "cpu" else "cuda"
        self.seed = seed * 1_000_003

    def rows(
        self, num_rows: int, width: int, *, scale: float = 1.0, kind: str | None = None
    ) -> Tensor:
        self.seed += 1
        return adversarial.rows(
            num_rows,
            width,
            seed=self.seed,
            dtype=self.dtype,
            device=self.device,
            scale=scale,
            kind=kind,
        )

    def vector(self, width: int, *, scale: float = 1.0) -> Tensor:
        return self.rows(1, width, scale=scale, kind="plain")[0]

    def integers(self, shape: tuple[int, ...], high: int) -> Tensor:
        self.seed += 1
        return adversarial.integers(shape, high, seed=self.seed, device=self.device)

    def uniform(self, num_rows: int, low: float, high: float) -> Tensor:
        """fp32 [num_rows], whatever the contract's dtype."""
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        return (torch.rand(num_rows, generator=generator) * (high - low) + low).to(self.device)


def sizes(quick: bool, *axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Row counts, each with the next size of every other axis in turn."""
    for step, num_rows in enumerate(QUICK_ROWS if quick else FULL_ROWS):
        yield (num_rows, *(axis[step % len(axis)] for axis in axes))


def linear(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, (t, k, n) in enumerate(sizes(quick, REDUCED, OUTPUTS)):
        bias = data.vector(n) if step % 2 else None
        wide_output = torch.float32 if step % 3 == 2 else None
        yield Case(
            label=f"rows {t}, {k} to {n}",
            arguments=(data.rows(t, k), data.rows(n, k, scale=0.1), bias, wide_output),
            rows=(0,),
        )


def lm_head(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    for case in linear(contract, quick, seed, key):
        yield Case(label=case.label, arguments=case.arguments[:3], rows=(0,))


def linear_grad_input(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for t, n, k in sizes(quick, REDUCED, OUTPUTS):
        yield Case(
            label=f"rows {t}, {n} to {k}",
            arguments=(data.rows(t, n), data.rows(n, k, scale=0.1), None),
            rows=(0,),
        )


def linear_grad_weight(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, (t, k, n) in enumerate(sizes(quick, WIDTHS[1:], OUTPUTS[5:])):
        start = data.rows(n, k).float() if step % 2 else None
        yield Case(
            label=f"tokens {t}, [{n}, {k}]",
            arguments=(data.rows(t, n), data.rows(t, k), start, None),
        )


def linear_grad_bias(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, (t, n) in enumerate(sizes(quick, WIDTHS)):
        start = data.vector(n).float() if step % 2 else None
        yield Case(label=f"tokens {t}, [{n}]", arguments=(data.rows(t, n), start, None))


def embedding(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for t, h, v in sizes(quick, WIDTHS, VOCABULARIES):
        yield Case(
            label=f"rows {t} of [{v}, {h}]",
            arguments=(data.integers((t,), v), data.rows(v, h)),
            rows=(0,),
        )


def embedding_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, (t, h, v) in enumerate(sizes(quick, WIDTHS, VOCABULARIES)):
        start = data.rows(v, h).float() if step % 2 else None
        yield Case(
            label=f"tokens {t} into [{v}, {h}]",
            arguments=(data.rows(t, h), data.integers((t,), min(v, 9)), v, start),
        )


def logprob(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for t, v in sizes(quick, VOCABULARIES):
        temperature = data.uniform(t, 0.3, 2.0)
        temperature[::3] = 1.0
        yield Case(
            label=f"rows {t}, vocabulary {v}",
            arguments=(data.rows(t, v, scale=0.5), data.integers((t,), v), temperature),
            rows=(0, 1, 2),
        )


def logprob_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for case in logprob(contract, quick, seed, key):
        num_rows = case.arguments[0].shape[0]
        _, row_max, log_sum = reference_logprob(*case.arguments)
        grad = data.uniform(num_rows, -2.0, 2.0)
        yield Case(
            label=case.label,
            arguments=(*case.arguments, row_max, log_sum, grad),
            rows=(0, 1, 2, 3, 4, 5),
        )


def rmsnorm(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, (t, h) in enumerate(sizes(quick, WIDTHS)):
        residual = data.rows(t, h) if step % 2 == 0 else None
        yield Case(
            label=f"rows {t}, width {h}",
            arguments=(data.rows(t, h), data.vector(h), 1e-5, step % 3 == 1, residual),
            rows=(0,) if residual is None else (0, 4),
        )


def rmsnorm_wide(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    """Weights of fp32 beside bf16 rows too."""
    for step, case in enumerate(rmsnorm(contract, quick, seed, key)):
        x, weight, eps, _, residual = case.arguments
        weight = weight.float() / 3.0 if step % 2 else weight
        rows = (0,) if residual is None else (0, 3)
        yield Case(label=case.label, arguments=(x, weight, eps, residual), rows=rows)


def rotary_table(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, (t, half) in enumerate(sizes(quick, (32, 1, 40, 64, 7))):
        frequency = 10_000.0 ** (
            -torch.arange(half, dtype=torch.float64, device=data.device) / half
        )
        positions = data.integers((t,), (100, 5000, 131_072)[step % 3])
        scaling = 1.0 if step % 2 else 1.2079
        yield Case(
            label=f"rows {t}, {half} frequencies",
            arguments=(frequency, positions, scaling),
            rows=(1,),
        )


def rotary(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for step, (t, head, heads) in enumerate(sizes(quick, (64, 80, 16, 96, 2), (3, 1, 9, 2))):
        width = (
            head if step % 2 == 0 else max(2, head // 4 * 2)
        )  # partial rotary: columns left over
        table = (
            torch.cos(data.rows(t, 2 * width).float()),
            torch.sin(data.rows(t, 2 * width).float()),
        )
        x = data.rows(t, heads * head).view(t, heads, head)
        cos, sin = (each[:, :width].contiguous() for each in table)
        yield Case(
            label=f"rows {t}, {heads} heads of {head}, {width} turned",
            arguments=(x, cos, sin),
            rows=(0, 1, 2),
        )


def activation(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for t, h in sizes(quick, WIDTHS):
        yield Case(label=f"rows {t}, width {h}", arguments=(data.rows(t, h, scale=0.3),), rows=(0,))


def gated(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for t, h in sizes(quick, WIDTHS):
        yield Case(
            label=f"rows {t}, width {h}",
            arguments=(data.rows(t, h, scale=0.3), data.rows(t, h)),
            rows=(0, 1),
        )


def softcap(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for t, v in sizes(quick, VOCABULARIES):
        yield Case(
            label=f"rows {t}, vocabulary {v}", arguments=(data.rows(t, v), 30.0), rows=(0,)
        )


def softcap_grad(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for t, v in sizes(quick, VOCABULARIES):
        arguments = (data.rows(t, v), data.rows(t, v), 30.0)
        yield Case(label=f"rows {t}, vocabulary {v}", arguments=arguments, rows=(0, 1))


def sampling(contract: Contract, quick: bool, seed: int, key: Key) -> Iterator[Case]:
    data = _Data(contract, seed)
    for t, v in sizes(quick, VOCABULARIES):
        logits = data.rows(t, v, scale=0.2)
        logits[::5, v // 3] = float("-inf")
        logits[4::9] = logits[4::9].round()  # ties
        temperature = data.uniform(t, 0.1, 2.0)
        temperature[::4] = 0.0
        arguments = (logits, data.integers((t,), 2**62), data.integers((t,), 10_000), temperature)
        yield Case(label=f"rows {t}, vocabulary {v}", arguments=arguments, rows=(0, 1, 2, 3))


def stock_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """What torch runs instead: another order at other row counts."""
    return functional.linear(x, weight, bias).to(out_dtype or x.dtype)


for _cases in (
    linear, lm_head, linear_grad_input, linear_grad_weight, linear_grad_bias, embedding,
    embedding_grad, logprob, logprob_grad, rmsnorm, rmsnorm_wide, rotary_table, rotary, activation,
    gated, softcap, softcap_grad, sampling,
):  # fmt: skip
    register_cases(_cases.__name__, _cases)
for _name, _cases in {"activation_gelu": activation, "gated_gelu": gated}.items():
    register_cases(_name, _cases)
register_cases("attention", cases_attention.attention, device="cpu")
register_cases("attention_grad", cases_gradient.attention_grad, device="cpu")
for _cases in (
    cases_gradient.rmsnorm_grad, cases_gradient.rmsnorm_wide_grad, cases_gradient.activation_grad,
    cases_gradient.gated_grad,
):  # fmt: skip
    register_cases(_cases.__name__, _cases)
register_cases("activation_gelu_grad", cases_gradient.activation_grad)
register_cases("gated_gelu_grad", cases_gradient.gated_grad)
for _cases in (
    cases_gpu.gemm, cases_gpu.logprob, cases_gpu.logprob_grad, cases_gpu.attention,
    cases_gpu.attention_grad, cases_gpu.norm_rotary,
):  # fmt: skip
    register_cases(_cases.__name__, _cases, device="sm90")
for _dtype in ("float32", "bfloat16"):
    register_stock(f"linear.chain.{_dtype}.cpu.v1", stock_linear)
for _dtype in ("float32", "bfloat16", "float16"):
    register_stock(contract_id("gemm", getattr(torch, _dtype)), cases_gpu.stock_gemm)
    register_stock(f"attention.split1024.{_dtype}.sm90.v1", cases_gpu.stock_attention)
for _dtype in ("bfloat16", "float16"):
    register_stock(f"attention.flash3.{_dtype}.sm90.v1", cases_gpu.stock_attention)
