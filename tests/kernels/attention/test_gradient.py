"""Attention's backward: against independent fp64 autograd, deterministic, rows independent."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from zeromismatch.kernels import bits
from zeromismatch.kernels.attention import cpu, packed_attention, packed_batch
from zeromismatch.kernels.contract import implementations
from zeromismatch.kernels.dispatch import choose
from zeromismatch.kernels.reference.attention_grad import attention_grad as definition
from zeromismatch.kernels.trial import outputs

LENGTHS = (70, 1, 0, 33)
SETTINGS = (
    {"heads": 9, "kv_heads": 3, "dim": 64},
    {"heads": 4, "kv_heads": 1, "dim": 40, "window": 20},
    {"heads": 4, "kv_heads": 4, "dim": 16, "softcap": 3.0},
    {"heads": 4, "kv_heads": 2, "dim": 16, "window": 16, "sinks": True, "softcap": 5.0},
    {"heads": 2, "kv_heads": 1, "dim": 128, "sinks": True},
)


class Problem:
    """Leaves, options and an upstream gradient for one setting."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, sinks: bool = False, **options: float
    ) -> None:
        total = sum(LENGTHS)
        self.start = torch.tensor([0, *LENGTHS]).cumsum(0)
        self.leaves = [torch.randn(total, count, dim) for count in (heads, kv_heads, kv_heads)]
        self.leaves += [torch.randn(heads)] if sinks else []
        self.dout = torch.randn(total, heads, dim)
        self.options = {"scale": dim**-0.5, **options}

    def gradients(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in self.leaves]
        sinks = leaves[3] if len(leaves) == 4 else None
        out = packed_attention(*leaves[:3], self.start, sinks=sinks, **self.options)
        return list(torch.autograd.grad(out, leaves, self.dout.to(dtype)))

    def saved(self) -> tuple[object, ...]:
        """Arguments of the gradient contract, with the statistics of the forward."""
        batch = packed_batch(self.start)
        q, k, v, *rest = self.leaves
        sinks = rest[0] if rest else None
        pages = cpu.new_pages(batch.num_pages, *k.shape[1:], k.dtype)
        cpu.write_pages(*pages, k, v, batch.slot)
        index = (batch.query_start, batch.kv_len, batch.block_table)
        settings = (
            self.options["scale"], self.options.get("window", 0), self.options.get("softcap", 0.0),
        )  # fmt: skip
        run = choose(cpu.CONTRACTS[q.dtype].id).run
        saved = run(q, *pages, *index, *settings, sinks)
        return self.dout, q, k, v, *saved, batch.query_start, *settings, sinks

    def gradients_fp64(self) -> list[Tensor]:
        leaves = [x.double().requires_grad_() for x in self.leaves]
        requests = [slice(int(a), int(z)) for a, z in self.start.unfold(0, 2, 1)]
        parts = [attention_fp64(leaves, rows, **self.options) for rows in requests]
        return list(torch.autograd.grad(torch.cat(parts), leaves, self.dout.double()))


def attention_fp64(
    leaves: list[Tensor], rows: slice, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    group = leaves[0].shape[1] // leaves[1].shape[1]
    q, k, v = (x[rows].transpose(0, 1) for x in leaves[:3])
    scores = scale * q @ k.repeat_interleave(group, 0).transpose(1, 2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    where = torch.arange(q.shape[1])
    seen = where[None] <= where[:, None]
    if window:
        seen &= where[None] > where[:, None] - window
    scores = scores.masked_fill(~seen, -torch.inf)
    if len(leaves) == 4:
        scores = torch.cat((scores, leaves[3][:, None, None].expand(-1, q.shape[1], 1)), dim=-1)
    p = scores.softmax(-1)[..., : q.shape[1]]
    return (p @ v.repeat_interleave(group, 0)).transpose(0, 1)


def worst(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_agree_with_fp64(setting: dict[str, float]) -> None:
    problem = Problem(**setting)
    got, wanted = problem.gradients(), problem.gradients_fp64()
    assert max(map(worst, got, wanted)) < cpu.CONTRACTS[torch.float32].gradient_rtol


@pytest.mark.parametrize("setting", SETTINGS)
def test_bf16_gradients_are_within_storage_rounding(setting: dict[str, float]) -> None:
    problem = Problem(**setting)
    problem.leaves = [x.bfloat16().float() for x in problem.leaves]
    problem.dout = problem.dout.bfloat16().float()
    got, wanted = problem.gradients(torch.bfloat16), problem.gradients_fp64()
    assert max(map(worst, got, wanted)) < 3e-2


def test_the_gradient_check_sees_a_missing_scale() -> None:
    problem = Problem(**SETTINGS[0])
    dq, *_ = problem.gradients()
    assert worst(dq / problem.options["scale"], problem.gradients_fp64()[0]) > 1e-2


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[3]])
def test_repeats_and_threads_do_not_move_a_bit(setting: dict[str, float], threads: int) -> None:
    problem = Problem(**setting)
    torch.set_num_threads(1)
    wanted = problem.gradients()
    torch.set_num_threads(threads)
    for _ in range(3):
        assert all(map(bits.equal, problem.gradients(), wanted))


def test_a_request_has_the_same_gradients_alone_and_packed() -> None:
    problem = Problem(**SETTINGS[1])
    packed = problem.gradients()
    for start, stop in problem.start.unfold(0, 2, 1):
        leaves = [x[start:stop].clone().requires_grad_() for x in problem.leaves]
        out = packed_attention(*leaves, torch.tensor([0, stop - start]), **problem.options)
        alone = torch.autograd.grad(out, leaves, problem.dout[start:stop])
        assert all(
            bits.equal(one, other[start:stop]) for one, other in zip(alone, packed, strict=True)
        )


def test_a_query_gradient_depends_on_no_later_row() -> None:
    problem = Problem(heads=4, kv_heads=2, dim=32)
    dq = problem.gradients()[0][:40]
    leaves = [x[:40].clone().requires_grad_() for x in problem.leaves]
    out = packed_attention(*leaves, torch.tensor([0, 40]), **problem.options)
    assert bits.equal(torch.autograd.grad(out, leaves[0], problem.dout[:40])[0], dq)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_variant_gives_the_gradient_of_the_definition(setting: dict[str, float]) -> None:
    problem = Problem(**setting)
    if setting["dim"] % 16:
        problem.leaves[:3] = [pad(x, (0, -x.shape[2] % 16)) for x in problem.leaves[:3]]
        problem.dout = pad(problem.dout, (0, -problem.dout.shape[2] % 16))
    arguments = problem.saved()
    wanted = definition(*arguments)
    for each in implementations(cpu.GRADIENT.id):
        if each.missing() is None:
            assert all(map(bits.equal, outputs(each.run(*arguments)), outputs(wanted))), each.name
